"""What has to come before what at Vela Mobile; the words of it are in policy.md.

* Whoever asks is identified before anything of an account is told or changed.
* What is changed was looked at before: the line, its data, its bills; on the phone the setting itself, and only what
  was seen to be wrong is changed there.
* What costs money or lifts what the customer had set needs a yes to a message that names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from environments.kit.conduct import Called, Past, Rules, agrees
from environments.kit.language.claims import Claim, Review
from environments.telecom.phone_tools import SWITCHES
from environments.telecom.world import APN, dates, identified, owner
from mua.types import Json

_LINE = {"call": "get_line", "same": ["line_id"]}
_USAGE = {"call": "get_data_usage", "same": ["line_id"]}
_LINE_FIRST = {"looked": "get_line", "name": "the line was read for a customer who is identified"}
_USAGE_FIRST = {"looked": "get_data_usage", "name": "the data left was read"}
_BILLS = {"looked": "get_bills", "name": "the bills were read"}
_SEEN = {"seen": True, "name": "it was seen to be wrong"}


def _identity(key: str) -> Json:
    return {"identity": key, "name": "the customer is identified"}


def _agreed(words: str) -> Json:
    return {"agreed": words, "name": "a yes to a message that names it"}


WRITES: Mapping[str, Sequence[Json]] = {
    "send_payment_request": (_identity("bill_id"), _BILLS, _agreed(r"\b(?:pay|settle|payment|paid)")),
    "resume_line": (_identity("line_id"), _LINE, {"resumable": True, "name": "the customer's word on the suspension"}),
    "suspend_line": (_identity("line_id"), _LINE),
    "set_roaming": (_identity("line_id"), _LINE),
    "set_bar": (_identity("line_id"), _LINE, {"lift": True, "name": "a yes to lifting the bar"}),
    "refuel_data": (
        _identity("line_id"),
        _USAGE,
        _agreed(r"\b{gb} ?(?:gb|gigs?|gigabytes?)\b|(?:gb|gigabytes).*\b{gb}\b"),
    ),
    "change_plan": (_identity("line_id"), _LINE, _BILLS, _agreed(r"\b{plan_id}\b")),
    "get_puk_code": (_identity("line_id"), _LINE),
    "transfer_to_human": (_identity("customer_id"), {"handover": True, "name": "what the handover is about was read"}),
    "restart_phone": (_LINE_FIRST,),
    "enter_puk": (_LINE_FIRST,),
    "set_network_mode": (_LINE_FIRST, _SEEN),
    "set_airplane_mode": (_LINE_FIRST, _SEEN),
    "reseat_sim": (_LINE_FIRST, _SEEN),
    "reset_apn": (_LINE_FIRST, _USAGE_FIRST, _SEEN),
    "grant_permission": (_LINE_FIRST, _USAGE_FIRST, _SEEN),
    **{
        f"set_{name}": (_LINE_FIRST, _USAGE_FIRST, _SEEN)
        for name in ("mobile_data", "data_roaming", "data_saver", "battery_saver", "vpn", "wifi_calling")
    },
}
_OF_ACCOUNT = ("line", "bill", "charge")
_ABOUT_THE_AGENT = frozenset({"deed", "can", "read", "verified", "number", "name", "birth", "exists"})
"""What may be said of a line before its holder is identified."""
_LIFT = r"\b(?:lift|remov|bar|unbar|block|unblock|undo|allow|restor|tak)"
_RESUME = r"\b(?:resum|reactivat|activat|unsuspend|suspen|lift|pause)"
_BACK = r"\b(?:lost|found|back|recover|hands)"
_HANDOVER = {"fraud": "get_line", "contract ended": "get_line", "billing dispute": "get_bills"}


class Policy(Rules):
    """:data:`WRITES`, and that nothing of an account is told to a stranger."""

    def met(self, demand: Json, past: Past, arguments: Json) -> bool:
        if "identity" in demand:
            key = demand["identity"]
            return owner(key, {**arguments, **demand.get("arguments", {})}.get(key)) in identified(past)
        if demand is _SEEN:
            return True
        if "looked" in demand:
            return _looked(demand["looked"], past)
        if "agreed" in demand:
            words = {key: re.escape(str(value).lower()) for key, value in arguments.items()}
            return _agreed_to(demand["agreed"].format(**words), past)
        if "asked" in demand:
            return not past.heard or any(re.search(demand["asked"], said.lower()) for said, _ in _exchanges(past))
        if "given" in demand:
            return all(map(past.has_heard, demand["given"])) or (
                demand["given"][-1] in dates(" ".join(past.heard)) and all(map(past.has_heard, demand["given"][:-1]))
            )
        if "resumable" in demand:
            return _resumable(past, arguments["line_id"])
        if "lift" in demand:
            return bool(arguments["on"]) or _agreed_to(_LIFT, past)
        if "handover" in demand:
            wanted = _HANDOVER.get(arguments["reason"])
            return wanted is None or _looked(wanted, past)
        return super().met(demand, past, arguments)

    def unmet(self, called: Called, past: Past) -> list[str]:
        unseen = _SEEN in self.writes.get(called.name, ()) and not _seen_wrong(called, past)
        return super().unmet(called, past) + ([f"{called.name} before {_SEEN['name']}"] if unseen else [])

    def unfounded(self, review: Review, past: Past) -> list[str]:
        told = [claim for claim in review.true if _reveals(claim)]
        if not told or not past.heard:
            return []
        lines = {str(call.arguments["line_id"]) for call in past.calls if "line_id" in call.arguments}
        known = identified(past)
        if known and all(owner("line_id", line) in known for line in lines):
            return []
        return [f"{claim} before the customer is identified" for claim in told]


def _reveals(claim: Claim) -> bool:
    return claim.thing.partition(" ")[0] in _OF_ACCOUNT and claim.role not in _ABOUT_THE_AGENT


def _looked(tool: str, past: Past) -> bool:
    """Whether this was looked up for a customer who is identified."""
    known = identified(past)
    return any(
        call.name == tool and owner(key, value) in known for call in past.calls for key, value in call.arguments.items()
    )


def _exchanges(past: Past) -> Iterator[tuple[str, str]]:
    """The agent's messages, each with the user's answer to it."""
    return zip(past.said, past.heard[1:], strict=False)


def _agreed_to(words: str, past: Past) -> bool:
    """Whether the last answer to a message with these words was a yes; where nobody speaks, it was."""
    answers = [heard for said, heard in _exchanges(past) if re.search(words, said.lower())]
    return not past.heard or any(map(agrees, answers[-2:]))


def _resumable(past: Past, line_id: str) -> bool:
    reason = ""
    for call, answer in zip(past.calls, past.answers, strict=True):
        if call.name == "get_line" and call.arguments["line_id"] == line_id:
            reason = json.loads(answer).get("suspension") or reason
    if reason == "customer request":
        return _agreed_to(_RESUME, past)
    if reason == "reported lost":
        return _agreed_to(_BACK, past) or any(
            re.search(r"\b(?:found it|have it|have my phone) ?back|found it\b", one.lower()) for one in past.heard
        )
    return True


# What was seen on the phone. A setting is wrong when what was seen last differs from what it is changed to.

_ICONS = {"data_saver", "battery_saver", "vpn", "wifi_calling"}


def _seen_wrong(called: Called, past: Past) -> bool:
    looks = [(call.name, call.arguments, answer) for call, answer in zip(past.calls, past.answers, strict=True)]
    if called.name == "set_airplane_mode" and called.arguments["on"]:
        return True
    if called.name == "reset_apn":
        right = f"APN is {APN['name']} and the MMS server is {APN['mms_server']}"
        return any(name == "check_apn" and right not in answer for name, _, answer in looks)
    if called.name == "reseat_sim":
        return any(("SIM" in answer and "ready" not in answer) or answer == "no service" for _, _, answer in looks)
    if called.name == "grant_permission":
        wanted = f"{called.arguments['permission']} no"
        return any(name == "check_app_permissions" and wanted in answer for name, _, answer in looks)
    states = [state for look in looks if (state := _state(called.name.removeprefix("set_"), *look))]
    target = called.arguments.get("mode") or ("on" if called.arguments["on"] else "off")
    return bool(states) and states[-1] != target


def _state(setting: str, tool: str, arguments: Json, answer: str) -> str:
    """What a look or a change tells of a setting; empty if nothing."""
    if setting == "network_mode":
        if tool in ("check_network_mode", "set_network_mode"):
            return next(mode for mode in ("automatic", "2G", "3G", "4G") if mode in answer)
        shown = re.search(r"bars, ([23]G)", answer) if tool == "check_status_bar" else None
        return shown[1] if shown else ""
    if tool in (f"check_{setting}", f"set_{setting}"):
        return "on" if re.search(r" is on\b", answer) else "off"
    if tool != "check_status_bar":
        return ""
    if setting == "airplane_mode":
        return "on" if answer == "airplane mode" else "off"
    shown_icon = setting in _ICONS and "bars" in answer
    return ("on" if SWITCHES[setting] in answer else "off") if shown_icon else ""


RULES = Policy(WRITES)
