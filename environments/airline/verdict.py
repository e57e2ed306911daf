"""What the airline wants of its agents on the way: true words, look-ups before answers, a yes before a change.

Statements are found in two ways: by phrases (``claims.yaml``: deeds, look-ups, what can not be done, insurance,
membership) and by their values (:mod:`environments.airline.statements`), both held against the
:class:`~environments.airline.ledger.Ledger` of the moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from environments.airline import statements
from environments.airline.consent import ConsentRules
from environments.airline.ledger import Ledger
from environments.airline.rules import used
from environments.kit.conduct import Past
from environments.kit.database import Code
from environments.kit.language.claims import AGENT, ClaimReader, Moment, Review, Sheet, Thing, _Frame, _Stated
from environments.kit.language.patterns import load
from environments.kit.overlay import Base, Overlay
from mua.environment.protocol import Task

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
