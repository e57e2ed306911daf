"""An agent by rules that keeps to the policy page: it solves every task of the generated airline.

It reads what the customer says, asks for what it lacks, looks things up, refuses what the page forbids and confirms
before it writes. Of the task it knows the first message alone, which a policy would read as well.

Made loose, it now and then skips the confirmation, or refuses in words of its own that name no reservation: what
conversations of people look like, and what learning has to improve on.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeAlias

from environments.airline import reading
from environments.airline.errands_flights import choose
from environments.airline.rules import (
    CERTIFICATE,
    TODAY,
    cancellable,
    compensated,
    paid_bags,
    split_payment,
    used,
)
from environments.airline.tools import EXTRA_BAG, INSURANCE
from mua.environment.protocol import Move, Task
from mua.types import Json

Moves: TypeAlias = Generator[Move, str, Any]
_ITS_OWN_WORDS = ("Sorry, we do not do that.", "Sorry, that is against our rules.")


class _Cannot(Exception):
    """The policy forbids it; holds the number of the reservation and why."""


class Expert:
    """One conversation, as a generator of moves that is sent what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        self._opening: str = task.data["errands"][0]["openings"][0]
        self._rng = random.Random(f"expert/{task.id}/{seed}")
        self._loose = loose
        self._user = ""
        self._profile: Json = {}
        self._cities: dict[str, str] = {}

    def moves(self) -> Moves:
        self._user = yield from self._ask("What is your user id?", reading.user_id)
        self._profile = reading.profile((yield "get_user_details", {"user_id": self._user}))
        heard = self._opening
        while True:
            try:
                heard = yield from self._handler(heard)(heard)
            except _Cannot as refusal:
                heard = yield self._refusal(*refusal.args)

    def _handler(self, heard: str) -> Callable[[str], Moves]:
        handlers = {
            r"compensation": self._compensate,
            r"\binsurance\b": self._refuse("it cannot be insured after booking"),
            r"\bdog\b|wheelchair|\bmeal\b": self._hand_over,
            r"did I pay": self._tell_paid,
            r"gift cards": self._tell_balance,
            r"\bcheapest\b": self._tell_fare,
            r"one more person|another passenger": self._refuse("the number of passengers stays"),
            r"name of a passenger": self._rename,
            r"bag less|bag off": self._refuse("bags can only be added"),
            r"checked bags": self._bags,
            r"class\b": self._cabin,
            r"fly to .* instead": self._refuse("its destination stays"),
            r"another day": self._another_day,
            r"\bbook\b": self._book,
            r"\bcancel\b": self._cancel,
        }
        found = next((handler for pattern, handler in handlers.items() if re.search(pattern, heard)), None)
        return found or self._lost_track

    def _lost_track(self, heard: str) -> Moves:
        return (yield "How can I help you?")

    # Asking, telling, confirming

    def _ask(self, question: str, read: Callable[[str], Any]) -> Moves:
        """What ``read`` makes of the answer; asks twice before it goes on without."""
        found = None
        for _ in range(2):
            found = read((yield question))
            if found is not None:
                break
        return found

    def _agreement(self, proposal: str) -> Generator[Move, str, str]:
        """The customer's words; "yes" unasked where the expert is loose."""
        if self._rng.random() < self._loose:
            return "yes"
        return (yield f"{proposal} Do you confirm (yes/no)?")

    def _refusal(self, number: str, why: str) -> str:
        if self._rng.random() < self._loose:
            return self._rng.choice(_ITS_OWN_WORDS)
        return f"I am sorry, I cannot do that for reservation {number}: {why}."

    def _refuse(self, why: str) -> Callable[[str], Moves]:
        def handler(heard: str) -> Moves:
            number, _ = yield from self._reservation()
            raise _Cannot(number, why)

        return handler

    # Looking up

    def _reservation(self) -> Generator[Move, str, tuple[str, Json]]:
        """Number and record of the reservation that the customer means; refuses one that is not in the profile."""
        heard = yield "Which reservation is it? Please tell me its number."
        number = reading.reservation_id(heard)
        if number is None:
            return (yield from self._by_trip(heard))
        if number not in self._profile["reservations"]:
            _cannot(number, "it does not stand in your profile")
        return number, reading.reservation((yield "get_reservation_details", {"reservation_id": number}))

    def _by_trip(self, heard: str) -> Generator[Move, str, tuple[str, Json]]:
        places, date = (yield from self._route(heard)), reading.day(heard)
        for number in self._profile["reservations"]:
            found = reading.reservation((yield "get_reservation_details", {"reservation_id": number}))
            if (found["origin"], found["destination"]) == places and found["flights"][0]["date"] == date:
                return number, found
        return _cannot("", "there is none like that in your profile")

    def _changeable(self) -> Generator[Move, str, tuple[str, Json]]:
        number, found = yield from self._reservation()
        if used(found):
            _cannot(number, "it has been used")
        return number, found

    def _route(self, heard: str) -> Generator[Move, str, tuple[str, str]]:
        """Airports of the two cities that the customer names."""
        if not self._cities:
            airports = json.loads((yield "list_all_airports", {}))
            self._cities = {city: airport for airport, city in airports.items()}
        origin, destination = reading.route(heard) or ("", "")
        return self._cities.get(origin, ""), self._cities.get(destination, "")

    def _search(self, origin: str, destination: str, date: str) -> Generator[Move, str, list[Json]]:
        asked = {"origin": origin, "destination": destination, "date": date}
        return reading.flights((yield "search_direct_flight", asked))

    def _offer(self, leg: Json) -> Generator[Move, str, Json | None]:
        """The flight of a reservation as it can be booked now; None where the airline has cancelled it."""
        found = yield from self._search(leg["origin"], leg["destination"], leg["date"])
        return next((one for one in found if one["flight_number"] == leg["flight_number"]), None)

    def _grounded(self, reservation: Json) -> Generator[Move, str, bool]:
        for leg in reservation["flights"]:
            if leg["date"] > TODAY and (yield from self._offer(leg)) is None:
                return True
        return False

    def _method(self) -> Generator[Move, str, Json]:
        found = yield from self._ask("What would you like to pay with?", lambda text: self._named(text) or None)
        return found[0] if found else self._profile["methods"][0]

    def _named(self, text: str) -> list[Json]:
        return reading.methods(text, self._profile)

    # Questions

    def _tell_paid(self, heard: str) -> Moves:
        number, found = yield from self._reservation()
        return (yield f"You paid ${found['paid']} for reservation {number}.")

    def _tell_balance(self, heard: str) -> Moves:
        cards = [one["amount"] for one in self._profile["methods"] if one["source"] == "gift_card"]
        return (yield f"There are ${sum(cards)} on your gift cards.")

    def _tell_fare(self, heard: str) -> Moves:
        cabin, date = reading.cabin(heard) or "", reading.day(heard) or ""
        origin, destination = yield from self._route(heard)
        found = yield from self._search(origin, destination, date)
        return (yield f"It costs ${min(one['prices'][cabin] for one in found if one['available_seats'][cabin])}.")

    # Changes

    def _cancel(self, heard: str) -> Moves:
        number, found = yield from self._reservation()
        reason = yield "What is the reason for the cancellation?"
        covered = "health" if re.search(r"\bill\b|\bsick\b", reason) else "weather" if "storm" in reason.lower() else ""
        covered = covered or ("weather" if "weather" in reason else "")
        allowed = cancellable(found, covered, False)
        if not allowed and "airline" in reason and not used(found):
            allowed = yield from self._grounded(found)
        if not allowed:
            _cannot(number, "it can no longer be cancelled")
        heard = yield from self._agreement(f"I would cancel reservation {number} and return what was paid.")
        if reading.agreed(heard):
            yield "cancel_reservation", {"reservation_id": number}
        return (yield f"Done, reservation {number} is cancelled.")

    def _compensate(self, heard: str) -> Moves:
        number, found = yield from self._reservation()
        lost = yield from self._grounded(found)
        if not lost or not compensated(self._profile["membership"], found):
            _cannot(number, "there is no compensation for it")
        amount = CERTIFICATE * len(found["passengers"])
        yield from self._agreement(f"I would send you a certificate over ${amount}.")
        yield "send_certificate", {"user_id": self._user, "amount": amount}
        return (yield f"Done, a certificate over ${amount} is added to your profile.")

    def _bags(self, heard: str) -> Moves:
        number, found = yield from self._changeable()
        total = yield from self._ask("How many checked bags shall it be in all?", reading.bags)
        method = yield from self._method()
        while True:
            extra = paid_bags(self._profile["membership"], found["cabin"], len(found["passengers"]), total)
            price = EXTRA_BAG * max(0, extra - found["nonfree_baggages"])
            heard = yield from self._agreement(f"Reservation {number} would have {_bags(total)} for ${price} more.")
            if reading.agreed(heard) or (changed := reading.bags(heard)) is None:
                break
            total = changed
        bags = {"total_baggages": total, "nonfree_baggages": extra, "payment_id": method["id"]}
        yield "update_reservation_baggages", {"reservation_id": number, **bags}
        return (yield f"Done, reservation {number} is updated.")

    def _rename(self, heard: str) -> Moves:
        number, found = yield from self._changeable()
        asked = "Which passenger is it, and what is the correct name?"
        first, last, new_first, new_last = yield from self._ask(asked, reading.names)
        passengers = [
            one | {"first_name": new_first, "last_name": new_last}
            if (one["first_name"], one["last_name"]) == (first, last)
            else one
            for one in found["passengers"]
        ]
        yield from self._agreement(f"{first} {last} would be {new_first} {new_last} on reservation {number}.")
        yield "update_reservation_passengers", {"reservation_id": number, "passengers": passengers}
        return (yield f"Done, reservation {number} is updated.")

    def _hand_over(self, heard: str) -> Moves:
        number, _ = yield from self._reservation()
        yield f"I cannot arrange that for reservation {number} myself, so I hand you over to a human colleague."
        return (yield "transfer_to_human_agents", {"summary": f"Wish for reservation {number}: {heard}"})

    def _cabin(self, heard: str) -> Moves:
        cabin = reading.cabin(heard)
        number, found = yield from self._changeable()
        price = 0
        for leg in found["flights"]:
            offer = yield from self._offer(leg)
            if offer is None or offer["available_seats"][cabin] < len(found["passengers"]):
                _cannot(number, "there are no seats")
            price += offer["prices"][cabin] - leg["price"]
        method = yield from self._method()
        price *= len(found["passengers"])
        yield from self._agreement(f"Reservation {number} would be in {cabin} for a difference of ${price}.")
        flights = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in found["flights"]]
        yield _flights_update(number, str(cabin), flights, method)
        return (yield f"Done, reservation {number} is updated.")

    def _another_day(self, heard: str) -> Moves:
        number, found = yield from self._changeable()
        if found["cabin"] == "basic_economy":
            _cannot(number, "basic economy flights cannot be changed")
        direction = yield "Which of the flights is it?"
        index = len(found["flights"]) - 1 if "back" in direction else 0
        date = yield from self._ask("Which day shall it be?", reading.day)
        preference = reading.preference((yield "Do you prefer the cheapest, the earliest or the latest?"))
        method = yield from self._method()
        flights = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in found["flights"]]
        while True:
            old, count = found["flights"][index], len(found["passengers"])
            offers = yield from self._search(old["origin"], old["destination"], date)
            new = choose(offers, found["cabin"], count, preference)
            if new is None:
                _cannot(number, "there is no such flight")
            flights[index] = {"flight_number": new["flight_number"], "date": date}
            price = (new["prices"][found["cabin"]] - old["price"]) * count
            proposal = f"I would take {new['flight_number']} of {date} for a difference of ${price}."
            heard = yield from self._agreement(proposal)
            if reading.agreed(heard) or (changed := reading.day(heard)) is None:
                break
            date = changed
        yield _flights_update(number, found["cabin"], flights, method)
        return (yield f"Done, reservation {number} is updated.")

    # Booking

    def _book(self, heard: str) -> Moves:
        trip = yield from self._wanted(heard)
        flights = []
        for origin, destination, date in trip["legs"]:
            offers = yield from self._search(origin, destination, date)
            flight = choose(offers, trip["cabin"], len(trip["passengers"]), trip["preference"])
            if flight is None:
                return (yield "I am sorry, there is no such flight, so it cannot be booked.")
            flights.append({"flight_number": flight["flight_number"], "date": date, "price": flight["prices"]})
        while True:
            extra = paid_bags(self._profile["membership"], trip["cabin"], len(trip["passengers"]), trip["bags"])
            price = _price(trip, flights, extra)
            numbers = ", ".join(f"{one['flight_number']} of {one['date']}" for one in flights)
            heard = yield from self._agreement(f"I would book {numbers} with {_bags(trip['bags'])} for ${price}.")
            if reading.agreed(heard) or (changed := reading.bags(heard)) is None:
                break
            trip["bags"] = changed
        yield "book_reservation", self._booking(trip, flights, extra, price)
        return (yield "Done, your trip is booked.")

    def _wanted(self, heard: str) -> Generator[Move, str, Json]:
        """All that a booking takes, question after question."""
        origin, destination = yield from self._route(heard)
        legs = [(origin, destination, reading.day(heard) or "")]
        back = reading.day((yield "Is it one way or a round trip?"))
        if back is not None:
            legs.append((destination, origin, back))
        cabin = yield from self._ask("Which cabin shall it be?", reading.cabin)
        others = reading.companions((yield "Who is flying?"))
        own = {key: self._profile[key] for key in ("first_name", "last_name", "dob")}
        bags = yield from self._ask("How many checked bags?", reading.bags)
        insurance = "yes" if reading.agreed((yield "Do you want travel insurance?")) else "no"
        preference = reading.preference((yield "Do you prefer the cheapest, the earliest or the latest?"))
        methods = self._named((yield "What would you like to pay with?"))
        return {
            "legs": legs,
            "cabin": cabin,
            "passengers": [own, *others],
            "bags": bags,
            "insurance": insurance,
            "preference": preference,
            "methods": methods,
        }

    def _booking(self, trip: Json, flights: list[Json], extra: int, price: int) -> Json:
        origin, destination, _ = trip["legs"][0]
        return {
            "user_id": self._user,
            "origin": origin,
            "destination": destination,
            "flight_type": "one_way" if len(trip["legs"]) == 1 else "round_trip",
            "cabin": trip["cabin"],
            "flights": [{"flight_number": one["flight_number"], "date": one["date"]} for one in flights],
            "passengers": trip["passengers"],
            "payment_methods": split_payment(price, [(one["id"], one.get("amount")) for one in trip["methods"]]),
            "total_baggages": trip["bags"],
            "nonfree_baggages": extra,
            "insurance": trip["insurance"],
        }


def _bags(count: int) -> str:
    return "1 checked bag" if count == 1 else f"{count} checked bags"


def _cannot(number: str, why: str) -> NoReturn:
    raise _Cannot(number, why)


def _flights_update(number: str, cabin: str, flights: list[Json], method: Json) -> Move:
    arguments = {"cabin": cabin, "flights": flights, "payment_id": method["id"]}
    return "update_reservation_flights", {"reservation_id": number, **arguments}


def _price(trip: Json, flights: list[Json], extra: int) -> int:
    count = len(trip["passengers"])
    insured = INSURANCE * count if trip["insurance"] == "yes" else 0
    return int(sum(one["price"][trip["cabin"]] for one in flights) * count + insured + EXTRA_BAG * extra)
