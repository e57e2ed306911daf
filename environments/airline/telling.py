"""Gold words: how the facts that a customer has to hear can be told."""

from __future__ import annotations

from mua.environment.protocol import Move
from mua.types import Json

_DEEDS = {
    "cancel": "Reservation {number} is cancelled.",
    "book": "Your trip is booked as reservation {number}.",
    "change_cabin": "I have changed the cabin of reservation {number}.",
    "change_day": "I have moved the flight of reservation {number}.",
    "add_bags": "I have added the bags to reservation {number}.",
    "rename": "I have corrected the name on reservation {number}.",
    "compensation": "I have sent you a certificate for reservation {number}.",
}
_ANSWERS = {
    "paid": "You paid ${value} for reservation {number}.",
    "balance": "There are ${value} on your gift cards together.",
    "fare": "The cheapest seat costs ${value}.",
    "can": "I cannot do that for reservation {number}.",
    "transfer": "I hand you over to a human colleague.",
}


def wording(fact: Json) -> str:
    """A sentence that tells a required fact."""
    fact = fact["any"][0] if "any" in fact else fact
    number = fact["thing"].rpartition(" ")[2].upper()
    text = _DEEDS[fact["value"]] if fact["role"] == "deed" else _ANSWERS[fact["role"]]
    return text.format(number=number, value=fact["value"])


def first_of(demand: Json) -> Move:
    """The call that meets a demand; the first of several that would."""
    one = demand["any"][0] if "any" in demand else demand
    return one["call"], one["arguments"]
