"""The generated airline: 300 flights over 30 days, 500 customers, 2,000 reservations, always the same.

Twenty airports are joined by 75 routes, each flown twice a day in both directions, once before and once after noon. Of
the days before today flights have landed or were cancelled; of those to come most can be booked, and some the airline
has cancelled already: the search does not list them, which is how an agent finds out. Reservations lie ahead, lie
behind or are half flown; bags, prices and payments agree with the policy.
"""

from __future__ import annotations

import datetime
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from environments.airline.rules import ALLOWANCE, FIRST_NAMES, LAST_NAMES, OWN, STREETS, TODAY, paid_bags
from environments.airline.tools import EXTRA_BAG, INSURANCE
from environments.kit.overlay import Base
from mua.types import Json

SEED = "airline/1"
ROUTES, USERS, RESERVATIONS = 75, 500, 2000
_FIRST_DAY = datetime.date(2025, 3, 2)
DAYS = tuple((_FIRST_DAY + datetime.timedelta(days=number)).isoformat() for number in range(30))
PAST = tuple(day for day in DAYS if day < TODAY)
AHEAD = tuple(day for day in DAYS if day > TODAY)
_LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
_FEWEST_MINUTES = 40
"""Between the flights of a connection."""


@lru_cache(maxsize=1)
def world() -> Base:
    """The database; whoever holds it must not write to it."""
    return Base(_Maker().tables())


class _Maker:
    """Makes everything in a fixed order from one stream of random numbers."""

    def __init__(self) -> None:
        self._rng = random.Random(SEED)
        self._flights: dict[str, Json] = {}
        self._users: dict[str, Json] = {}
        self._reservations: dict[str, Json] = {}

    def tables(self) -> dict[str, dict[str, Json]]:
        self._make_flights()
        self._by_route = self._routes()
        self._pairs = self._connections()
        self._make_users()
        owners = list(self._users)
        owners += self._rng.choices(owners, k=RESERVATIONS - len(owners))
        for owner in owners:
            self._make_reservation(owner)
        return {"flights": self._flights, "users": self._users, "reservations": self._reservations}

    def _below(self, count: int) -> int:
        """0 to ``count`` - 1; several times as fast as ``randrange``."""
        return int(self._rng.random() * count)

    # Flights

    def _make_flights(self) -> None:
        airports = list(OWN.airports)
        pairs = [(one, other) for index, one in enumerate(airports) for other in airports[index + 1 :]]
        number = 100
        for one, other in self._rng.sample(pairs, ROUTES):
            minutes, fare = 60 + self._below(200), 50 + self._below(90)
            for origin, destination in ((one, other), (other, one)):
                for earliest in (360, 780):
                    number += 1
                    flight = self._flight(f"QLX{number}", origin, destination, earliest + self._below(400), minutes)
                    flight["dates"] = {day: self._day(flight, day, fare) for day in DAYS}
                    self._flights[flight["flight_number"]] = flight

    def _flight(self, number: str, origin: str, destination: str, departure: int, minutes: int) -> Json:
        departure -= departure % 5
        arrival = departure + minutes
        late = "+1" if arrival >= 1440 else ""
        return {
            "flight_number": number,
            "origin": origin,
            "destination": destination,
            "scheduled_departure_time_est": _clock(departure),
            "scheduled_arrival_time_est": _clock(arrival % 1440) + late,
        }

    def _day(self, flight: Json, day: str, fare: int) -> Json:
        if self._rng.random() < 0.08:
            return {"status": "cancelled"}
        if day > TODAY:
            return self._bookable(fare)
        departure, arrival = flight["scheduled_departure_time_est"], flight["scheduled_arrival_time_est"]
        landing = f"{_after(day) if '+1' in arrival else day}T{arrival.removesuffix('+1')}"
        if day < TODAY or (arrival < OWN.now[11:] and "+1" not in arrival):
            actual = {"actual_departure_time_est": f"{day}T{departure}", "actual_arrival_time_est": landing}
            return {"status": "landed", **actual}
        if departure < OWN.now[11:]:
            flying = {"actual_departure_time_est": f"{day}T{departure}", "estimated_arrival_time_est": landing}
            return {"status": "flying", **flying}
        status = "delayed" if self._rng.random() < 0.3 else "on time"
        estimated = {"estimated_departure_time_est": f"{day}T{departure}", "estimated_arrival_time_est": landing}
        return {"status": status, **estimated}

    def _bookable(self, fare: int) -> Json:
        basic = fare + self._below(60)
        economy = basic + 20 + self._below(60)
        return {
            "status": "available",
            "available_seats": {
                "basic_economy": self._below(20),
                "economy": self._below(20),
                "business": self._below(20),
            },
            "prices": {
                "basic_economy": basic,
                "economy": economy,
                "business": economy + 90 + self._below(200),
            },
        }

    def _routes(self) -> dict[tuple[str, str], list[Json]]:
        found = defaultdict(list)
        for flight in self._flights.values():
            found[flight["origin"], flight["destination"]].append(flight)
        return dict(found)

    def _connections(self) -> list[tuple[Json, Json]]:
        departing = defaultdict(list)
        for flight in self._flights.values():
            departing[flight["origin"]].append(flight)
        return [
            (first, second)
            for first in self._flights.values()
            for second in departing[first["destination"]]
            if second["destination"] != first["origin"] and _caught(first, second)
        ]

    # Customers

    def _make_users(self) -> None:
        names = [(first, last) for first in FIRST_NAMES for last in LAST_NAMES]
        for first, last in self._rng.sample(names, USERS):
            user_id = f"{first}_{last}_{1000 + self._below(9000)}".lower()
            methods = self._payment_methods()
            self._users[user_id] = {
                "name": {"first_name": first, "last_name": last},
                "address": self._address(),
                "email": f"{first}.{last}{10 + self._below(90)}@example.com".lower(),
                "dob": self._birthday(),
                "payment_methods": {method["id"]: method for method in methods},
                "saved_passengers": [self._person(last) for _ in range(1 + self._below(2))],
                "membership": self._rng.choice(tuple(ALLOWANCE)),
                "reservations": [],
            }

    def _payment_methods(self) -> list[Json]:
        """One or two credit cards, up to two gift cards and two certificates, told apart by digits and amounts."""
        methods: list[Json] = []
        for four in self._rng.sample(range(1000, 10000), 1 + self._below(2)):
            card = {"source": "credit_card", "brand": self._rng.choice(("visa", "mastercard")), "last_four": str(four)}
            methods.append({**card, "id": self._payment_id("credit_card")})
        for amount in self._rng.sample(range(20, 400), self._below(3)):
            methods.append({"source": "gift_card", "amount": amount, "id": self._payment_id("gift_card")})
        for amount in self._rng.sample(range(50, 500, 25), self._below(3)):
            methods.append({"source": "certificate", "amount": amount, "id": self._payment_id("certificate")})
        return methods

    def _payment_id(self, source: str) -> str:
        return f"{source}_{1000000 + self._below(6000000)}"

    def _address(self) -> Json:
        return {
            "address1": f"{1 + self._below(900)} {self._rng.choice(STREETS)} Street",
            "address2": f"Apartment {1 + self._below(90)}",
            "city": self._rng.choice(tuple(OWN.airports.values())),
            "country": "USA",
            "state": self._rng.choice(("CA", "FL", "MO", "NC", "OH", "TN", "TX", "UT")),
            "zip": str(10000 + self._below(90000)),
        }

    def _person(self, last: str) -> Json:
        return {"first_name": self._rng.choice(FIRST_NAMES), "last_name": last, "dob": self._birthday()}

    def _birthday(self) -> str:
        return f"{1950 + self._below(55)}-{1 + self._below(12):02}-{1 + self._below(28):02}"

    # Reservations

    def _make_reservation(self, user_id: str) -> None:
        user, cabin = self._users[user_id], self._rng.choice(("basic_economy", "economy", "business"))
        flights, back = self._itinerary()
        booked = [self._segment(flight, day, cabin) for flight, day in [*flights, *back]]
        passengers = self._passengers(user)
        count, insurance = len(passengers), self._rng.choice(("yes", "no"))
        free = ALLOWANCE[user["membership"]][cabin] * count
        total = self._below(free + 3) if self._rng.random() < 0.5 else 0
        extra = paid_bags(user["membership"], cabin, count, total)
        price = sum(flight["price"] for flight in booked) * count + EXTRA_BAG * extra
        price += INSURANCE * count if insurance == "yes" else 0
        card = next(method for method in user["payment_methods"].values() if method["source"] == "credit_card")
        reservation_id = self._reservation_id()
        user["reservations"].append(reservation_id)
        self._reservations[reservation_id] = {
            "reservation_id": reservation_id,
            "user_id": user_id,
            "origin": flights[0][0]["origin"],
            "destination": flights[-1][0]["destination"],
            "flight_type": "round_trip" if back else "one_way",
            "cabin": cabin,
            "flights": booked,
            "passengers": passengers,
            "payment_history": [{"payment_id": card["id"], "amount": price}],
            "created_at": self._created(min(flight["date"] for flight in booked)),
            "total_baggages": total,
            "nonfree_baggages": extra,
            "insurance": insurance,
        }

    def _itinerary(self) -> tuple[list[tuple[Json, str]], list[tuple[Json, str]]]:
        """Flights with days, there and (half of the time) back; with one stop a third of the time."""
        start, end = self._days()
        there = list(self._rng.choice(self._pairs)) if self._rng.random() < 0.33 else [self._any_flight()]
        back: list[Json] = []
        if self._rng.random() < 0.5:
            home = [(flight["destination"], flight["origin"]) for flight in reversed(there)]
            back = [self._by_route[route][index] for index, route in enumerate(home)]
            if len(back) == 2 and not _caught(*back):
                back = []
        return [(flight, start) for flight in there], [(flight, end) for flight in back]

    def _any_flight(self) -> Json:
        return self._rng.choice(list(self._flights.values()))

    def _days(self) -> tuple[str, str]:
        """Both ahead (most), both past, or half flown."""
        kind = self._rng.random()
        if kind < 0.12:
            return self._rng.choice(PAST[-6:]), self._rng.choice(AHEAD[:6])
        days: Sequence[str] = AHEAD if kind < 0.88 else PAST
        one, other = sorted(self._rng.sample(range(len(days)), 2))
        return days[one], days[other]

    def _segment(self, flight: Json, day: str, cabin: str) -> Json:
        now = flight["dates"][day].get("prices", {}).get(cabin, 120)
        price = max(30, now - 40 + self._below(60))
        return {
            "origin": flight["origin"],
            "destination": flight["destination"],
            "flight_number": flight["flight_number"],
            "date": day,
            "price": price,
        }

    def _passengers(self, user: Json) -> list[Json]:
        """The customer, and others of the family; given names differ, so that one is enough to tell who is meant."""
        party = [{**user["name"], "dob": user["dob"]}]
        for _ in range(self._rng.choice((0, 0, 0, 1, 1, 2))):
            person = self._person(user["name"]["last_name"])
            if person["first_name"] not in {one["first_name"] for one in party}:
                party.append(person)
        return party

    def _reservation_id(self) -> str:
        while True:
            letters = [self._rng.choice(_LETTERS) for _ in range(4)]
            letters.insert(1 + self._below(4), str(2 + self._below(8)))
            letters.insert(1 + self._below(5), str(2 + self._below(8)))
            if (found := "".join(letters)) not in self._reservations:
                return found

    def _created(self, first_day: str) -> str:
        """Within the last day or weeks ago; never close to the limit of 24 hours, nor after the first flight."""
        clock = f"{self._below(60):02}:{self._below(60):02}"
        if first_day > TODAY and self._rng.random() < 0.2:
            return f"2025-03-15T{13 + self._below(10)}:{clock}"
        return f"2025-02-{1 + self._below(28):02}T{10 + self._below(12)}:{clock}"


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}:00"


def _after(day: str) -> str:
    return (datetime.date.fromisoformat(day) + datetime.timedelta(days=1)).isoformat()


def _caught(first: Json, second: Json) -> bool:
    """Whether the second flight can be reached from the first on the same day."""
    arrival = first["scheduled_arrival_time_est"]
    return "+1" not in arrival and _minutes(arrival) + _FEWEST_MINUTES <= _minutes(
        second["scheduled_departure_time_est"]
    )


def _minutes(clock: str) -> int:
    return int(clock[:2]) * 60 + int(clock[3:5])
