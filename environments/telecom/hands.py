"""What a person does on the phone when asked to: the tools that a message asks for, and what it says of them.

Which tools are meant is understood by :mod:`environments.kit.language.acts`; here it is read whether a thing is to be
on or off, which mode, code or permission. What is left open is done in the way that mends a phone, or asked back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from environments.kit.language.text import sentences
from environments.telecom.sheets import NAMES
from mua.types import Json

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
