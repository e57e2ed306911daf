"""The scripted customer: has a phone and acts on it when the agent's words ask for that.

It understands and speaks as every scripted user does (:mod:`environments.kit.scripted`), and besides::

    the agent                                the customer
    asks to look at or change the phone      does it, in order, and reports; sees its problem gone: next wish
    says that all is done, or asks if it is  looks whether its problem is gone
    proposes what it does not want           declines, and says what it wants

It changes nothing on its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from environments.kit.language.acts import Acts
from environments.kit.language.text import sentences
from environments.kit.scripted import Fact, Part, ScriptedUser, Wish, grammar_of, reader_of
from environments.telecom.sheets import NAMES
from environments.telecom.world import PLANS
from mua.environment.protocol import Task
from mua.environment.user import UserReply, UserTools
from mua.types import Json
from mua.users.personas import persona_of

# What a person does on the phone when asked to: the tools that a message asks for, and what it says of them.
#
# Which tools are meant is understood by :mod:`environments.kit.language.acts`; here it is read whether a thing is to be
# on or off, which mode, code or permission. What is left open is done in the way that mends a phone, or asked back.

MOST = 6
"""Things done for one message; of a longer list the rest is left, as people do."""
_MENDS = {"mobile_data": True, "data_roaming": True, "wifi": True}
"""Switches that are on in a phone that works; the others are off."""
_TURN = re.compile(
    r"\b(?:turn\w*|switch\w*|put\w*|set|get\w*|leav\w*|keep\w*|make sure|ensure)\b"
    r"(?:(?! then | after ).){0,60}?\b(on|off|enabled|disabled)\b"
    r"|\b(enabl\w+|activat\w+|disabl\w+|deactivat\w+|disconnect\w*|quit|stop|leave|out of)\b"
)
_OFF = re.compile(r"off|disabl|deactiv|disconn|quit|stop|leave|out of")
_MODE = re.compile(r"\b(auto(?:matic)?|[2345]g|lte)\b")
_RESEAT = re.compile(r"\bre-?(?:seat|insert)")
_PUK = re.compile(r"\b\d{8}\b")
_WORKS = re.compile(
    r"\b(?:work(?:s|ed|ing)?|solved|fixed|resolved|better|faster|gone|improved|any change|service again|network again"
    r"|try (?:it )?(?:again|now))\b"
)
_OFFER = re.compile(r"\b(?:shall|should|may|can|could) (?:i|we)\b|\bwould you like\b|\bdo you want\b")


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to do."""

    tool: str
    arguments: Json
    only_if_wrong: bool = False
    """Whether it is done only where a look shows that it is not so yet."""
    asks_back: str = ""
    """The grammar's rule that is said instead."""


def requests(instructs: Sequence[str], message: str) -> list[Request]:
    """What a message asks for, in its order; each thing once."""
    text = " . ".join(sentence.text for sentence in sentences(message))
    found: list[Request] = []
    instructs = _with_implied(instructs, text)
    for tool in instructs:
        found += [one for one in _requests(tool, text, instructs) if one not in found]
    return found


def _with_implied(instructs: Sequence[str], text: str) -> list[str]:
    """What is asked for besides: "make sure that it is on", "look whether it is on, and if not turn it on"."""
    found = list(instructs)
    if _RESEAT.search(text) and "reseat_sim" not in found:
        found.insert(0, "reseat_sim")
    for setting, names in NAMES.items():
        named = "|".join(map(re.escape, names))
        looked, conditional = f"check_{setting}" in found, _IF_SO.search(text) is not None
        sure = re.search(rf"\b(?:make sure|ensure)\b[^.]{{0,30}}\b(?:{named})", text) is not None
        if f"set_{setting}" not in found and (sure or (looked and conditional)):
            found.insert(found.index(f"check_{setting}") + 1 if looked else len(found), f"set_{setting}")
        if looked and sure and not conditional and not _LOOK.search(text):
            found.remove(f"check_{setting}")
    return found


_LOOK = re.compile(r"\b(?:check|look|see|whether|tell me)\b")
_IF_SO = re.compile(r"\bif\b.{0,40}\b(?:turn|switch|put|enable|disable|activate|deactivate)\b")


def wonders(message: str) -> bool:
    """Whether it is asked if the problem is gone."""
    asked = [one.text for one in sentences(message) if one.question]
    return any(_WORKS.search(text) is not None and _OFFER.search(text) is None for text in asked)


def _requests(tool: str, text: str, all_asked: Sequence[str]) -> Iterator[Request]:
    setting = tool.removeprefix("set_")
    looked = f"check_{setting}" in all_asked or re.search(r"\bif (?:it|they|this|that)\b", text) is not None
    if tool == "set_network_mode":
        yield Request(tool, {"mode": _mode(text)}, only_if_wrong=looked)
    elif tool.startswith("set_"):
        for on in _turns(setting, text):
            yield Request(tool, {"on": on}, only_if_wrong=looked)
    elif tool == "enter_puk":
        code = _PUK.search(text)
        yield Request(tool, {"code": code[0]}) if code else Request("", {}, asks_back="ask_puk")
    elif tool == "grant_permission":
        yield from _permissions(text)
    elif tool != "check_payment_requests" or "pay_bill" not in all_asked:
        yield Request(tool, {})


def _turns(setting: str, text: str) -> list[bool]:
    """On and off, in order; what is nearest to the thing's name counts."""
    turns = [(found.start(), found.end(), _OFF.search(found[1] or found[2]) is None) for found in _TURN.finditer(text)]
    if setting == "airplane_mode" and (
        re.search(r"\b(?:toggl|cycl)", text) or {on for *_, on in turns} == {True, False}
    ):
        return [True, False]
    place = _place(setting, text)
    if not turns or place is None:
        return [_MENDS.get(setting, False)]
    start, end = place
    nearest = min(turns, key=lambda turn: max(turn[0] - end, start - turn[1], 0))
    near = max(nearest[0] - end, start - nearest[1], 0) < 40
    return [nearest[2] if near else _MENDS.get(setting, False)]


def _place(setting: str, text: str) -> tuple[int, int] | None:
    for name in NAMES.get(setting, ()):
        if found := re.search(rf"\b{re.escape(name)}", text):
            return found.span()
    return None


def _mode(text: str) -> str:
    modes = [found[1].upper() for found in _MODE.finditer(text)]
    wanted = modes[-1] if modes else "AUTO"
    if wanted == "5G" or any(mode.startswith("AUTO") for mode in [*modes, wanted]):
        return "automatic"
    return "4G" if wanted == "LTE" else wanted


def _permissions(text: str) -> Iterator[Request]:
    wanted = re.findall(r"\b(sms|storage)\b", text)
    if not wanted and re.search(r"\b(?:all|both|every|everything|permissions|they|them)\b", text):
        wanted = ["sms", "storage"]
    for permission in dict.fromkeys(wanted):
        yield Request("grant_permission", {"permission": permission})
    if not wanted:
        yield Request("", {}, asks_back="ask_permission")


TEST = {
    "no_service": "check_status_bar",
    "no_data": "run_speed_test",
    "slow_data": "run_speed_test",
    "no_mms": "send_picture_message",
}
"""How a customer finds out whether its problem is gone, by what it complains of."""
GONE = {"no_service": "4 bars", "no_data": "shows", "slow_data": ", good", "no_mms": "was sent"}
"""What the phone says to that when it is."""
MOST_SENTENCES = 12
"""Sentences of a message that are read one by one for what they ask for."""
_PAY = re.compile(r"\b(?:pay|settle) (?:it|this|that|them|now|the|your|right)\b")
_OFFERED = re.compile(rf"{_PAY.pattern}|\b(?:to|with|the|a) (?:{'|'.join(PLANS).lower()}) plan\b")
HERE = Path(__file__).parent


def customer(task: Task, seed: int, personas: Sequence[str] = ()) -> PhoneUser:
    """The customer of one episode."""
    return PhoneUser(task, seed, personas)


def part_of(task: Task) -> Part:
    """What the customer of ``task`` wants and knows."""
    return Part([_wish(wish, task.data) for wish in task.data["wishes"]], _facts(task.id, task.data))


class PhoneUser(ScriptedUser):
    """Plays one task's customer. Implements :class:`mua.environment.user.ToolUser` too."""

    def __init__(self, task: Task, seed: int, personas: Sequence[str] = ()) -> None:
        key = f"{task.id}/{seed}"
        self._wants: Json = task.data["wants"]
        self._keeps_data: bool = task.data["keeps_phone_data"]
        part = part_of(task)
        super().__init__(
            key, task.split, reader_of(HERE), grammar_of(HERE), persona_of(key, personas), part.wishes, part.facts
        )
        self._tools: UserTools | None = None
        self._gone = False

    def take_tools(self, tools: UserTools) -> None:
        self._tools = tools

    async def reply(self, agent_text: str) -> UserReply:
        acts = self._reader.read(agent_text, self._wish.verb)
        if acts.transfers:
            return await super().reply(agent_text)
        lines = await self._act(requests(self._instructed(acts, agent_text), agent_text))
        if not lines and self._should_look(acts, agent_text):
            lines = [await self._look()]
        if self._gone:
            return self._solved(lines)
        if lines:
            told = [fact for fact in self._known(self._wish) if fact in acts.asks]
            return UserReply(self._utter(*lines, *([self._answer(told)] if told else [])))
        if self._is_proposal(acts, agent_text):
            declined = next(self._objections(acts, agent_text), "")
            return UserReply(self._utter(declined) if declined else self._agree(self._wish))
        return await super().reply(agent_text)

    def _is_proposal(self, acts: Acts, agent_text: str) -> bool:
        """Whether a yes is wanted; a question that names a plan, or paying, is one too."""
        if any(fact in acts.asks for fact in self._known(self._wish)) or self._wrong:
            return False
        return acts.proposes or ("?" in agent_text and _OFFERED.search(agent_text.lower()) is not None)

    # What it does on the phone.

    def _instructed(self, acts: Acts, agent_text: str) -> list[str]:
        """The tools that are asked for; of a message that asks for any, each sentence is heard by itself too."""
        if not acts.instructs:
            return []
        parts = [part for part in re.split(r"(?<=[.!?])\s+|\n+", agent_text) if part.strip()][:MOST_SENTENCES]
        found = [tool for part in parts for tool in self._reader.read(part, self._wish.verb).instructs]
        return list(dict.fromkeys([*(found if len(parts) > 1 else ()), *acts.instructs]))

    async def _act(self, asked: Sequence[Request]) -> list[str]:
        lines = [line for request in asked[:MOST] if (line := await self._do(request))]
        return [*lines, self._voice.say("too_much")] if len(asked) > MOST else lines

    async def _do(self, request: Request) -> str:
        """Carry one request out, or say why not."""
        if request.asks_back:
            return self._voice.say(request.asks_back)
        if request.tool == "factory_reset" and self._keeps_data:
            return self._voice.say("no_reset")
        if request.tool == "pay_bill":
            return await self._pay()
        if request.only_if_wrong and await self._is_so(request):
            return ""
        return await self._use(request.tool, request.arguments)

    async def _is_so(self, request: Request) -> bool:
        """Whether the thing is as wanted already, by a look at it."""
        assert self._tools is not None
        result = await self._tools.call(request.tool.replace("set_", "check_"), {})
        wanted = request.arguments.get("mode") or ("on" if request.arguments.get("on") else "off")
        return re.search(rf" is {wanted}\b", result.text) is not None

    async def _pay(self) -> str:
        if not self._wants.get("pay"):
            return self._voice.say("no_pay")
        asked = await self._use("check_payment_requests", {})
        bill = re.search(r"bill (B\w+)", asked)
        return await self._use("pay_bill", {"bill_id": bill[1]}) if bill else self._agree(self._wish)

    async def _use(self, tool: str, arguments: Json) -> str:
        if self._tools is None:
            return self._voice.say("unknown")
        result = await self._tools.call(tool, arguments)
        if result.error:
            return self._voice.say("failed", value=result.text.removeprefix("Error: "))
        verb = self._wish.verb
        self._gone |= TEST.get(verb) == tool and GONE[verb] in result.text
        looked = tool.startswith(("check_", "run_", "send_"))
        return self._voice.say("saw" if looked else "did", value=result.text)

    async def _look(self) -> str:
        said = await self._use(TEST[self._wish.verb], {})
        return said if self._gone else f"{self._voice.say('still')} {said}"

    def _should_look(self, acts: Acts, agent_text: str) -> bool:
        if self._wish.verb not in TEST or acts.refuses:
            return False
        return wonders(agent_text) or (not acts.asks and not acts.proposes and (acts.done or acts.offers))

    # What it says.

    def _solved(self, lines: Sequence[str]) -> UserReply:
        self._gone = False
        reply = self._after(Acts(done=True))
        return UserReply(" ".join([*lines, reply.text]), stop=reply.stop)

    def _after(self, acts: Acts) -> UserReply:
        open_wishes = len(self._wishes)
        reply = super()._after(acts)
        moved_on = len(self._wishes) < open_wishes
        return UserReply(f"{self._voice.say('also')} {reply.text}") if moved_on else reply

    def _opening(self, *, first: bool) -> str:
        """As every user's, but only who it is is told unasked."""
        known = self._known(self._wish)
        parts = [self._voice.say("greeting")] if first and not self._persona.brief and self._rng.random() < 0.7 else []
        parts.append(self._voice.say(f"want_{self._wish.verb}", **self._wish.values))
        if first and self._persona.volunteers:
            parts += [self._tell(fact) for fact in ("phone", "name", "birth_date") if known[fact].value]
        return self._utter(*parts)

    def _tell(self, fact: str) -> str:
        if fact == "problem":
            return self._voice.say(f"want_{self._wish.verb}", **self._wish.values)
        return super()._tell(fact)

    def _objections(self, acts: Acts, offer: str) -> Iterator[str]:
        """What the customer does not want of a proposal."""
        text, say = offer.lower(), self._voice.say
        known = self._known(self._wish)
        if acts.confirms in known and known[acts.confirms].value.lower() not in text:
            yield self._tell(acts.confirms) if known[acts.confirms].value else say("unknown")
        if self._keeps_data and re.search(r"factory|erase|wipe", text):
            yield say("no_reset")
        if _PAY.search(text) and not self._wants.get("pay"):
            yield say("no_pay")
        yield from self._about_plan(text)
        yield from self._about_data(text)
        if self._wish.verb != "pause" and re.search(r"\b(?:suspend|pause|deactivate) (?:your|the|it)\b", text):
            yield say("no_want")

    def _about_plan(self, text: str) -> Iterator[str]:
        named = [name for name in PLANS if re.search(rf"\b{name.lower()}\b(?! (?:of|phone|button|screen))", text)]
        if "plan" not in text and not {"nomad", "pocket", "steady"} & set(text.split()):
            return
        if self._wish.verb == "plan_change":
            wanted = self._known(self._wish)["plan"].value
            if named and wanted not in named:
                yield self._voice.say("no_other_plan", value=wanted)
            return
        another = named or re.search(r"another|different|other|change|switch|upgrade|move", text)
        if another and re.search(r"\bplan\b|tariff", text) and not self._wants.get("plan"):
            yield self._voice.say("no_keep_plan")

    def _about_data(self, text: str) -> Iterator[str]:
        amounts = re.findall(r"(\d+) ?(?:gb|gigs?|gigabytes?)\b", text)
        if "gb" in self._wants and amounts and str(self._wants["gb"]) not in amounts and "plan" not in text:
            yield self._voice.say("no_gb", value=str(self._wants["gb"]))
        elif "gb" not in self._wants and re.search(r"\b(?:add|buy|top up|refuel)\b.*\b(?:data|gb|gigabytes?)\b", text):
            yield self._voice.say("no_data_wanted")


def _wish(wish: Json, data: Json) -> Wish:
    about = wish["about"]
    values = {key: str(value) for key, value in wish.items()}
    facts, before = {}, {}
    if "plan" in wish:
        facts["plan"] = Fact(wish["plan"])
        if "first" in wish:
            before["plan"] = Fact(wish["first"])
            values |= {"plan": wish["first"], "new": wish["plan"]}
    facts |= {key: Fact(str(wish[key])) for key in ("month", "charge") if key in wish}
    if "country" in wish:
        facts["abroad"] = Fact(wish["country"], rule="tell_travel")
    change = "change_plan" if before else ""
    goes_on = {"bill_question": ("done",)}.get(about, ("done", "informs") if about in TEST else ("informs",))
    gives_way = "take_plan" if data["wants"].get("plan") and about == "travel" else ""
    return Wish(about, facts, values, change, before, goes_on, gives_way)


def _facts(key: str, data: Json) -> dict[str, Fact]:
    known, rng = data["known"], random.Random(f"wrong/{key}")
    number = known["number"] or ""
    wrong = f"{number[:-4]}{rng.randint(1000, 9999)}" if number else ""
    facts = {
        "phone": Fact(number, wrong=wrong if wrong != number else ""),
        "name": Fact(f"{known['first']} {known['last']}"),
        "birth_date": Fact(known["born"], wrong=f"{known['born'][:-2]}{rng.choice(('29', '30'))}"),
        "abroad": Fact(known["abroad"], "tell_abroad") if known["abroad"] else Fact("home", "tell_home"),
        "reason": Fact("it"),
        "problem": Fact("it"),
        "customer_id": Fact(""),
    }
    if "gb" in data["wants"]:
        facts["gb"] = Fact(str(data["wants"]["gb"]))
    if "reported_lost" in data["faults"]:
        facts["found"] = Fact("yes")
    return facts


# What a language model is told that plays a task's user.

_WISHES = {
    "no_service": "Your phone finds no network: no calls, no signal bars. You want service again.",
    "no_data": "Mobile internet does not work on your phone. You want it to work again.",
    "slow_data": "Mobile internet is very slow. You are content only when a speed test says it is good.",
    "no_mms": "Picture messages do not go out. You want to be able to send them.",
    "plan_change": "You want your line moved to the {plan} plan.",
    "refuel": "You want {gb} GB of data added to this month.",
    "bill_question": "You want to know which extra charge is on your {month} bill, and how much it is.",
    "pause": "You want your line suspended until you ask for it again.",
    "premium_bar": "You want premium numbers barred on your line.",
    "travel": "You travel to {country} next week and want to use your phone there.",
    "refund": "You want your money back for the {charge} on your March bill, which you never ordered.",
}
_PHONE = (
    "You have your phone in your hands and tools to look at it and change it. Use them only when the agent asks you "
    "to, do exactly what was asked and no more, and tell in plain words what you see. You know nothing of technical "
    "terms beyond what the agent explains. If you do not understand an instruction, say so."
)


def describe_person(task: Task) -> str:
    """Who the user is, what it wants, knows and would refuse."""
    data = task.data
    lines = [_identity(data["known"]), *(_describe_wish(wish) for wish in data["wishes"]), _PHONE, *_stances(data)]
    if any(wish["about"] in TEST for wish in data["wishes"]):
        lines.append("Believe that a problem is gone only when your phone shows it.")
    return "\n".join(lines)


def _identity(known: Json) -> str:
    place = f"You are abroad, in {known['abroad']}." if known["abroad"] else "You are at home, not abroad."
    number = f"Your phone number is {known['number']}." if known["number"] else "You do not know your phone number."
    return (
        f"You are {known['first']} {known['last']}, a customer of the carrier Vela Mobile, born on {known['born']}. "
        f"{number} {place}"
    )


def _describe_wish(wish: Json) -> str:
    text = _WISHES[wish["about"]].format(**wish)
    if "first" in wish:
        text = f"First you ask for the {wish['first']} plan; asked to confirm it, you change your mind. {text}"
    return text


def _stances(data: Json) -> list[str]:
    wants, found = data["wants"], []
    if "pay" in wants:
        found.append(
            "If you are asked to pay an overdue bill, you agree and pay it on your phone."
            if wants["pay"]
            else "You cannot pay any bill now, and say so when asked."
        )
    if "plan" in wants:
        found.append(
            "If your plan lacks what you need, you agree to another one."
            if wants["plan"]
            else "You want to keep your plan whatever it lacks."
        )
    if "gb" in wants:
        found.append(f"If your data is used up you want {wants['gb']} GB more, no other amount.")
    if "reported_lost" in data["faults"]:
        found.append("You had reported your phone lost and have found it again.")
    if {"paused", "data_bar", "mms_bar"} & set(data["faults"]):
        found.append(
            "What is paused or barred on your line, you had asked for; you agree if the agent offers to undo it."
        )
    if data["keeps_phone_data"]:
        found.append("You do not allow a factory reset, you would lose your photos.")
    return found
