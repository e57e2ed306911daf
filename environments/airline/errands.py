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
from mua.environment.statements import CANNOT
from mua.types import Json

Accept = Callable[[Json], bool]


class Unfit(Exception):
    """The customer has no reservation, payment method or the like for this errand."""


@dataclass(slots=True)
class Errand:
    """One wish of one customer. Wordings are finished; the scripted user picks one of each list by its seed."""

    kind: str
    openings: list[str]
    story: str
    """The same for a language model that plays the customer."""
    facts: dict[str, list[str]] = field(default_factory=dict)
    """What the customer answers when asked, by the names of :data:`environments.airline.user.ASKED`."""
    before: dict[str, list[str]] = field(default_factory=dict)
    """Facts that a change of mind alters, as they are before it."""
    change: list[str] = field(default_factory=list)
    actions: list[Json] = field(default_factory=list)
    statements: list[list[str | list[str]]] = field(default_factory=list)
    forbidden: list[Json] = field(default_factory=list)
    settled: str = ""
    """Pattern of what settles the wish where the usual words do not."""
    trap: bool = False
    """The policy forbids it, or what the customer first has in mind."""
    searches: bool = False
    missing: bool = False
    """The customer does not know the number of the reservation."""

    @property
    def weight(self) -> int:
        """How much there is to it: writes, searches, traps, missing information, changes of mind."""
        return len(self.actions) + self.trap + self.searches + self.missing + bool(self.change)


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


def grounded(tables: Mapping[str, Mapping[str, Json]], reservation: Json) -> bool:
    """The airline cancelled a flight of the reservation that is still to come."""
    days = [(tables["flights"][one["flight_number"]]["dates"][one["date"]], one) for one in reservation["flights"]]
    return any(day["status"] == "cancelled" and one["date"] > TODAY for day, one in days)


def number_known(reservation: Json) -> list[str]:
    number = reservation["reservation_id"]
    return [f"It is reservation {number}.", f"The number is {number}.", f"{number}."]


def number_forgotten(reservation: Json) -> list[str]:
    trip = trip_words(reservation)
    return [
        f"I do not have the number. It is the trip {trip}.",
        f"I forgot it, but it is my trip {trip}.",
        f"I cannot find it. We go {trip}.",
    ]


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


def paying(method: Json) -> list[str]:
    words = method_words(method)
    return [f"With {words}.", f"Please take {words}.", f"Use {words}."]


def when_asked(errand: Errand) -> str:
    """For the story: what a customer says when asked, in the first wording of each answer, and the change of mind."""
    known = {name: answers[0] for name, answers in {**errand.facts, **errand.before}.items() if name != "reservation"}
    answers = " ".join(f'"{answer}"' for answer in known.values())
    change = f' The first time you are asked to confirm, you say: "{errand.change[0]}"' if errand.change else ""
    return f" When you are asked, you say: {answers}{change}"


def refusal(reservation: Json) -> list[str | list[str]]:
    """The statement of a refusal: the number and words of refusing in one message."""
    return [reservation["reservation_id"], list(CANNOT)]


def about(reservation: Json) -> Json:
    return {"reservation_id": reservation["reservation_id"]}


def forget(caller: Caller, errand: Errand, reservation: Json) -> Errand:
    """The same errand of a customer who does not know the number."""
    if not caller.unique(reservation):
        raise Unfit
    errand.facts["reservation"] = number_forgotten(reservation)
    errand.missing = True
    errand.story += f" You do not know its number; it is the trip {trip_words(reservation)}."
    return errand


def _trip(reservation: Json) -> tuple[str, str, str]:
    return reservation["origin"], reservation["destination"], reservation["flights"][0]["date"]
