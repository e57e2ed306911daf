"""What the customer agreed to: a proposal counts for a change only where it says what will be changed.

"Shall I go ahead with K7QX2M?" is no proposal to cancel it. A message that was agreed to has to name the reservation
(:data:`environments.airline.verdict.RULES`) and besides:

cancel        that it is cancelled; the reason has been asked for, or given unasked
bags          how many there will be
flights       the cabin, where it changes; one of the flights or days that change
passengers    the family or given name that is new
certificate   its worth
booking       the price, or each part of the payment
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from environments.airline import reading
from environments.airline.user import HERE
from environments.airline.world import world
from environments.kit.conduct import Called, Past, Rules
from environments.kit.scripted import reader_of
from mua.types import Json

_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_CANCELS = re.compile(
    r"\b(?:cancel|call\w* .{0,20}off|annul|void|terminat|scrap|off (?:your|the) (?:profile|books))", re.IGNORECASE
)
_WHY = re.compile(r"\b(?:reason|why|what made|how come|what happened|what for|because of what|cause)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConsentRules(Rules):
    """:class:`Rules` with proposals that say what they are about."""

    def unmet(self, called: Called, past: Past) -> list[str]:
        found = Rules.unmet(self, called, past)
        check = _CHECKS.get(called.name)
        if check is None or not past.heard:
            return found
        said = past.said[-1] if past.said else ""
        return [*found, *(f"{called.name} before {what}" for what in check(called.arguments, said, past))]


def _cancel(arguments: Json, said: str, past: Past) -> Iterator[str]:
    if not _CANCELS.search(said):
        yield "a proposal to cancel"
    if not any(map(_asks_why, past.said)) and not any(map(reading.reason, past.heard)):
        yield "the reason was asked for"


def _asks_why(text: str) -> bool:
    return _WHY.search(text) is not None or "reason" in reader_of(HERE).read(text, "cancel").asks


def _bags(arguments: Json, said: str, past: Past) -> Iterator[str]:
    if not _names_number(said, int(arguments["total_baggages"])):
        yield "a proposal that says how many bags there will be"


def _flights(arguments: Json, said: str, past: Past) -> Iterator[str]:
    before = world().tables["reservations"].get(arguments["reservation_id"])
    if before is None:
        return
    cabin = arguments["cabin"]
    if cabin != before["cabin"] and cabin.replace("_", " ") not in said.lower().replace("_", " "):
        yield "a proposal that names the cabin"
    old = {(leg["flight_number"], leg["date"]) for leg in before["flights"]}
    new = {(leg["flight_number"], leg["date"]) for leg in arguments["flights"]} - old
    if new and not any(number.lower() in said.lower() or _names_day(said, date) for number, date in new):
        yield "a proposal that names a flight or day that changes"


def _passengers(arguments: Json, said: str, past: Past) -> Iterator[str]:
    before = world().tables["reservations"].get(arguments["reservation_id"])
    if before is None:
        return
    old = {(one["first_name"], one["last_name"]) for one in before["passengers"]}
    new = [one for one in arguments["passengers"] if (one["first_name"], one["last_name"]) not in old]
    plain = re.sub(r"[-. ]", "", said).lower()
    for one in new:
        if not any(one[key].lower().replace(" ", "") in plain for key in ("first_name", "last_name")):
            yield "a proposal that names who will travel"


def _certificate(arguments: Json, said: str, past: Past) -> Iterator[str]:
    if not _names_sum(said, arguments["amount"]):
        yield "a proposal that says what the certificate is worth"


def _booking(arguments: Json, said: str, past: Past) -> Iterator[str]:
    parts = [part["amount"] for part in arguments["payment_methods"]]
    if not _names_sum(said, sum(parts)) and not all(_names_sum(said, part) for part in parts):
        yield "a proposal that says what it costs"


_CHECKS: Mapping[str, Callable[[Json, str, Past], Iterator[str]]] = {
    "cancel_reservation": _cancel,
    "update_reservation_baggages": _bags,
    "update_reservation_flights": _flights,
    "update_reservation_passengers": _passengers,
    "send_certificate": _certificate,
    "book_reservation": _booking,
}


def _names_number(text: str, number: int) -> bool:
    words = [str(number), *_WORDS[number : number + 1], *(["no"] if number == 0 else [])]
    return re.search(rf"(?<![\w$.,])(?:{'|'.join(words)})(?![\w,]*\d)(?!\w)", text, re.IGNORECASE) is not None


def _names_sum(text: str, amount: float) -> bool:
    return re.search(rf"(?<![\d.]){amount:g}(?!\d)(?:\.00)?(?!\.?\d)", text.replace(",", "")) is not None


def _names_day(text: str, date: str) -> bool:
    day = datetime.date.fromisoformat(date)
    number = rf"(?<!\d){day.day}(?:st|nd|rd|th)"
    forms = rf"{date}|{day:%B} {day.day}(?!\d)|{number}?(?: of)? {day:%B}|{number}(?!\w)"
    return re.search(forms, text, re.IGNORECASE) is not None
