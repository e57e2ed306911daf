"""What the airline wants of its agents on the way: true words, look-ups before answers, a yes before a change.

Statements are found in two ways: by phrases (``claims.yaml``: deeds, look-ups, what can not be done, insurance,
membership) and by their values (:mod:`environments.airline.statements`), both held against the
:class:`~environments.airline.ledger.Ledger` of the moment.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from environments.airline import reading, statements
from environments.airline.ledger import Ledger
from environments.airline.rules import used
from environments.airline.tasks import HERE
from environments.airline.world import world
from environments.kit.conduct import Called, Past, Rules
from environments.kit.database import Code
from environments.kit.language.claims import AGENT, ClaimReader, Moment, Review, Sheet, Thing, _Frame, _Stated
from environments.kit.language.patterns import load
from environments.kit.overlay import Base, Overlay
from environments.kit.scripted import reader_of
from mua.environment.protocol import Task
from mua.types import Json

# What the customer agreed to: a proposal counts for a change only where it says what will be changed.
#
# "Shall I go ahead with K7QX2M?" is no proposal to cancel it. A message that was agreed to has to name the reservation
# (:data:`environments.airline.verdict.RULES`) and besides:
#
# cancel        that it is cancelled; the reason has been asked for, or given unasked
# bags          how many there will be
# flights       the cabin, where it changes; one of the flights or days that change
# passengers    the family or given name that is new
# certificate   its worth
# booking       the price, or each part of the payment

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


_PROFILE = {"call": "get_user_details", "heard": ["user_id"]}
_READ = {"call": "get_reservation_details", "same": ["reservation_id"]}
_SEARCHED = {"any": [{"call": "search_direct_flight"}, {"call": "search_onestop_flight"}]}
_YES = {"yes": ["reservation_id"]}
RULES = ConsentRules(
    {
        "cancel_reservation": (_PROFILE, _READ, _YES),
        "update_reservation_baggages": (_PROFILE, _READ, _YES),
        "update_reservation_passengers": (_PROFILE, _READ, _YES),
        "update_reservation_flights": (_PROFILE, _READ, _SEARCHED, _YES),
        "book_reservation": ({**_PROFILE, "same": ["user_id"]}, _SEARCHED, {"yes": []}),
        "send_certificate": (
            {**_PROFILE, "same": ["user_id"]},
            {"call": "get_reservation_details"},
            _SEARCHED,
            {"yes": []},
        ),
    }
)
_UNKNOWN: Sheet = {"listed": frozenset(), "read": frozenset()}
"""Of a number that the customer named and that belongs to nobody in the profile."""


@dataclass(frozen=True, slots=True)
class AirlineMoment(Moment):
    """A moment with all that may be spoken of."""

    ledger: Ledger | None = None


class AirlineReader(ClaimReader):
    """Finds statements by phrases and by their values."""

    def review(self, message: str, moment: Moment) -> Review:
        found = _without_offers(super().review(message, moment))
        if isinstance(moment, AirlineMoment) and moment.ledger is not None:
            found |= statements.review(message, moment.ledger)
        return found

    def _stated(self, frame: _Frame, text: str, moment: Moment) -> Iterator[_Stated]:
        """Whatever a clause says is impossible is denied, wherever in it the word for it stands."""
        for stated in super()._stated(frame, text, moment):
            yield replace(stated, denied=True) if frame.role == "can" and _IMPOSSIBLE.search(text) else stated


_IMPOSSIBLE = re.compile(
    r"\b(?:not (?:\w+ )?(?:able|possible|allowed|eligible|permitted|available|an option"
    r"|something|feasible|entitled)|can not|could not"
    r"|unable|impossible|ineligible|no way|not qualif\w+|does not qualify|no (?:compensation"
    r"|certificate|voucher|cancellation))\b"
)


def _without_offers(found: Review) -> Review:
    """Without what is said to be possible in general ("I can do that"): nobody can rely on it."""
    true, false = (
        [c for c in part if (c.role, c.value) != ("can", "that") or c.denied] for part in (found.true, found.false)
    )
    return Review(tuple(true), tuple(false), found.unread)


def moment(task: Task, base: Base, state: Overlay, past: Past) -> AirlineMoment:
    """What is so after some of an episode."""
    ledger = Ledger(task, base, state, past)
    sheets: dict[Thing, Sheet] = {f"reservation {number}": _reservation(ledger, number) for number in ledger.records}
    sheets |= {f"reservation {number}": _UNKNOWN for number in ledger.strange}
    sheets["profile"] = _profile(ledger)
    sheets[AGENT] = {"deed": _of_agent(ledger)}
    focus = [f"reservation {number}" for number in ledger.discussed]
    return AirlineMoment(sheets, ["profile", *focus], {}, frozenset(), ledger)


def _reservation(ledger: Ledger, number: str) -> Sheet:
    record, deeds = ledger.records[number], ledger.deeds.get(number, set())
    sheet = {
        "deed": frozenset(
            deeds | ({"done"} if deeds else set()) | ({"cancel"} if record.get("status") == "cancelled" else set())
        ),
        "insurance": frozenset({record["insurance"]}),
        "trip": frozenset({record["flight_type"]}),
        "read": frozenset({"yes"} if number in ledger.read else ()),
        "standing": frozenset({"cancelled" if record.get("status") == "cancelled" else "active"}),
        "used": frozenset({"yes"} if used(record) else ()),
        "listed": frozenset({"yes"} if number in ledger.own else ()),
        "airline": frozenset({"cancelled"} if any(map(ledger.lost, record["flights"])) else ()),
    }
    if number in ledger.read or (ledger.profile_read and number not in ledger.own):
        sheet["can"] = frozenset(ledger.possible(number))
    return sheet


def _profile(ledger: Ledger) -> Sheet:
    done = any(ledger.deeds.values())
    return {
        "read": frozenset({"yes"} if ledger.profile_read else ()),
        "membership": frozenset({ledger.user["membership"]}),
        "changed": frozenset({"yes" if done else "no"}),
    }


def _of_agent(ledger: Ledger) -> frozenset[str]:
    """What the agent did that no record shows; a certificate is sent and given, a booking arranged."""
    done = {"transferred"} if any(call.name == "transfer_to_human_agents" for call in ledger.past.calls) else set[str]()
    done |= {"sent", "given", "recorded"} if ledger.certificates else set()
    done |= {"arranged"} if any("book" in deeds for deeds in ledger.deeds.values()) else set()
    return frozenset(done)


@lru_cache(maxsize=1)
def code() -> Code:
    """What the airline wants of its agents."""
    return Code(AirlineReader(load(Path(__file__).with_name("claims.yaml"))), RULES, moment)
