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
    forget,
    grounded,
    number_known,
    paying,
    refusal,
    when_asked,
)
from environments.airline.rules import CERTIFICATE, DAY_AGO, TODAY, compensated, paid_bags
from environments.airline.tools import EXTRA_BAG
from environments.airline.words import LAST_NAMES
from mua.types import Json

Maker: TypeAlias = Callable[[Caller, bool, bool], Errand]
"""``make(caller, missing, change)``: whether the number is forgotten, and whether the customer changes its mind."""

REASONS = {
    "plans": ["My plans have changed.", "I do not want to go any more.", "I found something better to do."],
    "health": ["I am ill.", "I have fallen sick.", "I am ill and must stay at home."],
    "weather": ["A storm is forecast there.", "The weather there is too bad.", "There is a storm warning."],
    "airline": ["The airline has cancelled one of the flights.", "One of the flights was cancelled by the airline."],
}


def _plain(one: Json) -> bool:
    """Ahead, and nothing but insurance or the airline could make it cancellable."""
    return ahead(one) and one["created_at"] < DAY_AGO and one["cabin"] != "business"


def _about_one(
    caller: Caller, missing: bool, accept: Accept, kind: str, openings: list[str], story: str
) -> tuple[Errand, Json]:
    """An errand on one fitting reservation; ``story`` has a place for its number."""
    reservation = caller.reservation(lambda one: accept(one) and (not missing or caller.unique(one)))
    number = "one of your reservations" if missing else f"reservation {reservation['reservation_id']}"
    errand = Errand(kind, openings, story.format(number=number), {"reservation": number_known(reservation)})
    return (forget(caller, errand, reservation) if missing else errand), reservation


def refused(kind: str, tool: str, accept: Accept, openings: list[str], story: str) -> Maker:
    """A wish that the policy forbids: nothing is written, and the customer is told so."""

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        errand, reservation = _about_one(caller, missing, accept, kind, openings, story)
        return deny(errand, reservation, tool)

    return make


def deny(errand: Errand, reservation: Json, tool: str) -> Errand:
    """Require a refusal and forbid the tool, if there is one for it, on this reservation."""
    errand.trap = True
    errand.statements = [refusal(reservation)]
    errand.forbidden = [{"name": tool, "arguments": about(reservation)}] if tool else []
    return errand


# Cancelling

_CANCEL = ["I want to cancel a reservation.", "Please cancel a trip of mine.", "Hi, I need to cancel one of my trips."]
_CANCEL_STORY = "You want to cancel {number}."


def _cancel(kind: str, reasons: tuple[str, ...], accept: Accept, allowed: bool, airline: bool = False) -> Maker:
    """``airline``: whether the airline has cancelled a flight of the reservation."""

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        def fits(one: Json) -> bool:
            return accept(one) and grounded(caller.tables, one) == airline

        errand, reservation = _about_one(caller, missing, fits, kind, _CANCEL, _CANCEL_STORY)
        words = REASONS[caller.pick(reasons)]
        errand.facts["reason"] = words
        errand.searches = "airline" in reasons
        errand.story += when_asked(errand)
        if not allowed:
            return deny(errand, reservation, "cancel_reservation")
        errand.actions = [{"name": "cancel_reservation", "arguments": about(reservation)}]
        return errand

    return make


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
    errand = Errand("refused_stranger", _CANCEL, story)
    errand.facts = {"reservation": number_known(reservation), "reason": REASONS["plans"]}
    errand.story += when_asked(errand)
    return deny(errand, reservation, "cancel_reservation")


# Bags


def _bags(caller: Caller, missing: bool, change: bool) -> Errand:
    """One to three more bags; a change of mind adds another."""
    openings = ["I want more checked bags on my reservation.", "Please add checked bags to my reservation."]
    story = "You want more checked bags on {number}."
    errand, reservation = _about_one(caller, missing, ahead, "add_bags", openings, story)
    total = reservation["total_baggages"] + caller.pick((1, 2, 3))
    if change:
        errand.before["bags"] = bag_words(total)
        total += 1
        errand.change = other_bags(total)
    extra = paid_bags(caller.user["membership"], reservation["cabin"], len(reservation["passengers"]), total)
    method = caller.payment(EXTRA_BAG * max(0, extra - reservation["nonfree_baggages"]))
    errand.facts |= {"bags": bag_words(total), "payment": paying(method)}
    errand.story += when_asked(errand)
    arguments = {"total_baggages": total, "nonfree_baggages": extra, "payment_id": method["id"]}
    errand.actions = [{"name": "update_reservation_baggages", "arguments": about(reservation) | arguments}]
    return errand


def bag_words(total: int) -> list[str]:
    if total == 0:
        return ["No bags.", "0 bags."]
    bags = "bag" if total == 1 else "bags"
    return [f"{total} {bags} in all.", f"{total} checked {bags}."]


def other_bags(total: int) -> list[str]:
    """A change of mind about bags."""
    words = bag_words(total)[0].removesuffix(".")
    return [f"Wait, I want {words} instead.", f"Sorry, make it {words}."]


# Passengers


def _rename(caller: Caller, missing: bool, change: bool) -> Errand:
    openings = ["The name of a passenger on my reservation is wrong.", "I have to correct the name of a passenger."]
    story = "You want to correct the name of a passenger on {number}."
    errand, reservation = _about_one(caller, missing, ahead, "rename", openings, story)
    index = caller.rng.randrange(len(reservation["passengers"]))
    old = reservation["passengers"][index]
    new = old | {"last_name": caller.pick([name for name in LAST_NAMES if name != old["last_name"]])}
    wrong, right = (f"{one['first_name']} {one['last_name']}" for one in (old, new))
    errand.facts["who"] = [f"Please change {wrong} to {right}.", f"{wrong} should be {right}."]
    errand.story += when_asked(errand)
    passengers = [*reservation["passengers"][:index], new, *reservation["passengers"][index + 1 :]]
    arguments = about(reservation) | {"passengers": passengers}
    errand.actions = [{"name": "update_reservation_passengers", "arguments": arguments}]
    return errand


# Compensation


def _compensation(kind: str, allowed: bool, airline: bool) -> Maker:
    """``airline``: whether a flight really is cancelled."""
    openings = ["One of my flights was cancelled and I want compensation.", "I ask for compensation for a lost flight."]
    story = "You are annoyed that a flight of {number} was cancelled by the airline, and you want compensation."

    def make(caller: Caller, missing: bool, change: bool) -> Errand:
        def fits(one: Json) -> bool:
            due = compensated(caller.user["membership"], one)
            return ahead(one) and grounded(caller.tables, one) == airline and due == (allowed or not airline)

        errand, reservation = _about_one(caller, missing, fits, kind, openings, story)
        errand.searches = True
        if not allowed:
            errand.trap, errand.statements = True, [refusal(reservation)]
            errand.forbidden = [{"name": "send_certificate", "arguments": {"user_id": caller.user_id}}]
            return errand
        arguments = {"user_id": caller.user_id, "amount": CERTIFICATE * len(reservation["passengers"])}
        errand.actions = [{"name": "send_certificate", "arguments": arguments}]
        return errand

    return make


# Questions


def _ask_paid(caller: Caller, missing: bool, change: bool) -> Errand:
    openings = ["How much did I pay for my reservation?", "What did I pay for my reservation in all?"]
    errand, reservation = _about_one(
        caller, missing, lambda one: True, "ask_paid", openings, "You want to know what you paid for {number}."
    )
    return answered(errand, sum(part["amount"] for part in reservation["payment_history"]))


def _ask_balance(caller: Caller, missing: bool, change: bool) -> Errand:
    cards = caller.methods("gift_card")
    if len(cards) < 2:
        raise Unfit
    for card in cards:
        caller.take(card)
    openings = ["How much money is on my gift cards together?", "What is left on all my gift cards together?"]
    errand = Errand("ask_balance", openings, "You want to know how much money is on all your gift cards together.")
    return answered(errand, sum(card["amount"] for card in cards))


def answered(errand: Errand, amount: int) -> Errand:
    """Require that the customer is told ``amount``."""
    if amount < 100:
        raise Unfit  # too easily said by chance
    errand.statements, errand.settled = [[str(amount)]], rf"\b{amount}\b"
    return errand


# Requests for a person


def _handover(caller: Caller, missing: bool, change: bool) -> Errand:
    wish = caller.pick(("take my dog along", "order a wheelchair at the airport", "have a special meal on board"))
    openings = [f"I want to {wish} on my reservation.", f"Please arrange that I can {wish} on my reservation."]
    story = f"You want to {wish} on {{number}}. If you are handed over to a person, that is fine."
    errand, reservation = _about_one(caller, missing, ahead, "handover", openings, story)
    errand.statements = [[*refusal(reservation), ["human", "person", "colleague", "transfer"]]]
    errand.trap = True
    return errand


_NEW_PASSENGER = ["I want to take one more person along on my reservation.", "Add another passenger to my reservation."]
_INSURE = ["I want to add travel insurance to my reservation.", "Please add insurance to my reservation."]
_ELSEWHERE = [
    "I want to fly to Phoenix instead on my reservation.",
    "Change my reservation so that I fly to Reno instead.",
]
_FEWER = ["I want one checked bag less on my reservation.", "Please take one checked bag off my reservation."]

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
        "update_reservation_baggages",
        lambda one: ahead(one) and one["total_baggages"] > 0,
        _FEWER,
        "You want one checked bag less on {number}.",
    ),
    "rename": _rename,
    "refused_passenger": refused(
        "refused_passenger",
        "update_reservation_passengers",
        ahead,
        _NEW_PASSENGER,
        "You want to add another passenger to {number}.",
    ),
    "refused_insurance": refused(
        "refused_insurance",
        "",
        lambda one: ahead(one) and one["insurance"] == "no",
        _INSURE,
        "You want to add travel insurance to {number}.",
    ),
    "refused_elsewhere": refused(
        "refused_elsewhere",
        "update_reservation_flights",
        lambda one: ahead(one) and one["cabin"] != "basic_economy",
        _ELSEWHERE,
        "You want to fly to another city instead on {number}.",
    ),
    "refused_basic": refused(
        "refused_basic",
        "update_reservation_flights",
        lambda one: ahead(one) and one["cabin"] == "basic_economy",
        ["I want to fly on another day on my reservation.", "Please move my reservation to another day."],
        "You want to fly on another day on {number}.",
    ),
    "compensation": _compensation("compensation", True, True),
    "refused_compensation": _compensation("refused_compensation", False, True),
    "refused_false_claim": _compensation("refused_false_claim", False, False),
    "ask_paid": _ask_paid,
    "ask_balance": _ask_balance,
    "handover": _handover,
}
