"""What is so at one moment of an episode, as far as an agent may speak of it: records, look-ups, money moved.

Everything is of the task's customer: the reservations of the profile, those that were named or looked up, what searches
found, and what was paid or paid back since the episode began.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from environments.airline.errands import trip_words
from environments.airline.rules import OWN, TODAY, cancellable, compensated, used
from environments.airline.tools import direct_flights, onestop_flights
from environments.airline.world import world
from environments.kit.conduct import Called, Past
from environments.kit.overlay import Base, Overlay
from mua.environment.protocol import Task
from mua.types import Json

WRITES = {
    "cancel_reservation": "cancel",
    "book_reservation": "book",
    "update_reservation_baggages": "add_bags",
    "update_reservation_passengers": "rename",
    "send_certificate": "compensation",
}
"""Tools that change something, and the deed of each; a change of flights is one of cabin or day, as the records say."""


_LIKE_A_NUMBER = re.compile(r"(?<![\w_])(?!qlx)(?=[a-z]*\d)[a-z][a-z0-9]{5}(?![\w_])")


@dataclass(frozen=True, slots=True)
class Offer:
    """A flight that a search found on a day."""

    number: str
    date: str
    departure: str
    arrival: str
    prices: Mapping[str, int]
    seats: Mapping[str, int]


@dataclass(frozen=True)
class Ledger:
    """All of it; numbers of reservations are in lower case."""

    task: Task
    base: Base
    state: Overlay
    past: Past

    @cached_property
    def user_id(self) -> str:
        return str(self.task.data["user"])

    @cached_property
    def user(self) -> Json:
        return self.state.get("users", self.user_id) or {}

    @cached_property
    def user_before(self) -> Json:
        return self.base.tables["users"][self.user_id]

    @cached_property
    def own(self) -> list[str]:
        """The numbers in the profile."""
        return [number.lower() for number in self.user["reservations"]]

    @cached_property
    def discussed(self) -> list[str]:
        """Numbers that calls were about or the customer named, the latest last."""
        called = [number for call in self.past.calls if (number := self._number(call))]
        heard = [number for number in self.records if number not in called and self.past.heard and self._heard(number)]
        return list(dict.fromkeys([*heard, *reversed(list(dict.fromkeys(reversed(called))))]))

    def _heard(self, number: str) -> bool:
        return self.past.has_heard(number)

    def _number(self, call: Called) -> str:
        if call.name == "book_reservation":
            made = [number for number in self.own if number.upper() in OWN.new_reservations]
            return made[-1] if made else ""
        return str(call.arguments.get("reservation_id", "")).lower()

    @cached_property
    def records(self) -> dict[str, Json]:
        """Number -> record, of the profile and of those that calls or the task are about."""
        named = [str(call.arguments.get("reservation_id", "")).lower() for call in self.past.calls]
        wanted = [errand["facts"].get("reservation", "").lower() for errand in self.task.data.get("errands", ())]
        found = {}
        for number in dict.fromkeys([*self.own, *named, *wanted]):
            record = self.state.get("reservations", number.upper())
            if record is not None:
                found[number] = record
        return found

    @cached_property
    def strange(self) -> list[str]:
        """What the customer named that looks like a number of a reservation and is none of these."""
        said = _LIKE_A_NUMBER.findall(" ".join(self.past.heard).lower())
        return [number for number in dict.fromkeys(said) if number not in self.records]

    def before(self, number: str) -> Json:
        """The record as it was when the episode began; as it is now for one that was made since."""
        return self.base.tables["reservations"].get(number.upper()) or self.records[number]

    # Look-ups

    @cached_property
    def profile_read(self) -> bool:
        return any(c.name == "get_user_details" and c.arguments["user_id"] == self.user_id for c in self.past.calls)

    @cached_property
    def read(self) -> set[str]:
        """Reservations that were looked up or made."""
        told = ("get_reservation_details", "book_reservation", *WRITES, "update_reservation_flights")
        return {self._number(call) for call in self.past.calls if call.name in told} - {""}

    @cached_property
    def offers(self) -> list[Offer]:
        """What searches found."""
        found: dict[tuple[str, str], Offer] = {}
        for call in self.past.calls:
            if call.name in ("search_direct_flight", "search_onestop_flight"):
                found |= {(one.number, one.date): one for one in _searched(call.name, *_asked(call))}
        return list(found.values())

    @cached_property
    def searches(self) -> list[tuple[str, str, str]]:
        """Origin, destination and day of the searches."""
        return [_asked(call) for call in self.past.calls if call.name.startswith("search_")]

    # Flights

    @cached_property
    def legs(self) -> dict[str, list[Json]]:
        return {number: record["flights"] for number, record in self.records.items()}

    def lost(self, leg: Json) -> bool:
        """Whether the airline has cancelled this flight of a reservation."""
        day = self.base.tables["flights"][leg["flight_number"]]["dates"][leg["date"]]
        return bool(day["status"] == "cancelled")

    def checked(self, leg: Json) -> bool:
        """Whether a search of its day was made."""
        return any(date == leg["date"] for _, _, date in self.searches)

    # Money

    @cached_property
    def moved(self) -> list[tuple[str, str, int]]:
        """Reservation, payment method and amount of what was paid (above 0) or paid back (below) since the start."""
        found = []
        for number, record in self.records.items():
            made_now = number.upper() not in self.base.tables["reservations"]
            old = [] if made_now else self.before(number)["payment_history"]
            parts = record["payment_history"][len(old) :]
            found += [(number, part["payment_id"], part["amount"]) for part in parts]
        return found

    @cached_property
    def certificates(self) -> list[Json]:
        """Certificates that were sent since the start."""
        old = self.user_before["payment_methods"]
        new = self.user["payment_methods"]
        return [new[key] for key in new if key not in old]

    # Deeds

    @cached_property
    def deeds(self) -> dict[str, set[str]]:
        """Reservation -> what was done to it since the start."""
        found: dict[str, set[str]] = {number: set() for number in self.records}
        for call in self.past.calls:
            number = self._number(call)
            if call.name == "update_reservation_flights":
                found.setdefault(number, set()).update(self._flight_deeds(number))
            elif call.name == "send_certificate":
                for one in self.records.keys() & set(self.discussed):
                    found[one].add("compensation")
            elif call.name in WRITES:
                found.setdefault(number, set()).add(WRITES[call.name])
        return found

    def _flight_deeds(self, number: str) -> set[str]:
        now, old = self.records[number], self.before(number)
        deeds = {"change_cabin"} if now["cabin"] != old["cabin"] else set[str]()
        flights = [[(leg["flight_number"], leg["date"]) for leg in one["flights"]] for one in (now, old)]
        return deeds | ({"change_day"} if flights[0] != flights[1] else set())

    # What the policy allows

    def possible(self, number: str) -> set[str]:
        """The wishes that the policy lets an agent fulfil for a reservation; ``that`` is what is asked of it."""
        record = self.before(number)
        errands = [one for one in self.task.data.get("errands", ()) if self._is_about(one, number)]
        if number not in self.own:
            return set()
        found = self._changes(record)
        found |= {"cancel"} if self._cancellable(record, errands) else set()
        lost = any(self.lost(leg) and leg["date"] > TODAY for leg in record["flights"])
        found |= {"compensation"} if lost and compensated(self.user["membership"], record) else set()
        found |= {"book"} if any(one["verb"] == "book" for one in self.task.data.get("errands", ())) else set()
        found |= self.deeds.get(number, set())
        return found | ({"that"} if any(not one["denied"] for one in errands) else set())

    def _cancellable(self, record: Json, errands: list[Json]) -> bool:
        reasons = [one["rules"].get("reason", "").removeprefix("tell_") for one in errands]
        lost = any(self.lost(leg) and leg["date"] > TODAY for leg in record["flights"])
        return any(cancellable(record, reason, lost) for reason in reasons or [""])

    def _changes(self, record: Json) -> set[str]:
        if used(record):
            return set()
        return {"add_bags", "rename", "change_cabin"} | (
            {"change_day"} if record["cabin"] != "basic_economy" else set()
        )

    def _is_about(self, errand: Json, number: str) -> bool:
        told = errand["facts"].get("reservation", "")
        if told.lower() == number:
            return True
        trip = trip_words(self.records[number]) if number in self.records else ""
        return bool(trip) and told == trip


def _asked(call: Called) -> tuple[str, str, str]:
    return tuple(call.arguments[key] for key in ("origin", "destination", "date"))  # type: ignore[return-value]


@lru_cache(maxsize=4096)
def _searched(tool: str, origin: str, destination: str, date: str) -> tuple[Offer, ...]:
    return tuple(_offers(tool, origin, destination, date))


def _offers(tool: str, origin: str, destination: str, date: str) -> Iterator[Offer]:
    database = Overlay(world())
    if tool == "search_direct_flight":
        for flight in direct_flights(database, origin, destination, date):
            yield _offer(flight, date)
        return
    for pair in onestop_flights(database, OWN, origin, destination, date):
        for flight in pair:
            yield _offer(flight, flight["date"])


def _offer(flight: Json, date: str) -> Offer:
    start, end = (flight[f"scheduled_{which}_time_est"][:5] for which in ("departure", "arrival"))
    return Offer(flight["flight_number"].lower(), date, start, end, flight["prices"], flight["available_seats"])
