"""Errands that need a search: another cabin, another day, a new booking, a question about fares."""

from __future__ import annotations

from dataclasses import dataclass

from environments.airline.dialects import OWN
from environments.airline.errands import (
    Caller,
    Errand,
    Unfit,
    about,
    ahead,
    day_words,
    done,
    forget,
    grounded,
    looked_for,
    method_words,
    read,
    when_asked,
)
from environments.airline.errands_small import Maker, answered, bag_words
from environments.airline.rules import paid_bags, split_payment
from environments.airline.schemas import CABINS
from environments.airline.search import direct_flights
from environments.airline.tools import EXTRA_BAG, INSURANCE
from environments.airline.world import AHEAD, world
from environments.kit.overlay import Overlay
from mua.types import Json

PREFERENCES = {
    "cheapest": "the cheapest one",
    "earliest": "the earliest one of the day",
    "latest": "the latest one of the day",
}


def cabin_words(cabin: str) -> str:
    return cabin.replace("_", " ")


def choose(flights: list[Json], cabin: str, seats: int, preference: str) -> Json | None:
    """The flight that a customer means, of those with enough seats; None where none or several are meant."""
    free = [one for one in flights if one["available_seats"][cabin] >= seats]
    if not free:
        return None

    def rank(flight: Json) -> float:
        if preference == "cheapest":
            return float(flight["prices"][cabin])
        minutes = int(flight["scheduled_departure_time_est"].replace(":", ""))
        return minutes if preference == "earliest" else -minutes

    best, *others = sorted(free, key=rank)
    return None if others and rank(others[0]) == rank(best) else best


def _chosen(origin: str, destination: str, date: str, cabin: str, seats: int, preference: str) -> Json:
    found = choose(direct_flights(Overlay(world()), origin, destination, date), cabin, seats, preference)
    if found is None:
        raise Unfit
    return found


# Another cabin


def _cabin(caller: Caller, missing: bool, change: bool) -> Errand:
    """Up or down; every flight has to have seats, and the difference has to be paid by a method that can."""
    target = caller.pick(("economy", "business"))
    reservation = caller.reservation(lambda one: _movable(caller, one, target) and (not missing or caller.unique(one)))
    words, count = cabin_words(target), len(reservation["passengers"])
    days = [caller.tables["flights"][one["flight_number"]]["dates"][one["date"]] for one in reservation["flights"]]
    price = sum(day["prices"][target] for day in days) - sum(one["price"] for one in reservation["flights"])
    method = caller.payment(price * count)
    story = f"You want {words} class on reservation {reservation['reservation_id']}."
    errand = Errand("change_cabin", "change_cabin", story, {"cabin": f"{words} class"})
    errand.searches = True
    errand.facts = {
        "reservation": reservation["reservation_id"],
        "cabin": f"{words} class",
        "payment": method_words(method),
    }
    errand.story += when_asked(errand)
    flights = [{"flight_number": one["flight_number"], "date": one["date"]} for one in reservation["flights"]]
    errand.demands = [read(reservation), *(looked_for(leg) for leg in reservation["flights"])]
    errand.actions = [_flights_action(reservation, target, flights, method)]
    errand.told = [done(reservation, "change_cabin", cabin=target)]
    return _perhaps_forgotten(caller, errand, reservation, missing)


def _movable(caller: Caller, one: Json, target: str) -> bool:
    if not ahead(one) or one["cabin"] == target or grounded(caller.tables, one):
        return False
    seats = len(one["passengers"])
    days = [caller.tables["flights"][flight["flight_number"]]["dates"][flight["date"]] for flight in one["flights"]]
    return all(day["available_seats"][target] >= seats for day in days)


def _flights_action(reservation: Json, cabin: str, flights: list[Json], method: Json) -> Json:
    arguments = {"cabin": cabin, "flights": flights, "payment_id": method["id"]}
    return {"name": "update_reservation_flights", "arguments": about(reservation) | arguments}


def _perhaps_forgotten(caller: Caller, errand: Errand, reservation: Json, missing: bool) -> Errand:
    if not missing:
        return errand
    errand.story = errand.story.replace(f"reservation {reservation['reservation_id']}", "one of your reservations")
    return forget(caller, errand, reservation)


# Another day


def _another_day(caller: Caller, missing: bool, change: bool) -> Errand:
    """One direct flight of a reservation, there or back, moves to another day."""
    reservation = caller.reservation(lambda one: _direct(caller, one) and (not missing or caller.unique(one)))
    index = caller.rng.randrange(len(reservation["flights"]))
    old, preference = reservation["flights"][index], caller.pick(tuple(PREFERENCES))
    days = _days_for(reservation, index)
    date = caller.pick(days)
    new = _chosen(
        old["origin"], old["destination"], date, reservation["cabin"], len(reservation["passengers"]), preference
    )
    method = caller.payment((new["prices"][reservation["cabin"]] - old["price"]) * len(reservation["passengers"]))
    story = f"You want to fly on another day on reservation {reservation['reservation_id']}."
    errand = Errand("change_day", "change_day", story)
    errand.searches = True
    errand.facts = {
        "reservation": reservation["reservation_id"],
        "direction": "flight back" if index else "flight out",
        "date": day_words(date),
        "flight": PREFERENCES[preference],
        "payment": method_words(method),
    }
    if change:
        before = caller.pick([day for day in days if day != date])
        _chosen(
            old["origin"], old["destination"], before, reservation["cabin"], len(reservation["passengers"]), preference
        )
        errand.before["date"] = day_words(before)
    errand.story += when_asked(errand)
    flights = [{"flight_number": one["flight_number"], "date": one["date"]} for one in reservation["flights"]]
    flights[index] = {"flight_number": new["flight_number"], "date": date}
    errand.demands = [read(reservation), looked_for(old | {"date": date})]
    errand.actions = [_flights_action(reservation, reservation["cabin"], flights, method)]
    errand.told = [done(reservation, "change_day")]
    return _perhaps_forgotten(caller, errand, reservation, missing)


def _direct(caller: Caller, one: Json) -> bool:
    legs = 2 if one["flight_type"] == "round_trip" else 1
    changeable = one["cabin"] != "basic_economy" and not grounded(caller.tables, one)
    return ahead(one) and changeable and len(one["flights"]) == legs


def _days_for(reservation: Json, index: int) -> list[str]:
    """Days ahead on which the flight can be, other than its own: out before back."""
    dates = [flight["date"] for flight in reservation["flights"]]
    days = [day for day in AHEAD if day != dates[index]]
    if len(dates) == 1:
        return days
    return [day for day in days if (day < dates[1] if index == 0 else day > dates[0])]


# A question about fares


def _ask_fare(caller: Caller, missing: bool, change: bool) -> Errand:
    origin, destination, date, cabin = *_route(caller), caller.pick(AHEAD), caller.pick(CABINS)
    flight = _chosen(origin, destination, date, cabin, 1, "cheapest")
    places = f"from {OWN.airports[origin]} to {OWN.airports[destination]} on {day_words(date)}"
    words = cabin_words(cabin)
    story = f"You want to know what the cheapest direct flight costs {places}, in {words}."
    errand = Errand("ask_fare", "ask_fare", story, {"places": places, "cabin": words})
    errand.facts = {"route": places, "date": day_words(date), "cabin": f"{words} class"}
    errand.searches = True
    arguments = {"origin": origin, "destination": destination, "date": date}
    errand.demands = [{"call": "search_direct_flight", "arguments": arguments}]
    return answered(errand, "flights", "fare", flight["prices"][cabin])


def _route(caller: Caller) -> tuple[str, str]:
    flight = caller.pick(list(caller.tables["flights"].values()))
    return flight["origin"], flight["destination"]


# A new booking


@dataclass(slots=True)
class _Trip:
    """What a customer wants to book."""

    origin: str
    destination: str
    dates: list[str]
    cabin: str
    passengers: list[Json]
    preference: str
    bags: int
    insurance: str

    def flights(self) -> list[Json]:
        """There and, with two dates, back; :class:`Unfit` where a flight is missing or not the only one meant."""
        legs = [(self.origin, self.destination), (self.destination, self.origin)]
        return [
            {"date": date} | _chosen(origin, destination, date, self.cabin, len(self.passengers), self.preference)
            for (origin, destination), date in zip(legs, self.dates, strict=False)
        ]

    def price(self, flights: list[Json], extra_bags: int) -> int:
        count = len(self.passengers)
        insured = INSURANCE * count if self.insurance == "yes" else 0
        return sum(flight["prices"][self.cabin] for flight in flights) * count + insured + EXTRA_BAG * extra_bags


def _booking(round_trip: bool, sources: tuple[str, ...]) -> Maker:
    """``sources``: what pays first, in order; a credit card bears the rest."""

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        trip = _wanted_trip(caller, round_trip)
        errand = _described(trip)
        if change:
            errand.before["bags"] = bag_words(trip.bags)
            trip.bags += 1
        errand.facts["bags"] = bag_words(trip.bags)
        flights = trip.flights()
        extra = paid_bags(caller.user["membership"], trip.cabin, len(trip.passengers), trip.bags)
        words, payment = _paid(caller, trip.price(flights, extra), sources)
        errand.facts["payment"] = words
        errand.trap = sources.count("certificate") > 1
        errand.story += when_asked(errand)
        errand.demands = [looked_for(flight) for flight in flights]
        errand.actions = [{"name": "book_reservation", "arguments": _arguments(caller, trip, flights, extra, payment)}]
        errand.told = [done(OWN.new_reservations[0], "book")]
        return errand

    return make


def _wanted_trip(caller: Caller, round_trip: bool) -> _Trip:
    dates = sorted(caller.rng.sample(AHEAD, 2 if round_trip else 1))
    party = [{**caller.user["name"], "dob": caller.user["dob"]}]
    saved: list[Json] = caller.user["saved_passengers"]
    if caller.rng.random() < 0.5 and saved[0]["first_name"] != party[0]["first_name"]:
        party.append(saved[0])
    cabin, preference = caller.pick(CABINS), caller.pick(tuple(PREFERENCES))
    bags, insurance = caller.pick((0, 1, 2, 3)), caller.pick(("yes", "no"))
    return _Trip(*_route(caller), dates, cabin, party, preference, bags, insurance)


def _described(trip: _Trip) -> Errand:
    """The errand with everything but bags and payment."""
    places = f"from {OWN.airports[trip.origin]} to {OWN.airports[trip.destination]} on {day_words(trip.dates[0])}"
    kind = "book_round_trip" if len(trip.dates) > 1 else "book_one_way"
    errand = Errand(kind, "book", f"You want to book a direct flight {places}.", {"places": places})
    errand.searches = True
    back = f"back on {day_words(trip.dates[1])}" if len(trip.dates) > 1 else ""
    errand.facts = {
        "route": places,
        "date": f"{day_words(trip.dates[0])}, and {back}" if back else day_words(trip.dates[0]),
        "trip_type": f"round trip, {back}" if back else "one way",
        "cabin": f"{cabin_words(trip.cabin)} class",
        "passengers": _party_words(trip.passengers),
        "flight": PREFERENCES[trip.preference],
        "insurance": "with insurance" if trip.insurance == "yes" else "no insurance",
    }
    errand.rules = {"passengers": "tell_party", "route": "tell_route"}
    return errand


def _party_words(party: list[Json]) -> str:
    if len(party) == 1:
        return "just me"
    others = " and ".join(f"{one['first_name']} {one['last_name']}, born {one['dob']}" for one in party[1:])
    return f"me and {others}"


def _paid(caller: Caller, price: int, sources: tuple[str, ...]) -> tuple[str, list[Json]]:
    """How the customer says it, and the parts of the payment."""
    card = caller.pick(caller.methods("credit_card"))
    last = f"for the rest {method_words(card)}"
    if sources.count("certificate") > 1:
        certificates = sorted(caller.methods("certificate"), key=lambda one: int(one["amount"]))
        if len(certificates) < 2:
            raise Unfit
        first, words = certificates[-1:], "both of my certificates (if only one can be used, the bigger one)"
    else:
        first = [caller.pick(caller.methods(source)) for source in sources]
        words = ", then ".join(method_words(one) for one in first)
    for method in first:
        caller.take(method)
    balances: list[tuple[str, int | None]] = [(one["id"], int(one["amount"])) for one in first]
    parts = split_payment(price, [*balances, (card["id"], None)])
    return (f"{words}, and {last}" if first else method_words(card)), parts


def _arguments(caller: Caller, trip: _Trip, flights: list[Json], extra: int, payment: list[Json]) -> Json:
    return {
        "user_id": caller.user_id,
        "origin": trip.origin,
        "destination": trip.destination,
        "flight_type": "round_trip" if len(trip.dates) > 1 else "one_way",
        "cabin": trip.cabin,
        "flights": [{"flight_number": one["flight_number"], "date": one["date"]} for one in flights],
        "passengers": trip.passengers,
        "payment_methods": payment,
        "total_baggages": trip.bags,
        "nonfree_baggages": extra,
        "insurance": trip.insurance,
    }


FLIGHTS: dict[str, Maker] = {
    "change_cabin": _cabin,
    "change_day": _another_day,
    "ask_fare": _ask_fare,
    "book_one_way": _booking(False, ()),
    "book_one_way_gift": _booking(False, ("gift_card",)),
    "book_one_way_two_certificates": _booking(False, ("certificate", "certificate")),
    "book_round_trip": _booking(True, ()),
    "book_round_trip_certificate": _booking(True, ("certificate",)),
    "book_round_trip_mixed": _booking(True, ("certificate", "gift_card")),
}
