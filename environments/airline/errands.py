"""What customers come for: one errand is one wish with what the customer knows, and what must come of it.

A maker of errands looks for a reservation of the customer that fits, and raises :class:`Unfit` where there is none; a
task is made of one to three errands of one customer (:mod:`environments.airline.tasks`).
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from environments.airline.rules import (
    CERTIFICATE,
    DAY_AGO,
    LAST_NAMES,
    OWN,
    TODAY,
    compensated,
    paid_bags,
    split_payment,
    used,
)
from environments.airline.tools import CABINS, EXTRA_BAG, INSURANCE, direct_flights
from environments.airline.world import AHEAD, world
from environments.kit.overlay import Overlay
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


# Errands around one reservation that need no search: cancelling, bags, names, questions, and what is refused.

Maker: TypeAlias = Callable[[Caller, bool, bool], Errand]
"""``make(caller, missing, change)``: whether the number is forgotten, and whether the customer changes its mind."""
Complete: TypeAlias = Callable[[Caller, Errand], None]
"""Adds what the customer knows besides."""

REASONS = ("plans", "health", "weather", "airline")
"""Each has rules of its own in the grammar, ``tell_<reason>``."""
_IN_WORDS = {
    "plans": "your plans have changed",
    "health": "you are ill",
    "weather": "a storm is forecast there",
    "airline": "the airline has cancelled one of the flights",
}


def _plain(one: Json) -> bool:
    """Ahead, and nothing but insurance or the airline could make it cancellable."""
    return ahead(one) and one["created_at"] < DAY_AGO and one["cabin"] != "business"


def _about_one(caller: Caller, missing: bool, accept: Accept, kind: str, verb: str, story: str) -> tuple[Errand, Json]:
    """An errand on one fitting reservation; ``story`` has a place for its number."""
    reservation = caller.reservation(lambda one: accept(one) and (not missing or caller.unique(one)))
    number = "one of your reservations" if missing else f"reservation {reservation['reservation_id']}"
    errand = Errand(kind, verb, story.format(number=number), facts={"reservation": reservation["reservation_id"]})
    errand.demands = [read(reservation)]
    return (forget(caller, errand, reservation) if missing else errand), reservation


def refused(kind: str, verb: str, tool: str, accept: Accept, story: str, complete: Complete | None = None) -> Maker:
    """A wish that the policy forbids: nothing is written, and the customer is told so."""

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        errand, reservation = _about_one(caller, missing, accept, kind, verb, story)
        if complete is not None:
            complete(caller, errand)
        errand.story += when_asked(errand)
        return deny(errand, reservation, verb, tool)

    return make


def deny(errand: Errand, reservation: Json, deed: str, tool: str) -> Errand:
    """Require a refusal and forbid the tool, if there is one for it, on this reservation."""
    errand.denied = errand.trap = True
    errand.told = [refusal(reservation, deed)]
    errand.forbidden = [{"name": tool, "arguments": about(reservation)}] if tool else []
    return errand


# Cancelling

_CANCEL_STORY = "You want to cancel {number}."


def _cancel(kind: str, reasons: tuple[str, ...], accept: Accept, allowed: bool, airline: bool = False) -> Maker:
    """``airline``: whether the airline has cancelled a flight of the reservation."""

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        def fits(one: Json) -> bool:
            return accept(one) and grounded(caller.tables, one) == airline

        errand, reservation = _about_one(caller, missing, fits, kind, "cancel", _CANCEL_STORY)
        _because(errand, caller.pick(reasons))
        errand.searches = "airline" in reasons
        if errand.searches:
            errand.demands += _flights_checked(caller, reservation)
        errand.story += when_asked(errand)
        if not allowed:
            return deny(errand, reservation, "cancel", "cancel_reservation")
        errand.actions = [{"name": "cancel_reservation", "arguments": about(reservation)}]
        errand.told = [done(reservation, "cancel")]
        return errand

    return make


def _because(errand: Errand, reason: str) -> None:
    errand.facts["reason"] = _IN_WORDS[reason]
    errand.rules["reason"] = f"tell_{reason}"


def _flights_checked(caller: Caller, reservation: Json) -> list[Json]:
    """What must have been searched to know whether the airline cancelled a flight: one that it did, else all ahead."""
    gone = lost(caller.tables, reservation)
    if gone:
        return [{"any": [demand for leg in gone for demand in looked_for(leg)["any"]]}]
    return [looked_for(leg) for leg in reservation["flights"] if leg["date"] > TODAY]


def _insured(wanted: str) -> Accept:
    return lambda one: _plain(one) and one["insurance"] == wanted


def _fresh(one: Json) -> bool:
    return ahead(one) and one["created_at"] >= DAY_AGO and one["cabin"] != "business"


def _half_flown(one: Json) -> bool:
    days = [flight["date"] for flight in one["flights"]]
    return min(days) <= TODAY < max(days)


def _stranger(caller: Caller, missing: bool, change: bool) -> Errand:
    others = caller.tables["reservations"].values()
    fitting = [one for one in others if one["user_id"] != caller.user_id and ahead(one) and one["cabin"] == "business"]
    reservation = caller.pick(fitting)
    story = f"You want to cancel reservation {reservation['reservation_id']}, which a friend made for you."
    errand = Errand("refused_stranger", "cancel", story, facts={"reservation": reservation["reservation_id"]})
    _because(errand, "plans")
    errand.story += when_asked(errand)
    return deny(errand, reservation, "cancel", "cancel_reservation")


# Bags


def _bags(caller: Caller, missing: bool, change: bool) -> Errand:
    """One to three more bags; a change of mind adds another."""
    story = "You want more checked bags on {number}."
    errand, reservation = _about_one(caller, missing, ahead, "add_bags", "add_bags", story)
    total = reservation["total_baggages"] + caller.pick((1, 2, 3))
    if change:
        errand.before["bags"] = bag_words(total)
        total += 1
    extra = paid_bags(caller.user["membership"], reservation["cabin"], len(reservation["passengers"]), total)
    method = caller.payment(EXTRA_BAG * max(0, extra - reservation["nonfree_baggages"]))
    errand.facts |= {"bags": bag_words(total), "payment": method_words(method)}
    errand.story += when_asked(errand)
    arguments = {"total_baggages": total, "nonfree_baggages": extra, "payment_id": method["id"]}
    errand.actions = [{"name": "update_reservation_baggages", "arguments": about(reservation) | arguments}]
    errand.told = [done(reservation, "add_bags", bags=str(total))]
    return errand


def bag_words(total: int) -> str:
    return "no bags" if total == 0 else "1 bag" if total == 1 else f"{total} bags"


# Passengers


def _rename(caller: Caller, missing: bool, change: bool) -> Errand:
    story = "You want to correct the name of a passenger on {number}."
    errand, reservation = _about_one(caller, missing, ahead, "rename", "rename", story)
    index = caller.rng.randrange(len(reservation["passengers"]))
    old = reservation["passengers"][index]
    new = old | {"last_name": caller.pick([name for name in LAST_NAMES if name != old["last_name"]])}
    wrong, right = (f"{one['first_name']} {one['last_name']}" for one in (old, new))
    errand.facts["passengers"] = f"from {wrong} to {right}"
    errand.rules["passengers"] = "tell_correction"
    errand.story += when_asked(errand)
    passengers = [*reservation["passengers"][:index], new, *reservation["passengers"][index + 1 :]]
    arguments = about(reservation) | {"passengers": passengers}
    errand.actions = [{"name": "update_reservation_passengers", "arguments": arguments}]
    errand.told = [done(reservation, "rename", name=right.lower())]
    return errand


# Compensation


def _compensation(kind: str, allowed: bool, airline: bool) -> Maker:
    """``airline``: whether a flight really is cancelled."""
    story = "You are annoyed that a flight of {number} was cancelled by the airline, and you want compensation."

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        def fits(one: Json) -> bool:
            due = compensated(caller.user["membership"], one)
            return ahead(one) and grounded(caller.tables, one) == airline and due == (allowed or not airline)

        errand, reservation = _about_one(caller, missing, fits, kind, "compensation", story)
        errand.searches = True
        errand.demands += _flights_checked(caller, reservation)
        if not allowed:
            errand = deny(errand, reservation, "compensation", "send_certificate")
            errand.forbidden = [{"name": "send_certificate", "arguments": {"user_id": caller.user_id}}]
            return errand
        arguments = {"user_id": caller.user_id, "amount": CERTIFICATE * len(reservation["passengers"])}
        errand.actions = [{"name": "send_certificate", "arguments": arguments}]
        errand.told = [done(reservation, "compensation", certificate=str(arguments["amount"]))]
        return errand

    return make


# Questions


def _ask_paid(caller: Caller, missing: bool, change: bool) -> Errand:
    errand, reservation = _about_one(
        caller, missing, lambda one: True, "ask_paid", "ask_paid", "You want to know what you paid for {number}."
    )
    return answered(
        errand, thing_of(reservation), "paid", sum(part["amount"] for part in reservation["payment_history"])
    )


def _ask_balance(caller: Caller, missing: bool, change: bool) -> Errand:
    cards = caller.methods("gift_card")
    if len(cards) < 2:
        raise Unfit
    for card in cards:
        caller.take(card)
    story = "You want to know how much money is on all your gift cards together."
    errand = Errand("ask_balance", "ask_balance", story)
    return answered(errand, "profile", "balance", sum(card["amount"] for card in cards))


def answered(errand: Errand, thing: str, role: str, amount: int) -> Errand:
    """Require that the customer is told ``amount``."""
    errand.told = [{"thing": thing, "role": role, "value": str(amount)}]
    return errand


# Requests for a person

_SPECIAL = ("take my dog along", "order a wheelchair at the airport", "have a special meal on board")


def _handover(caller: Caller, missing: bool, change: bool) -> Errand:
    wish = caller.pick(_SPECIAL)
    story = f"You want to {wish} on {{number}}. If you are handed over to a person, that is fine."
    errand, reservation = _about_one(caller, missing, ahead, "handover", "special", story)
    errand.values["special"] = wish
    errand.denied = errand.trap = True
    errand.told = [refusal(reservation, "special"), {"thing": "profile", "role": "transfer", "value": "yes"}]
    return errand


def _elsewhere(caller: Caller, errand: Errand) -> None:
    errand.values["city"] = caller.pick(("Phoenix", "Reno", "Omaha", "Tucson", "Memphis", "Boise"))
    errand.story = errand.story.format(**errand.values)


def _some_day(caller: Caller, errand: Errand) -> None:
    """What somebody knows who wants a flight on another day."""
    errand.facts |= {"date": day_words(caller.pick(AHEAD)), "direction": "flight out", "flight": "the cheapest one"}


SMALL: dict[str, Maker] = {
    "cancel_fresh": _cancel("cancel_fresh", ("plans",), _fresh, True),
    "cancel_business": _cancel(
        "cancel_business", ("plans",), lambda one: ahead(one) and one["cabin"] == "business", True
    ),
    "cancel_insured": _cancel("cancel_insured", ("health", "weather"), _insured("yes"), True),
    "cancel_airline": _cancel("cancel_airline", ("airline",), _insured("no"), True, airline=True),
    "refused_cancel": _cancel("refused_cancel", ("plans", "health", "weather"), _insured("no"), False),
    "refused_reason": _cancel("refused_reason", ("plans",), _insured("yes"), False),
    "refused_claim": _cancel("refused_claim", ("airline",), _insured("no"), False),
    "refused_flown": _cancel("refused_flown", ("plans", "health"), _half_flown, False),
    "refused_stranger": _stranger,
    "add_bags": _bags,
    "refused_fewer_bags": refused(
        "refused_fewer_bags",
        "fewer_bags",
        "update_reservation_baggages",
        lambda one: ahead(one) and one["total_baggages"] > 0,
        "You want one checked bag less on {number}.",
    ),
    "rename": _rename,
    "refused_passenger": refused(
        "refused_passenger",
        "add_passenger",
        "update_reservation_passengers",
        ahead,
        "You want to add another passenger to {number}.",
    ),
    "refused_insurance": refused(
        "refused_insurance",
        "add_insurance",
        "",
        lambda one: ahead(one) and one["insurance"] == "no",
        "You want to add travel insurance to {number}.",
    ),
    "refused_elsewhere": refused(
        "refused_elsewhere",
        "change_route",
        "update_reservation_flights",
        lambda one: ahead(one) and one["cabin"] != "basic_economy",
        "You want to fly to {{city}} instead on {number}.",
        _elsewhere,
    ),
    "refused_basic": refused(
        "refused_basic",
        "change_day",
        "update_reservation_flights",
        lambda one: ahead(one) and one["cabin"] == "basic_economy",
        "You want to fly on another day on {number}.",
        _some_day,
    ),
    "compensation": _compensation("compensation", True, True),
    "refused_compensation": _compensation("refused_compensation", False, True),
    "refused_false_claim": _compensation("refused_false_claim", False, False),
    "ask_paid": _ask_paid,
    "ask_balance": _ask_balance,
    "handover": _handover,
}


# Errands that need a search: another cabin, another day, a new booking, a question about fares.

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
