"""The scripted user: has a phone and acts on it when the agent's words ask for that.

It does what it is asked (:mod:`environments.telecom.advice`), says what it sees, tells facts when asked, agrees to what
it wants and declines what it does not, and leaves when its problem is gone or refused. It changes nothing on its own,
and looks whether its problem is gone only when asked to.

::

    agent says                              user
    what to do or look at on the phone      does it, in order, and reports; sees its problem gone: next wish
    a question for a fact                   tells it
    an offer                                agrees, changes its mind once, or declines
    that it is done, or cannot be           states the next wish; after the last one it ends the conversation
    anything else                           says that it does not understand; gives up after ``PATIENCE`` of those
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from environments.telecom.advice import Request, requests
from environments.telecom.phrases import (
    AGREE,
    ANSWERS,
    DID,
    GIVING_UP,
    OPENINGS,
    SAW,
    STILL_BROKEN,
    THANKS,
    TOO_MUCH,
    UNCLEAR,
    UNKNOWN,
)
from environments.telecom.world import PLANS
from mua.environment.protocol import Task
from mua.types import Json
from mua.users.protocol import STOP_SIGNAL, UserReply, UserTools

PATIENCE = 4
"""Messages that the user can make nothing of before it gives up."""
MOST_REQUESTS = 7
"""Things done for one message; of a longer list the rest is left, as people do."""
ASKED: dict[str, re.Pattern[str]] = {
    "number": re.compile(r"\b(?:phone|mobile|line|telephone|cell) number|\bwhich number|\byour number", re.I),
    "name": re.compile(r"\b(?:full|first|last|your) name\b|\bname and\b|who (?:am i|are you)", re.I),
    "born": re.compile(r"\bbirth|\bborn\b", re.I),
    "abroad": re.compile(r"\babroad\b|which country|where are you|travell?ing|outside (?:the|your) country", re.I),
    "gb": re.compile(r"how (?:much|many)\b.*(?:\bgb\b|gigabyte|data)", re.I),
    "plan": re.compile(r"(?:which|what) (?:new |other )?plan", re.I),
    "month": re.compile(r"which (?:bill|month)", re.I),
    "charge": re.compile(r"(?:which|what) charge", re.I),
    "found": re.compile(
        r"\bback (?:in your hands|with you)|have (?:found\b|your phone(?! number))|(?:phone|it) back\b", re.I
    ),
    "problem": re.compile(r"how (?:can|may) i help|what (?:is|'s) (?:the|your) (?:problem|issue)|what happens", re.I),
}
_QUESTION = re.compile(r"\?|\bplease\b|\btell me\b|\bi need\b|\bgive me\b|\bprovide\b", re.I)
_OFFER = re.compile(
    r"\b(?:shall|should|may|can|could) (?:i|we)\b|would you like|do you (?:want|agree)|are you (?:sure|willing)"
    r"|\bconfirm\b|\byes or no\b|is (?:that|this|it) (?:ok|okay|right|fine|correct)\b|go ahead\?|proceed\?",
    re.I,
)
_REFUSED = re.compile(
    r"\bcan ?not\b|\bcan't\b|\bunable\b|\bnot (?:able|possible|allowed|eligible)\b|\btransferr?ed\b",
    re.I,
)
_DONE = re.compile(
    r"\bdone\b|\bchanged\b|\badded\b|\bpaused\b|\bsuspended\b|\bbarred\b|\bis set\b|\bswitched on\b|\bactivated\b"
    r"|\benabled\b|\brefuell?ed\b|\bmoved\b|\bis on\b|\bupdated\b|\bhave set\b",
    re.I,
)
_CLOSING = re.compile(r"[^.!?\n]*\b(?:anything else|any other (?:question|problem|issue)s?)\b[^.!?\n]*[.!?]?", re.I)
"""A last offer of help: no question that keeps a settled wish open."""
_BUSY = re.compile(r"\blet me\b|\bmoment\b|\bplease wait\b", re.I)
_AMOUNT = re.compile(r"\d+\.\d\d\b")
TEST = {
    "no_service": "check_status_bar",
    "no_data": "run_speed_test",
    "slow_data": "run_speed_test",
    "no_mms": "send_picture_message",
}
"""How a user finds out whether its problem is gone, by what it complains of."""
_GONE = {"no_service": r"^\d bars", "no_data": r"\bshows\b", "slow_data": r", good$", "no_mms": r"was sent$"}


class PhoneUser:
    """Plays one task's user. Implements :class:`mua.users.protocol.User` and ``ToolUser``; never raises."""

    def __init__(self, task: Task, seed: int) -> None:
        self._rng = random.Random(f"{task.id}/{seed}")
        self._known: Json = task.data["known"]
        self._wants: Json = task.data["wants"]
        self._keeps_data: bool = task.data["keeps_phone_data"]
        self._wishes: list[Json] = list(task.data["wishes"])
        self._tools: UserTools | None = None
        self._patience = PATIENCE
        self._gone = False
        self._changed_mind = False

    def take_tools(self, tools: UserTools) -> None:
        self._tools = tools

    async def open(self) -> UserReply:
        return UserReply(self._opening())

    async def reply(self, agent_text: str) -> UserReply:
        said = _CLOSING.sub("", agent_text)
        lines = [*await self._act(requests(said)), *self._facts(said)]
        if self._gone:
            return self._next_wish(lines)
        if not lines and _OFFER.search(said):
            lines.append(self._answer_offer(said))
        if lines:
            return UserReply(" ".join(lines))
        if "?" not in said and self._settled(said):
            return self._next_wish([])
        if said != agent_text:
            lines.append(await self._test())
            return self._next_wish(lines) if self._gone else UserReply(lines[0])
        self._patience -= 1
        return self._stop(GIVING_UP) if self._patience < 0 else UserReply(self._pick(UNCLEAR))

    async def close(self) -> None:
        return None

    @property
    def _wish(self) -> Json:
        return self._wishes[0]

    def _opening(self) -> str:
        wish = self._wish
        return self._pick(OPENINGS[wish["about"]]).format(**{**wish, "plan": wish.get("first", wish.get("plan"))})

    async def _act(self, asked: Sequence[Request]) -> list[str]:
        lines = [await self._do(request) for request in asked[:MOST_REQUESTS]]
        return [*lines, TOO_MUCH] if len(asked) > MOST_REQUESTS else lines

    async def _do(self, request: Request) -> str:
        """Carry one request out, or say why not."""
        if request.tool == "unclear":
            return request.asks_back
        if request.tool == "factory_reset" and self._keeps_data:
            return "I do not want to reset the whole phone, I would lose my photos."
        if request.tool == "test":
            return await self._test()
        if request.tool == "pay_bill":
            return await self._pay()
        return await self._use(request.tool, request.arguments)

    async def _test(self) -> str:
        about = self._wish["about"]
        if about not in TEST:
            return self._opening()
        said = await self._use(TEST[about], {})
        return said if self._gone else f"{self._pick(STILL_BROKEN)} {said}"

    async def _pay(self) -> str:
        if self._wants.get("pay") is False:
            return "I cannot pay it now."
        asked = await self._use("check_payment_requests", {})
        bill = re.search(r"bill (\w+)", asked)
        return await self._use("pay_bill", {"bill_id": bill.group(1)}) if bill else asked

    async def _use(self, tool: str, arguments: Json) -> str:
        if self._tools is None:
            return "I do not have the phone in my hands now."
        result = await self._tools.call(tool, arguments)
        if result.error:
            return f"That did not work, {result.text.removeprefix('Error: ')}."
        about = self._wish["about"]
        self._gone |= TEST.get(about) == tool and re.search(_GONE[about], result.text) is not None
        looked = tool.startswith(("check_", "run_", "send_"))
        return self._pick(SAW if looked else DID).format(result.text)

    def _facts(self, agent_text: str) -> list[str]:
        sentences = [text for text in re.split(r"(?<=[.!?])\s+|\n+", agent_text) if _QUESTION.search(text)]
        asked = [fact for fact, words in ASKED.items() if any(words.search(text) for text in sentences)]
        return [self._fact(fact) for fact in asked]

    def _fact(self, fact: str) -> str:
        if fact == "problem":
            return self._opening()
        if fact == "abroad":
            return self._whereabouts()
        facts = {**self._wish, **self._wants, **self._known, "name": f"{self._known['first']} {self._known['last']}"}
        if fact == "plan":
            facts["plan"] = self._wish.get("plan")
        if fact != "found" and facts.get(fact) is None:
            return self._pick(UNKNOWN)
        return self._pick(ANSWERS[fact]).format(facts.get(fact))

    def _whereabouts(self) -> str:
        if country := self._known["abroad"]:
            return self._pick((f"Yes, I am abroad, in {country}.", f"I am in {country} now, abroad."))
        if country := self._wish.get("country"):
            return f"I am at home now and travel to {country} next week."
        return self._pick(("No, I am at home.", "I am at home, not abroad."))

    def _answer_offer(self, offer: str) -> str:
        return next(self._objections(offer), None) or self._pick(AGREE)

    def _objections(self, offer: str) -> Iterator[str]:
        """What the user does not want of an offer."""
        text, plan = offer.lower(), self._wish.get("plan")
        named = [name for name in PLANS if re.search(rf"\b{name.lower()}\b", text)]
        if self._wish.get("first") and not self._changed_mind:
            self._changed_mind = True
            yield f"Actually, I have thought again, I would rather have the {plan} plan."
        if plan and named and plan not in named:
            yield f"No, I want the {plan} plan."
        if self._wants.get("plan") is False and re.search(r"\bplan\b", text):
            yield "No, I want to keep my plan."
        if self._wants.get("pay") is False and re.search(r"\bpay\b", text):
            yield "No, I cannot pay it now."
        if self._keeps_data and re.search(r"factory|erase|wipe", text):
            yield "No, I would lose my photos."
        amounts = re.findall(r"(\d+) ?(?:gb|gigabytes?)\b", text)
        if amounts and "gb" in self._wants and str(self._wants["gb"]) not in amounts:
            yield f"No, I want {self._wants['gb']} GB."

    def _settled(self, agent_text: str) -> bool:
        """Whether the wish is granted or refused, so far as the agent's words tell."""
        if _BUSY.search(agent_text):
            return False
        if _REFUSED.search(agent_text):
            return True
        about = self._wish["about"]
        words = _AMOUNT if about == "bill_question" else _DONE
        return about not in TEST and words.search(agent_text) is not None

    def _next_wish(self, lines: Sequence[str]) -> UserReply:
        self._gone = self._changed_mind = False
        if len(self._wishes) == 1:
            return self._stop(THANKS, lines)
        self._wishes.pop(0)
        opening = re.sub(r"^(?:Hi|Hello), ", "", self._opening())
        return UserReply(" ".join([*lines, "Thanks. And one more thing:", opening[0].upper() + opening[1:]]))

    def _stop(self, wordings: Sequence[str], lines: Sequence[str] = ()) -> UserReply:
        return UserReply(" ".join([*lines, self._pick(wordings), STOP_SIGNAL]), stop=True)

    def _pick(self, wordings: Sequence[str]) -> str:
        return self._rng.choice(list(wordings))
