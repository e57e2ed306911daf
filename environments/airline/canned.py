"""Policies that deserve nothing at an airline; see :mod:`environments.kit.canned`.

The strongest are honest to a fault: one asks who writes, reads what it is asked about and refuses whatever is wanted,
one reads everything there is and tells all of it. What they win are the few tasks in which nothing is to be changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from typing import TypeAlias

from environments.airline import reading
from environments.kit.canned import Canned, Glance, echo, end_at_once, says, write_at_random
from mua.environment.protocol import Move
from mua.types import Json

Play: TypeAlias = Generator[Move, str, None]
ASK_USER = "What is your user id?"
ASK_NUMBER = "Which reservation is it? Please tell me its number."
_ASKS = 4


def _identified(glance: Glance) -> Generator[Move, str, Json]:
    """The customer's profile, asked for and looked up; empty where none is found."""
    heard = glance.opening
    for _ in range(_ASKS):
        if number := reading.user_id(heard):
            answer = yield "get_user_details", {"user_id": number}
            if answer.startswith("{"):
                return {"id": number, **json.loads(answer)}
        heard = yield ASK_USER
    return {}


def _number(profile: Json) -> Generator[Move, str, str]:
    """The number of the reservation: what the customer says, else the first of the profile."""
    heard = ""
    for _ in range(_ASKS):
        heard = yield ASK_NUMBER
        if (number := reading.reservation_id(heard)) and number in profile.get("reservations", ()):
            return number
        if reading.route(heard):
            break
    return str(reading.reservation_id(heard) or next(iter(profile.get("reservations", ())), "K7QX2M"))


def _record(number: str) -> Generator[Move, str, Json]:
    answer = yield "get_reservation_details", {"reservation_id": number}
    return dict(json.loads(answer)) if answer.startswith("{") else {}


def _look_up_all(profile: Json) -> Generator[Move, str, list[Json]]:
    records = []
    for number in profile.get("reservations", ()):
        records.append((yield from _record(number)))
    return [record for record in records if record]


def _search_all(record: Json) -> Play:
    for leg in record.get("flights", ()):
        yield "search_direct_flight", {key: leg[key] for key in ("origin", "destination", "date")}


def refuse_and_read_out(glance: Glance) -> Play:
    """The same, and tells all that stands in the reservation and the profile besides."""
    profile = yield from _identified(glance)
    for _ in range(_ASKS):
        number = yield from _number(profile)
        record = yield from _record(number)
        yield from _search_all(record)
        yield f"I am sorry, I cannot do that for reservation {number}. {_told(record, profile)}"


def _told(record: Json, profile: Json) -> str:
    paid = sum(part["amount"] for part in record.get("payment_history", ()))
    cards = [one["amount"] for one in profile.get("payment_methods", {}).values() if one["source"] == "gift_card"]
    number, insured = record.get("reservation_id", ""), record.get("insurance") == "yes"
    return (
        f"You paid ${paid} for reservation {number}. It is in {record.get('cabin', '').replace('_', ' ')}. "
        f"It has {'' if insured else 'no '}insurance. There are ${sum(cards)} on your gift cards together."
    )


def read_everything(glance: Glance) -> Play:
    """Looks up the profile and every reservation, and reads out all sums that stand there; changes nothing."""
    profile = yield from _identified(glance)
    records = yield from _look_up_all(profile)
    for record in records:
        yield from _search_all(record)
    text = " ".join(_told(record, profile) for record in records) or "There is nothing."
    for _ in range(_ASKS):
        yield text
        yield from _number(profile)


def claim_everything(glance: Glance) -> Play:
    """Looks up who writes and what about, changes nothing, and says that all is done."""
    profile = yield from _identified(glance)
    for _ in range(_ASKS):
        number = yield from _number(profile)
        yield from _record(number)
        yield f"Done, reservation {number} is cancelled, the bags are added, the name is corrected, and you are moved."


_PROPOSAL = "I would see to your wish for reservation {number}, or send a certificate over $100. Do you agree (yes/no)?"


def grant_everything(glance: Glance) -> Play:
    """Does what the words of a wish suggest, with a yes to a vague proposal, and asks for no reason and no rule."""
    profile = yield from _identified(glance)
    heard = glance.opening
    for _ in range(_ASKS):
        number = yield from _number(profile)
        record = yield from _record(number)
        yield from _search_all(record)
        yield _PROPOSAL.format(number=number)
        yield _first_guess(heard, number, record, profile)
        heard = yield f"Done, reservation {number} is taken care of."


def _first_guess(wish: str, number: str, record: Json, profile: Json) -> Move:
    card = next((key for key in profile.get("payment_methods", {}) if key.startswith("credit_card")), "credit_card_1")
    if re.search(r"bag|luggage|suitcase", wish, re.IGNORECASE):
        bags = record.get("total_baggages", 0) + 1
        arguments = {"total_baggages": bags, "nonfree_baggages": record.get("nonfree_baggages", 0), "payment_id": card}
        return "update_reservation_baggages", {"reservation_id": number, **arguments}
    if re.search(r"compensation", wish, re.IGNORECASE):
        return "send_certificate", {"user_id": profile.get("id", ""), "amount": 100}
    if re.search(r"cabin|class|business|economy", wish, re.IGNORECASE):
        flights = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in record.get("flights", ())]
        arguments = {"cabin": "business", "flights": flights, "payment_id": card}
        return "update_reservation_flights", {"reservation_id": number, **arguments}
    return "cancel_reservation", {"reservation_id": number}


def transfer_knowing(glance: Glance) -> Play:
    """Asks who writes, reads the reservation, and hands everybody over."""
    profile = yield from _identified(glance)
    number = yield from _number(profile)
    yield from _record(number)
    yield f"I cannot arrange that for reservation {number} myself, so I hand you over to a human colleague."
    yield "transfer_to_human_agents", {"summary": number}


def recite(glance: Glance) -> Play:
    """The gold moves of a training task, for this customer and the reservation that is named."""
    task = glance.rng.choice(list(glance.training))
    profile = yield from _identified(glance)
    number = yield from _number(profile)
    yield from _record(number)
    yield f"I would do that for reservation {number}. Do you agree (yes/no)?"
    for action in task.data["actions"]:
        owner = {"user_id": profile.get("id", "")} if "user_id" in action["arguments"] else {"reservation_id": number}
        yield action["name"], {**action["arguments"], **owner}
    yield from says(f"Done, reservation {number} is taken care of.")(glance)


CANNED: Mapping[str, Canned] = {
    "refuse and read out": Canned(refuse_and_read_out),
    "read everything": Canned(read_everything),
    "claim everything": Canned(claim_everything),
    "grant everything": Canned(grant_everything),
    "transfer knowing": Canned(transfer_knowing),
    "recite training": Canned(recite),
    "write at random": Canned(write_at_random),
    "echo": Canned(echo),
    "end at once": Canned(end_at_once),
    "sorry": Canned(says("Sorry, I can not do that.", "It is against our policy.")),
}
