"""Errands around one reservation that need no search: cancelling, bags, names, questions, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from environments.airline.errands import (
    Accept,
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
    lost,
    method_words,
    read,
    refusal,
    thing_of,
    when_asked,
)
from environments.airline.rules import CERTIFICATE, DAY_AGO, TODAY, compensated, paid_bags
from environments.airline.tools import EXTRA_BAG
from environments.airline.words import LAST_NAMES
from environments.airline.world import AHEAD
from mua.types import Json

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
