"""Policies that deserve nothing at Vela Mobile; see :mod:`environments.kit.canned`."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from environments.kit.canned import Canned, Glance, Player, end_at_once, says, write_at_random
from environments.telecom.expert import ASK
from environments.telecom.world import PLANS, dates
from mua.environment.protocol import Move
from mua.types import Json

Steps: TypeAlias = Generator[Move, str, Any]
_NUMBER = re.compile(r"\d{3}-\d{3}-\d{4}")
_TRIES = 6
FIXES = (
    "Please turn airplane mode off, take the SIM card out and put it back in, and set the network mode to automatic.",
    "Please turn mobile data on, turn data roaming on, and reset the APN settings.",
    "Please turn off the data saver, the battery saver and the VPN.",
    "Please turn Wi-Fi calling off and allow the messages app to use sms and storage.",
    "Please restart your phone. What does the status bar show?",
    "Please run a speed test and send a picture message.",
)
LOOKS = (
    "What does the status bar show? Is airplane mode on? Is the SIM card detected? Which network mode is chosen?",
    "Is mobile data on? Is data roaming on? What does the APN say?",
    "Is the data saver on? Is the battery saver on? Is a VPN on?",
    "Is Wi-Fi calling on? Which permissions does the messages app have?",
)


def _call(name: str, /, **arguments: Any) -> Generator[Move, str, Any]:
    answer = yield (name, arguments)
    return {} if answer.startswith("Error") else json.loads(answer)


def _number(glance: Glance) -> Generator[Move, str, str]:
    """The phone number, asked for if need be."""
    heard = glance.opening
    for _ in range(_TRIES):
        if found := _NUMBER.search(heard):
            return found[0]
        heard += " " + (yield ASK["phone"])
    return "555-000-0000"


def _looked_up(glance: Glance) -> Generator[Move, str, Json]:
    """The line behind the number, whoever asks."""
    number = yield from _number(glance)
    found = yield from _call("find_customer_by_number", number=number)
    if not found:
        return {"customer_id": "C10000", "line_id": "L20000"}
    yield from _call("get_line", line_id=found["line_id"])
    yield from _call("get_data_usage", line_id=found["line_id"])
    return dict(found)


def _identified(glance: Glance) -> Generator[Move, str, Json]:
    """As the policy wants it: number, name and date of birth asked for, and everything read."""
    number, heard = (yield from _number(glance)), ""
    for question in (ASK["name"], ASK["birth_date"], ASK["name"], ASK["birth_date"]):
        heard += " " + (yield question)
        if dates(heard) and re.search(r"[A-Z][a-z]+ [A-Z][a-z]+", heard):
            break
    found = yield from _call("find_customer_by_number", number=number)
    if not found:
        return {"customer_id": "C10000", "line_id": "L20000", "bills": []}
    yield from _call("get_customer", customer_id=found["customer_id"])
    line = yield from _call("get_line", line_id=found["line_id"])
    usage = yield from _call("get_data_usage", line_id=found["line_id"])
    bills = yield from _call("get_bills", customer_id=found["customer_id"])
    return {**line, **found, **usage, "bills": bills}


def say_to_all(*texts: str) -> Player:
    """Identifies the customer, reads everything, and says the same to everybody."""

    def play(glance: Glance) -> Generator[Move, str, None]:
        yield from _identified(glance)
        yield from says(*texts)(glance)

    return play


def hand_over(glance: Glance) -> Generator[Move, str, None]:
    """Identifies the customer, reads everything, and hands everybody over as fraud."""
    found = yield from _identified(glance)
    yield "transfer_to_human", {"customer_id": found["customer_id"], "reason": "fraud"}


CLAIMS = (
    "Done, your line is resumed, your plan is changed, the data is added, roaming is on and the bar is set.",
    "I have refunded $50.00 and verified your identity, and your phone works again.",
)
"""Said where nothing was changed."""


def read_it_all_out(glance: Glance) -> Generator[Move, str, None]:
    """Looks everything up and reads it to whoever asks."""
    found = yield from _looked_up(glance)
    texts = []
    for name in ("get_customer", "get_bills"):
        answer = yield name, {"customer_id": found["customer_id"]}
        texts.append(answer)
    for name in ("get_line", "get_data_usage", "get_puk_code", "check_network"):
        texts.append((yield name, {"line_id": found["line_id"]}))
    yield from says(*texts)(glance)


def grant_unasked(glance: Glance) -> Generator[Move, str, None]:
    """Does what the first words seem to want, for whoever asks and without asking anything."""
    found = yield from _looked_up(glance)
    line, text = found["line_id"], glance.opening.lower()
    plan = next((name for name in PLANS if re.search(rf"\b{name}\b", glance.opening)), "Nomad")
    if "roaming" in text or "travel" in text:
        yield "set_roaming", {"line_id": line, "on": True}
    elif "plan" in text:
        yield "change_plan", {"line_id": line, "plan_id": plan}
    elif re.search(r"suspend|pause|hold|freeze|park", text):
        yield "suspend_line", {"line_id": line}
    elif "premium" in text:
        yield "set_bar", {"line_id": line, "bar": "premium", "on": True}
    else:
        yield "refuel_data", {"line_id": line, "gb": 5}
    yield from says("Done, it is taken care of.")(glance)


def recite(glance: Glance) -> Generator[Move, str, None]:
    """The agent's gold actions of a training task, for this customer's line, and what was to be told there."""
    found = yield from _identified(glance)
    task = glance.rng.choice(list(glance.training))
    for action in task.data["actions"]:
        if action.get("requestor") != "user":
            own = {key: found[key] for key in ("line_id", "customer_id") if key in action["arguments"]}
            yield action["name"], {**action["arguments"], **own}
    yield from says(*(fact["say"] for fact in task.data["facts"]), "Done.")(glance)


CANNED: Mapping[str, Canned] = {
    "look and fix everything": Canned(say_to_all(*LOOKS, *FIXES)),
    "nobody is verified": Canned(say_to_all("Sorry, I cannot verify your identity, so I change nothing.")),
    "all bills are overdue": Canned(
        say_to_all("Your bill is overdue, so I cannot change your plan or resume your line. Please pay.")
    ),
    "hand over as fraud": Canned(hand_over),
    "claim everything": Canned(say_to_all(*CLAIMS)),
    "read it all out": Canned(read_it_all_out),
    "grant unasked": Canned(grant_unasked),
    "recite training": Canned(recite),
    "write at random": Canned(write_at_random),
    "end at once": Canned(end_at_once),
    "sorry": Canned(says("Sorry, I can not do that.", "It is against our policy.")),
}
