"""What customers come for: one errand is one wish with what the customer knows, and what must come of it.

A maker of errands looks for a reservation of the customer that fits, and raises :class:`Unfit` where there is none; a
task is made of one to three errands of one customer (:mod:`environments.airline.tasks`).
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from environments.airline.dialects import OWN
from environments.airline.rules import TODAY, used
from mua.types import Json

Accept = Callable[[Json], bool]


class Unfit(Exception):
    """The customer has no reservation, payment method or the like for this errand."""


@dataclass(slots=True)
class Errand:
    """One wish of one customer. How it is put into words is the grammar's to say (``voice.yaml``)."""

    kind: str
    verb: str
    """The wish as the customer's grammar and reader know it."""
    story: str
    """The same for a language model that plays the customer."""
    values: dict[str, str] = field(default_factory=dict)
    """What the first words hold."""
    facts: dict[str, str] = field(default_factory=dict)
    """What the customer answers when asked, by the names of ``words.yaml``."""
    rules: dict[str, str] = field(default_factory=dict)
    """The grammar's rule that tells a fact, where it is not ``tell_<fact>``."""
    before: dict[str, str] = field(default_factory=dict)
    """The fact that a change of mind alters, as it is before it."""
    actions: list[Json] = field(default_factory=list)
    demands: list[Json] = field(default_factory=list)
    """What must have been looked up before the last word (:mod:`environments.kit.conduct`)."""
    told: list[Json] = field(default_factory=list)
    """What the customer must have been told (:func:`environments.kit.conduct.untold`)."""
    forbidden: list[Json] = field(default_factory=list)
    denied: bool = False
    """The policy forbids it."""
    trap: bool = False
    """The policy forbids it, or what the customer first has in mind."""
    searches: bool = False
    missing: bool = False
    """The customer does not know the number of the reservation."""

    @property
    def weight(self) -> int:
        """How much there is to it: writes, searches, traps, missing information, changes of mind."""
        return len(self.actions) + self.trap + self.searches + self.missing + bool(self.before)


class Caller:
    """A customer while a task is made: no reservation and no balance is used in two errands."""

    def __init__(self, tables: Mapping[str, Mapping[str, Json]], user_id: str, rng: random.Random) -> None:
        self.rng = rng
        self.user_id = user_id
        self.tables = tables
        self.user = tables["users"][user_id]
        self._taken: set[str] = set()

    def reservation(self, accept: Accept) -> Json:
        """One of the customer's reservations that fits and is not used yet."""
        own = [self.tables["reservations"][key] for key in self.user["reservations"] if key not in self._taken]
        found = self.pick([one for one in own if accept(one)])
        self._taken.add(found["reservation_id"])
        return found

    def pick(self, choices: Sequence[Any]) -> Any:
        """One of ``choices``; :class:`Unfit` where there is none."""
        if not choices:
            raise Unfit
        return self.rng.choice(choices)

    def methods(self, source: str) -> list[Json]:
        """Payment methods of a sort that no errand uses yet."""
        every = self.user["payment_methods"].values()
        return [one for one in every if one["source"] == source and one["id"] not in self._taken]

    def take(self, method: Json) -> None:
        """Keep a gift card or certificate from being used again, since its balance is then another."""
        if method["source"] != "credit_card":
            self._taken.add(method["id"])

    def payment(self, price: int) -> Json:
        """A payment method that covers ``price``: a gift card now and then, else a credit card."""
        cards = [card for card in self.methods("gift_card") if card["amount"] >= price]
        method: Json = self.pick(cards if cards and self.rng.random() < 0.4 else self.methods("credit_card"))
        self.take(method)
        return method

    def unique(self, reservation: Json) -> bool:
        """Whether route and first day tell this reservation from the customer's others."""
        own = [self.tables["reservations"][key] for key in self.user["reservations"]]
        return sum(_trip(one) == _trip(reservation) for one in own) == 1


def ahead(reservation: Json) -> bool:
    return not used(reservation)


def lost(tables: Mapping[str, Mapping[str, Json]], reservation: Json) -> list[Json]:
    """The flights of the reservation, still to come, that the airline cancelled."""
    days = [(tables["flights"][one["flight_number"]]["dates"][one["date"]], one) for one in reservation["flights"]]
    return [one for day, one in days if day["status"] == "cancelled" and one["date"] > TODAY]


def grounded(tables: Mapping[str, Mapping[str, Json]], reservation: Json) -> bool:
    """The airline cancelled a flight of the reservation that is still to come."""
    return bool(lost(tables, reservation))


def trip_words(reservation: Json) -> str:
    origin, destination, date = _trip(reservation)
    return f"from {OWN.airports[origin]} to {OWN.airports[destination]} on {day_words(date)}"


def day_words(date: str) -> str:
    """``March 20`` for 2025-03-20."""
    day = datetime.date.fromisoformat(date)
    return f"{day:%B} {day.day}"


def method_words(method: Json) -> str:
    """How a customer names a payment method of the profile."""
    if method["source"] == "credit_card":
        return f"my {method['brand'].capitalize()} ending in {method['last_four']}"
    name = "gift card with" if method["source"] == "gift_card" else "certificate over"
    return f"my {name} ${method['amount']}"


def when_asked(errand: Errand) -> str:
    """For the story: what a customer answers when asked, and the change of mind."""
    known = {name: value for name, value in {**errand.facts, **errand.before}.items() if name != "reservation"}
    answers = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in known.items())
    told = f" When you are asked, you answer this: {answers}." if answers else ""
    changes = "; ".join(f"{name}: {errand.facts[name]}" for name in errand.before)
    change = " The first time you are asked to confirm, you change your mind and want this instead: " + changes
    return told + (change + "." if changes else "")


def about(reservation: Json) -> Json:
    return {"reservation_id": reservation["reservation_id"]}


def thing_of(reservation: Json | str) -> str:
    """How claims name a reservation, given as a record or by its number."""
    number = reservation if isinstance(reservation, str) else reservation["reservation_id"]
    return f"reservation {number.lower()}"


def done(reservation: Json | str, deed: str, **state: str) -> Json:
    """The customer is to be told that it was done, or how it is since: ``state`` are roles and their new values."""
    thing = thing_of(reservation)
    fact = {"thing": thing, "role": "deed", "value": deed, "or": ["done"]}
    return {"any": [fact, *({"thing": thing, "role": role, "value": value} for role, value in state.items())]}


def refusal(reservation: Json | str, deed: str) -> Json:
    """The customer is to be told that it cannot be done, and for which reservation."""
    return {"thing": thing_of(reservation), "role": "can", "value": deed, "or": ["that"], "denied": True}


def read(reservation: Json) -> Json:
    """The demand to look a reservation up."""
    return {"call": "get_reservation_details", "arguments": about(reservation)}


def looked_for(leg: Json) -> Json:
    """The demand to search a flight of a reservation on its day, directly or among connections."""
    arguments = {key: leg[key] for key in ("origin", "destination", "date")}
    direct = {"call": "search_direct_flight", "arguments": arguments}
    return {"any": [direct, {"call": "search_onestop_flight", "arguments": {"date": leg["date"]}}]}


def forget(caller: Caller, errand: Errand, reservation: Json) -> Errand:
    """The same errand of a customer who does not know the number."""
    if not caller.unique(reservation):
        raise Unfit
    errand.facts["reservation"] = trip_words(reservation)
    errand.rules["reservation"] = "tell_trip"
    errand.missing = True
    errand.story += f" You do not know its number; it is the trip {trip_words(reservation)}."
    return errand


def _trip(reservation: Json) -> tuple[str, str, str]:
    return reservation["origin"], reservation["destination"], reservation["flights"][0]["date"]
