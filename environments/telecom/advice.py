"""What an agent's message asks of a person with a phone: the scripted user's ears.

A message is cut into clauses; each clause is read for things on a phone (airplane mode, SIM card, APN, ...) and for
what is to be done with them::

    "Please turn airplane mode off, then restart your phone. What does the status bar show?"
     └ set_airplane_mode(on=False)  └ restart_phone          └ check_status_bar

What the agent says of itself ("I have switched roaming on for your line") or offers ("Shall I switch it on?") is no
advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mua.types import Json

SWITCH_WORDS: dict[str, str] = {
    "wifi_calling": r"wi-?fi[ -]call(?:ing|s)?",
    "airplane_mode": r"(?:air ?plane|flight|aeroplane)(?: mode)?",
    "data_saver": r"data[ -]?sav(?:er|ing)(?: mode)?",
    "battery_saver": r"(?:battery|power)[ -]?sav(?:er|ing)(?: mode)?|low[ -]power(?: mode)?",
    "vpn": r"\bvpn\b",
    "data_roaming": r"(?:data )?roaming",
    "mobile_data": r"(?:mobile|cellular) data",
    "wifi": r"\bwi-?fi\b",
}
"""How people call the phone's switches; longer names come first."""
_CONNECTORS = (
    r"turn|switch|put|set|restart|reboot|reset|check|tell|look|see|send|run|try|take|pull|remove|open|allow|grant|give"
)
_VERBS = (
    rf"(?:{_CONNECTORS}|enable|disable|deactivate|activate|toggle|disconnect|enter|type|change|choose|select|pay|let|make"
    "|reseat|re-insert|reinsert|insert|do|perform|test|measure|what|which|is|are|does|report)"
)
_SENTENCE = re.compile(r"(?<=[.!?;:])\s+|\n+")
_CLAUSE = re.compile(
    rf"(?:,|\band\b|\bthen\b)(?:\s|,|\band\b|\bthen\b|\bafter that\b|\bplease\b|\balso\b)*(?=\b{_VERBS}\b)", re.I
)
_OF_ITSELF = re.compile(
    r"^\W*(?:(?:okay|ok|good|great|so|and|also|now|thanks?|thank you|then)\W+)*(?:i|we)(?:'(?:ve|ll|m|re|d))?+\b"
    r"(?!\s*(?:(?:would )?like|need|want|(?:would )?ask|suggest|recommend)(?: that)? you\b)",
    re.I,
)
_OFFER = re.compile(
    r"\b(?:shall|should|may|can|could) (?:i|we)\b|\bdo you (?:want|agree)\b|\bwould you like\b|\bif i\b"
    r"|\bare you (?:sure|willing)\b",
    re.I,
)
_ON = re.compile(
    r"\b(?:turn(?:ed|ing)?|switch(?:ed|ing)?|put|set) on\b|\bon\b(?! (?:your|the|my|this|to)\b)|\benabl\w+|\bactivat\w+"
    r"|\ballow\w*",
    re.I,
)
_OFF = re.compile(r"\boff\b|\bdisabl\w+|\bdeactivat\w+|\bdisconnect\w*", re.I)
_DO = re.compile(
    r"\b(?:turn|switch|put|set|enable|disable|activate|deactivate|disconnect|toggle|cycle|flip|make sure|ensure"
    r"|change|choose|select|keep)\b",
    re.I,
)
_ORDER = re.compile(
    r"\b(?:restart|reboot|reset|re-?seat|re-?insert|insert|take|pull|enter|type|run|send|try|allow|grant|give|pay|accept)\b",
    re.I,
)
_LOOK = re.compile(
    r"\b(?:check|look|tell me|see (?:if|whether|what)|report|read|verify|confirm|find out|let me know)\b", re.I
)
_ASKS = re.compile(
    r"^\W*(?:(?:and|also|now|so|okay|ok|then|or)\W+)*(?:is|are|does|do|did|what|which|has|have|was)\b", re.I
)
_MODE = re.compile(
    r"\b(?:network|preferred network|network type|network selection)[ -](?:mode|type|selection|setting)"
    r"|preferred network",
    re.I,
)
_MODE_VALUE = re.compile(r"\b(auto(?:matic)?|[2345]g|lte)\b", re.I)
_PUK = re.compile(r"\b\d{8}\b")
_FACTORY = re.compile(
    r"factory[ -](?:reset|settings)|erase (?:all|everything|the phone|your phone)|wipe (?:the|your) phone"
    r"|reset (?:the|your) phone\b",
    re.I,
)
_RESTART = re.compile(
    r"(?<!\ba )(?<!after )\b(?:re-?start|reboot)\b|\b(?:do|try|make|perform) a (?:restart|reboot)|\bpower[ -]cycle"
    r"|\b(?:must|should|has to|needs to|need to) be (?:restarted|rebooted)|\b(?:phone|device) off and (?:back )?on"
    r"|\boff your (?:phone|device)\b",
    re.I,
)
_RESEAT = re.compile(
    r"re-?seat|re-?insert|(?:take|pull|remove|pop)\b.*\bsim\b|\bsim\b.*\b(?:out and|back in|in again)"
    r"|insert\b.*\bsim\b",
    re.I,
)
_STATUS = re.compile(
    r"status bar|top of (?:the|your) (?:screen|display|phone)|signal bars|how many bars"
    r"|(?:what|which) icons|signal strength",
    re.I,
)
_APN = re.compile(r"\bapn\b|access point", re.I)
_TO_DEFAULT = re.compile(r"\b(?:reset|restore|defaults?|set)\b", re.I)
_NAVIGATE = re.compile(r"\b(?:open|go (?:to|into)|tap|navigate)\b", re.I)
_SPEED = re.compile(
    r"speed ?-?test|(?:test|measure|check) (?:the|your) (?:internet |data |connection )?speed"
    r"|\b(?:open|load) (?:a|any|some) (?:web ?)?(?:page|site)",
    re.I,
)
_PICTURE = re.compile(
    r"\b(?:send|try|test)\b.*\b(?:picture|mms|photo)|\b(?:picture|mms|photo)\b.*\b(?:test|again)\b", re.I
)
_PERMISSION = re.compile(r"permission|messag\w+ app", re.I)
_ALLOWED = re.compile(r"\b(sms|storage)\b", re.I)
_GRANT = re.compile(r"\b(?:allow|grant|give|enable|turn on|switch on|add)\b", re.I)
_REQUEST = re.compile(r"payment request|request for payment", re.I)
_PAY = re.compile(r"\bpay\b(?! (?:for|attention))|\b(?:accept|approve)\b.*\brequest", re.I)
_SIM = re.compile(r"\bsim\b", re.I)
_WORKS = re.compile(
    r"\b(?:is|does|do|did|has|are|whether|if)\b.*\b(?:work(?:s|ed|ing)?|solved|fixed|resolved|better|faster|gone)\b"
    r"|\b(?:service|signal|internet|network)\b.*\bback\b|try (?:it )?(?:again|now)"
    r"|\bcan you (?:now )?(?:call|surf|browse)\b|\btry (?:making|to make) a call"
    r"|\bdo you (?:now )?(?:have|see) (?:any |a )?(?:signal|service|network|connection)",
    re.I,
)
_CONDITION = re.compile(r"\b(?:if|in case|unless|when)\b", re.I)
_NOT = re.compile(r"\b(?:do not|don't|never|no need to|without|instead of)\b", re.I)
_FINDS_OUT = re.compile(r"\b(?:whether|if|try|see)\b", re.I)


@dataclass(frozen=True)
class Request:
    """One thing to do. ``tool`` may also be ``test`` (does it work now?) or ``unclear`` with a question back."""

    tool: str
    arguments: Json
    asks_back: str = ""


def requests(message: str) -> list[Request]:
    """What the message asks for, in order, each thing once in a row."""
    found: list[Request] = []
    topic: str | None = None
    for sentence in _SENTENCE.split(message):
        if _OFFER.search(sentence) or (_OF_ITSELF.search(sentence) and not sentence.rstrip().endswith("?")):
            continue
        for clause in _CLAUSE.split(sentence):
            if _NOT.search(clause):
                continue
            asked, topic = _read(clause, topic, question=sentence.rstrip().endswith("?"))
            found += [request for request in asked if not found or request != found[-1]]
    return found


def _read(clause: str, topic: str | None, *, question: bool) -> tuple[list[Request], str | None]:
    """The requests of one clause, and what "it" means in the next."""
    if _WORKS.search(clause) and (question or _FINDS_OUT.search(clause)):
        return [Request("test", {})], topic
    if topic == "apn" and _TO_DEFAULT.search(clause):
        return [Request("reset_apn", {})], None
    special = list(_special(clause, question=question))
    switches = _switches(clause)
    if not switches and (special or _APN.search(clause)):
        return special, "apn" if _APN.search(clause) else None
    if (
        not switches
        and topic in SWITCH_WORDS
        and re.search(r"\b(?:it|that|them)\b", clause, re.I)
        and _DO.search(clause)
    ):
        switches = [topic]
    return [*special, *_all_switched(switches, clause, question=question)], switches[-1] if switches else topic


def _switches(clause: str) -> list[str]:
    """Names of the switches in the clause, in the order they are named."""
    places: list[tuple[int, str]] = []
    rest = clause
    for name, words in SWITCH_WORDS.items():
        if match := re.search(words, rest, re.I):
            places.append((match.start(), name))
            rest = rest[: match.start()] + "_" * (match.end() - match.start()) + rest[match.end() :]
    return [name for _, name in sorted(places)]


def _all_switched(switches: list[str], clause: str, *, question: bool) -> Iterator[Request]:
    """What to do with the switches of one clause; as many turns as switches go to one each, in order."""
    if _is_look(clause, question=question):
        yield from (Request(f"check_{switch}", {}) for switch in switches)
        return
    turns = _turns(clause)
    each = [[turn] for turn in turns] if len(turns) == len(switches) else [turns] * len(switches)
    for switch, turned in zip(switches, each, strict=True):
        yield from _switched(switch, turned, clause)


def _turns(clause: str) -> list[bool]:
    """On and off, in the order of the clause: of its order alone, not of a condition before or behind that."""
    order = _DO.search(clause)
    clause = _CONDITION.split(clause[order.start() :])[0] if order else clause
    places = [(match.start(), True) for match in _ON.finditer(clause)]
    places += [(match.start(), False) for match in _OFF.finditer(clause)]
    return [on for _, on in sorted(places)]


def _switched(switch: str, turns: list[bool], clause: str) -> Iterator[Request]:
    if turns and _DO.search(clause):
        for on in turns:
            yield Request(f"set_{switch}", {"on": on})
    elif re.search(r"\b(?:toggle|cycle|flip)\b", clause, re.I) and switch == "airplane_mode":
        yield Request("set_airplane_mode", {"on": True})
        yield Request("set_airplane_mode", {"on": False})
    elif _DO.search(clause):
        yield Request("unclear", {}, f"Should {switch.replace('_', ' ')} be on or off?")


def _is_look(clause: str, *, question: bool) -> bool:
    """Whether the clause wants to know rather than to change."""
    if _ASKS.search(clause):
        return True
    if look := _LOOK.search(clause):
        order = _DO.search(clause)
        return order is None or look.start() < order.start()
    return question and not _DO.search(clause) and not _ORDER.search(clause)


def _special(clause: str, *, question: bool) -> Iterator[Request]:
    """Everything that is not a switch."""
    look = _is_look(clause, question=question)
    if _STATUS.search(clause):
        yield Request("check_status_bar", {})
    if re.search(r"\bpuk\b", clause, re.I) or (_PUK.search(clause) and re.search(r"code|enter|type", clause, re.I)):
        yield from _puk(clause, look)
    elif _RESEAT.search(clause):
        yield Request("reseat_sim", {})
    elif _SIM.search(clause) and look:
        yield Request("check_sim", {})
    if _FACTORY.search(clause):
        yield Request("factory_reset", {})
    elif _APN.search(clause):
        yield from _apn(clause, look)
    if _MODE.search(clause):
        yield _mode(clause, look)
    if _PERMISSION.search(clause):
        yield from _permissions(clause, look)
    elif _PICTURE.search(clause) and not _WORKS.search(clause):
        yield Request("send_picture_message", {})
    if _SPEED.search(clause):
        yield Request("run_speed_test", {})
    if (
        _PAY.search(clause)
        and not look
        and not re.search(r"\b(?:want|like|able|willing|can you|could you|agree)\b", clause, re.I)
    ):
        yield Request("pay_bill", {})
    elif _REQUEST.search(clause) and look:
        yield Request("check_payment_requests", {})
    if _RESTART.search(clause) and not look:
        yield Request("restart_phone", {})


def _puk(clause: str, look: bool) -> Iterator[Request]:
    if code := _PUK.search(clause):
        yield Request("enter_puk", {"code": code.group()})
    elif not look:
        yield Request("unclear", {}, "I do not have the PUK, what is it?")
    else:
        yield Request("check_sim", {})


def _apn(clause: str, look: bool) -> Iterator[Request]:
    if _TO_DEFAULT.search(clause) and not look:
        yield Request("reset_apn", {})
    elif look:
        yield Request("check_apn", {})
    elif not _NAVIGATE.search(clause):
        yield Request("unclear", {}, "What should I do with the APN settings?")


def _mode(clause: str, look: bool) -> Request:
    value = _MODE_VALUE.search(clause)
    if look and not (value and _DO.search(clause)):
        return Request("check_network_mode", {})
    if value is None:
        return Request("unclear", {}, "Which network mode should I choose? It offers automatic, 4G, 3G and 2G.")
    text = value.group(1).upper()
    mode = "automatic" if text.startswith(("AUTO", "5")) else "4G" if text == "LTE" else text
    return Request("set_network_mode", {"mode": mode})


def _permissions(clause: str, look: bool) -> Iterator[Request]:
    if look or not _GRANT.search(clause):
        yield Request("check_app_permissions", {})
        return
    wanted = [word.lower() for word in _ALLOWED.findall(clause)]
    if not wanted and re.search(r"\ball\b|\bboth\b|every", clause, re.I):
        wanted = ["sms", "storage"]
    if not wanted:
        yield Request("unclear", {}, "Which permission do you mean?")
    for permission in dict.fromkeys(wanted):
        yield Request("grant_permission", {"permission": permission})
