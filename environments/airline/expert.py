"""An agent by rules that keeps to the policy page: it solves every task of the generated airline, whoever asks.

It knows each wish with what its first words say, which a person would read there, and learns everything else by
asking and by calling tools: it asks again when an answer does not hold what was asked for, looks again when an id was
mistyped, and makes its proposal anew when the customer wavers, corrects a slip or has another mind.

Made loose, it now and then skips the confirmation, or refuses in words of its own that name no reservation: what
conversations of people look like, and what learning has to improve on.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Generator
from typing import Any, NoReturn, TypeAlias, TypeVar

from environments.airline import reading
from environments.airline.errands import choose
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
from environments.kit.conduct import agrees
from mua.environment.protocol import Move, Task
from mua.types import Json

T = TypeVar("T")
Moves: TypeAlias = Generator[Move, str, Any]
_ITS_OWN_WORDS = ("Sorry, we do not do that.", "Sorry, that is against our rules.")
MOST_QUESTIONS = 6
"""How often it asks for one thing, proposes one thing, and says how a wish ended."""
WISHES = {
    "compensation": r"compensation",
    "add_insurance": r"insur",
    "special": r"\b(dog along|a wheelchair|special meal)\b",
    "ask_paid": r"\b(did i pay|i paid|cost me|set me back|did my reservation cost)\b",
    "ask_balance": r"gift cards",
    "ask_fare": r"cheapest|lowest|do fares go",
    "add_passenger": r"one more person|another passenger|extra traveller",
    "rename": r"\bname\b.* (wrong|not right|misspelled)|(correct|fix).* (name|spelling)|traveller's name|misspelled",
    "fewer_bags": r"bag less|(bag|suitcase) (be taken )?(off|from)|suitcase fewer|remove a suitcase",
    "add_bags": r"\bbags\b|luggage|suitcases",
    "change_route": r"fly to .* instead|my destination|rather than where|divert|reroute|new destination",
    "change_day": r"another day|different day|day of a flight|reschedule|shift|some other day|another date",
    "change_cabin": r"\b(economy|business)\b",
    "cancel": r"cancel|call off|scrap",
    "book": r"\bbook|is what i am after",
}
"""What tells that a customer has come to such a wish; the first that fits."""


class _Cannot(Exception):
    """The policy forbids it; holds the number of the reservation and why."""


def _same(heard: str) -> bool:
    """Nothing else is wanted."""
    return False


def stated(text: str) -> str:
    """The wish that first words state; empty where they state none."""
    return next((verb for verb, words in WISHES.items() if re.search(words, text, re.IGNORECASE)), "")


class Expert:
    """One conversation, as a generator of moves that is sent what came back."""

    def __init__(self, task: Task, seed: int, loose: float = 0.0) -> None:
        self._wishes: list[Json] = [{key: one[key] for key in ("verb", "values")} for one in task.data["errands"]]
        self._rng = random.Random(f"expert/{task.id}/{seed}")
        self._loose = loose
        self._user = ""
        self._profile: Json = {}
        self._cities: dict[str, str] = {}

    def moves(self) -> Moves:
        yield from self._identify()
        handlers: dict[str, Callable[[Json], Generator[Move, str, str]]] = {
            "cancel": self._cancel,
            "book": self._book,
            "change_cabin": self._cabin,
            "change_day": self._another_day,
            "add_bags": self._bags,
            "rename": self._rename,
            "compensation": self._compensate,
            "ask_paid": self._tell_paid,
            "ask_balance": self._tell_balance,
            "ask_fare": self._tell_fare,
            "special": self._hand_over,
            "add_insurance": self._refuse("travel insurance cannot be added after booking"),
            "add_passenger": self._refuse("the number of passengers cannot be changed"),
            "fewer_bags": self._refuse("bags can be added but not taken away"),
            "change_route": self._refuse("its destination cannot be changed"),
        }
        while self._wishes:
            wish = self._wishes.pop(0)
            try:
                ending = yield from handlers[wish["verb"]](wish["values"])
            except _Cannot as refusal:
                ending = self._refusal(*refusal.args)
            yield from self._end(ending)

    def _identify(self) -> Moves:
        question = "What is your user id?"
        for _ in range(MOST_QUESTIONS):
            self._user = (yield from self._ask(question, reading.user_id)) or ""
            found = yield "get_user_details", {"user_id": self._user}
            if found.startswith("{"):
                self._profile = reading.profile(found)
                return
            question = "I do not find a profile for that user id. What is your user id, please?"

    # Asking, telling, confirming

    def _ask(self, question: str, read: Callable[[str], T | None]) -> Generator[Move, str, T | None]:
        """What ``read`` makes of the answer; asks again for what it does not hold."""
        for _ in range(MOST_QUESTIONS):
            if (found := read((yield question))) is not None:
                return found
        return None

    def _agreed(self, proposal: Callable[[], str], change: Callable[[str], bool] = _same) -> Moves:
        """Proposes until the customer agrees; ``change`` takes in what is wanted instead."""
        for _ in range(MOST_QUESTIONS):
            if not (yield from self._changed(proposal(), change)):
                return

    def _changed(self, proposal: str, change: Callable[[str], bool] = _same) -> Generator[Move, str, bool]:
        """Proposes until the customer agrees or wants something else; whether it is the latter.

        Goes on unasked where the expert is loose.
        """
        if self._rng.random() < self._loose:
            return False
        for _ in range(MOST_QUESTIONS):
            heard = yield f"{proposal} Do you agree (yes/no)?"
            if change(heard):
                return True
            if agrees(heard):
                break
        return False

    def _end(self, text: str) -> Moves:
        """Says how a wish ended, again if the customer does not take it, until the next one is stated."""
        following = self._wishes[0]["verb"] if self._wishes else ""
        for _ in range(MOST_QUESTIONS):
            if stated((yield text)) == following != "":
                return

    def _refusal(self, number: str, why: str) -> str:
        if self._rng.random() < self._loose:
            return self._rng.choice(_ITS_OWN_WORDS)
        return f"I am sorry, I cannot do that for reservation {number}: {why}."

    def _refuse(self, why: str) -> Callable[[Json], Generator[Move, str, str]]:
        def handler(values: Json) -> Generator[Move, str, str]:
            number, _ = yield from self._reservation()
            raise _Cannot(number, why)

        return handler

    # Looking up

    def _reservation(self) -> Generator[Move, str, tuple[str, Json]]:
        """Number and record of the reservation that the customer means; refuses one that is not in the profile."""
        question, before = "Which reservation is it? Please tell me its number.", ""
        for _ in range(MOST_QUESTIONS):
            number, trip = (yield from self._ask(question, _number_or_trip)) or ("", "")
            if trip:
                return (yield from self._by_trip(trip))
            if number in self._profile["reservations"]:
                answer = yield "get_reservation_details", {"reservation_id": number}
                return number, reading.reservation(answer)
            if number == before:
                break
            question = f"Reservation {number} is not in your profile. Which reservation number is it?"
            before = number
        _cannot(before, "it is not in your profile")

    def _by_trip(self, heard: str) -> Generator[Move, str, tuple[str, Json]]:
        places, date = (yield from self._route(heard)), reading.day(heard)
        for number in self._profile["reservations"]:
            found = reading.reservation((yield "get_reservation_details", {"reservation_id": number}))
            if (found["origin"], found["destination"]) == places and found["flights"][0]["date"] == date:
                return number, found
        _cannot("", "there is none like that in your profile")

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
        found = yield from self._ask("Which payment method would you like to use?", self._named)
        return found[0] if found else self._profile["methods"][0]

    def _named(self, text: str) -> list[Json] | None:
        return reading.methods(text, self._profile) or None

    # Questions

    def _tell_paid(self, values: Json) -> Generator[Move, str, str]:
        number, found = yield from self._reservation()
        return f"You paid ${found['paid']} for reservation {number}."

    def _tell_balance(self, values: Json) -> Generator[Move, str, str]:
        cards = [one["amount"] for one in self._profile["methods"] if one["source"] == "gift_card"]
        yield from ()
        return f"There are ${sum(cards)} on your gift cards together."

    def _tell_fare(self, values: Json) -> Generator[Move, str, str]:
        cabin, date = reading.cabin(values["cabin"]) or "", reading.day(values["places"]) or ""
        origin, destination = yield from self._route(values["places"])
        found = yield from self._search(origin, destination, date)
        price = min(one["prices"][cabin] for one in found if one["available_seats"][cabin])
        return f"The cheapest {_cabin_words(cabin)} seat costs ${price}."

    # Changes

    def _cancel(self, values: Json) -> Generator[Move, str, str]:
        number, found = yield from self._reservation()
        reason = (yield from self._ask("What is the reason for the cancellation?", reading.reason)) or "plans"
        allowed = cancellable(found, reason, False)
        if not allowed and reason == "airline" and not used(found):
            allowed = yield from self._grounded(found)
        if not allowed:
            _cannot(number, "it cannot be cancelled")
        yield from self._agreed(lambda: f"I would cancel reservation {number} and return ${found['paid']}.")
        yield "cancel_reservation", {"reservation_id": number}
        return f"Done, reservation {number} is cancelled."

    def _compensate(self, values: Json) -> Generator[Move, str, str]:
        number, found = yield from self._reservation()
        lost = yield from self._grounded(found)
        if not lost or not compensated(self._profile["membership"], found):
            _cannot(number, "there is no compensation for it")
        amount = CERTIFICATE * len(found["passengers"])
        yield from self._agreed(lambda: f"I would send you a certificate over ${amount} for reservation {number}.")
        yield "send_certificate", {"user_id": self._user, "amount": amount}
        return f"Done, a certificate over ${amount} for reservation {number} is in your profile now."

    def _bags(self, values: Json) -> Generator[Move, str, str]:
        number, found = yield from self._changeable()
        wanted = {"bags": (yield from self._ask("How many checked bags shall it be in all?", reading.bags)) or 0}
        method = yield from self._method()

        def extra() -> int:
            passengers = len(found["passengers"])
            return paid_bags(self._profile["membership"], found["cabin"], passengers, wanted["bags"])

        def proposal() -> str:
            price = EXTRA_BAG * max(0, extra() - found["nonfree_baggages"])
            return f"Reservation {number} would have {_bags(wanted['bags'])} for ${price} more."

        yield from self._agreed(proposal, _taking(wanted, "bags", reading.bags))
        bags = {"total_baggages": wanted["bags"], "nonfree_baggages": extra(), "payment_id": method["id"]}
        yield "update_reservation_baggages", {"reservation_id": number, **bags}
        return f"Done, reservation {number} has {_bags(wanted['bags'])} now."

    def _rename(self, values: Json) -> Generator[Move, str, str]:
        number, found = yield from self._changeable()
        asked = "Which passenger is it, and what is the correct name?"
        first, last, new_first, new_last = (yield from self._ask(asked, reading.names)) or ("", "", "", "")
        passengers = [
            one | {"first_name": new_first, "last_name": new_last}
            if (one["first_name"], one["last_name"]) == (first, last)
            else one
            for one in found["passengers"]
        ]
        proposal = f"{first} {last} would be {new_first} {new_last} on reservation {number}."
        yield from self._agreed(lambda: proposal)
        yield "update_reservation_passengers", {"reservation_id": number, "passengers": passengers}
        return f"Done, the name on reservation {number} is corrected to {new_first} {new_last}."

    def _hand_over(self, values: Json) -> Generator[Move, str, str]:
        number, _ = yield from self._reservation()
        yield f"I cannot arrange that for reservation {number} myself, so I hand you over to a human colleague."
        yield "transfer_to_human_agents", {"summary": f"Wish for reservation {number}: {values['special']}"}
        return "A human colleague takes over."

    def _cabin(self, values: Json) -> Generator[Move, str, str]:
        cabin = reading.cabin(values["cabin"]) or ""
        number, found = yield from self._changeable()
        price = 0
        for leg in found["flights"]:
            offer = yield from self._offer(leg)
            if offer is None or offer["available_seats"][cabin] < len(found["passengers"]):
                _cannot(number, "there are no seats")
            price += offer["prices"][cabin] - leg["price"]
        method = yield from self._method()
        price *= len(found["passengers"])
        proposal = f"Reservation {number} would be in {_cabin_words(cabin)}, {_difference(price)}."
        yield from self._agreed(lambda: proposal)
        flights = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in found["flights"]]
        yield _flights_update(number, cabin, flights, method)
        return f"Done, reservation {number} is in {_cabin_words(cabin)} now."

    def _another_day(self, values: Json) -> Generator[Move, str, str]:
        number, found = yield from self._changeable()
        if found["cabin"] == "basic_economy":
            _cannot(number, "basic economy flights cannot be changed")
        way = yield from self._ask("Which of the flights is it, the flight out or the flight back?", reading.direction)
        index = len(found["flights"]) - 1 if way == "back" else 0
        wanted = {"date": (yield from self._ask("Which day shall it be?", reading.day)) or ""}
        asked = "Do you prefer the cheapest, the earliest or the latest flight?"
        preference = (yield from self._ask(asked, reading.preference)) or "cheapest"
        method = yield from self._method()
        old, count = found["flights"][index], len(found["passengers"])
        for _ in range(MOST_QUESTIONS):
            day = wanted["date"]
            offers = yield from self._search(old["origin"], old["destination"], day)
            new = choose(offers, found["cabin"], count, preference)
            if new is None and (yield from self._put_right(wanted, number)):
                continue
            if new is None:
                raise _Cannot(number, "there is no such flight")
            price = (new["prices"][found["cabin"]] - old["price"]) * count
            proposal = f"Reservation {number} would be on {new['flight_number']} of {day}, {_difference(price)}."
            if not (yield from self._changed(proposal, _taking(wanted, "date", reading.day))):
                break
        flights = [{"flight_number": leg["flight_number"], "date": leg["date"]} for leg in found["flights"]]
        assert new is not None
        flights[index] = {"flight_number": new["flight_number"], "date": wanted["date"]}
        yield _flights_update(number, found["cabin"], flights, method)
        return f"Done, reservation {number} is moved to {new['flight_number']} on {wanted['date']}."

    def _put_right(self, wanted: Json, number: str) -> Generator[Move, str, bool]:
        """Whether the customer meant another day than the one on which nothing can be had."""
        heard = yield f"I find no such flight on {wanted['date']} for reservation {number}. Is that the right day?"
        return _taking(wanted, "date", reading.day)(heard)

    # Booking

    def _book(self, values: Json) -> Generator[Move, str, str]:
        trip = yield from self._wanted(values["places"])
        flights = []
        for origin, destination, date in trip["legs"]:
            offers = yield from self._search(origin, destination, date)
            flight = choose(offers, trip["cabin"], len(trip["passengers"]), trip["preference"])
            if flight is None:
                return "I am sorry, there is no such flight, so it cannot be booked."
            flights.append({"flight_number": flight["flight_number"], "date": date, "price": flight["prices"]})

        def extra() -> int:
            return paid_bags(self._profile["membership"], trip["cabin"], len(trip["passengers"]), trip["bags"])

        def proposal() -> str:
            numbers = " and ".join(f"{one['flight_number']} of {one['date']}" for one in flights)
            return f"I would book {numbers} with {_bags(trip['bags'])} for ${_price(trip, flights, extra())}."

        yield from self._agreed(proposal, _taking(trip, "bags", reading.bags))
        made = yield "book_reservation", self._booking(trip, flights, extra(), _price(trip, flights, extra()))
        return f"Done, your trip is booked as reservation {json.loads(made)['reservation_id']}."

    def _wanted(self, places: str) -> Generator[Move, str, Json]:
        """All that a booking takes, question after question."""
        origin, destination = yield from self._route(places)
        legs = [(origin, destination, reading.day(places) or "")]
        back = yield from self._ask("Is it one way or a round trip?", reading.trip_type)
        if back:
            legs.append((destination, origin, back))
        cabin = yield from self._ask("Which cabin shall it be?", reading.cabin)
        others = yield from self._ask("Who are the passengers?", reading.party)
        own = {key: self._profile[key] for key in ("first_name", "last_name", "dob")}
        bags = yield from self._ask("How many checked bags shall it be?", reading.bags)
        insurance = yield from self._ask("Do you want travel insurance?", reading.insurance)
        asked = "Do you prefer the cheapest, the earliest or the latest flight?"
        preference = yield from self._ask(asked, reading.preference)
        methods = yield from self._ask("Which payment method would you like to use?", self._named)
        return {
            "legs": legs,
            "cabin": cabin,
            "passengers": [own, *(others or ())],
            "bags": bags,
            "insurance": insurance,
            "preference": preference,
            "methods": methods or [],
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


def _taking(wanted: Json, key: str, read: Callable[[str], Any]) -> Callable[[str], bool]:
    """Takes a new value over from what is said; whether there was one."""

    def change(heard: str) -> bool:
        found = read(heard)
        if found is None or found == wanted[key]:
            return False
        wanted[key] = found
        return True

    return change


def _number_or_trip(text: str) -> tuple[str, str] | None:
    number = reading.reservation_id(text)
    return (number, "") if number else ("", text) if reading.route(text) else None


def _bags(count: int) -> str:
    return "1 checked bag" if count == 1 else f"{count} checked bags"


def _cabin_words(cabin: str) -> str:
    return cabin.replace("_", " ")


def _difference(price: int) -> str:
    return f"and ${price} more would be charged" if price >= 0 else f"and ${-price} would be returned"


def _cannot(number: str, why: str) -> NoReturn:
    raise _Cannot(number, why)


def _flights_update(number: str, cabin: str, flights: list[Json], method: Json) -> Move:
    arguments = {"cabin": cabin, "flights": flights, "payment_id": method["id"]}
    return "update_reservation_flights", {"reservation_id": number, **arguments}


def _price(trip: Json, flights: list[Json], extra: int) -> int:
    count = len(trip["passengers"])
    insured = INSURANCE * count if trip["insurance"] == "yes" else 0
    return int(sum(one["price"][trip["cabin"]] for one in flights) * count + insured + EXTRA_BAG * extra)
