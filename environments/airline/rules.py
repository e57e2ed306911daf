"""The policy page (``policy.md``) as code, for the makers of tasks and the expert: what may be done with what.

A reservation is judged by what the tools show of it. "Used" is judged by dates alone: no tool tells how a flight of
today stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from mua.types import Json
from mua.utils.strict_json import read_file

# Where the three airlines differ that the tools serve: tau-bench's, tau2-bench's and this project's own.
#
# tau-bench's oddities are kept for its own data alone, since its recorded answers and gold states rest on them.


_NAMES = yaml.safe_load(read_file(Path(__file__).with_name("names.yaml")))
OWN_AIRPORTS, _TAU_AIRPORTS = _NAMES["own_airports"], _NAMES["tau_airports"]
FIRST_NAMES, LAST_NAMES = tuple(_NAMES["first_names"].split()), tuple(_NAMES["last_names"].split())
STREETS = tuple(_NAMES["streets"].split())


@dataclass(frozen=True, slots=True)
class Dialect:
    """One airline's ways."""

    now: str
    """What new reservations bear as ``created_at``."""
    airports: Mapping[str, str]
    new_reservations: tuple[str, ...]
    """Ids of the reservations made in one episode, in order."""
    new_certificates: tuple[str, ...]
    """The same for certificates, of each customer."""
    careful: bool
    """Refuse what makes no sense though the schema lets it through: amounts below zero, a payment method named twice,
    a reservation that is cancelled already."""
    extras_are_dropped: bool
    """Of flights, passengers and payments only the fields of the schema are written; tau-bench writes what it gets."""
    cabin_is_kept: bool
    """A change of cabin changes prices but not the reservation's field ``cabin`` (tau-bench)."""
    seats_are_taken: bool
    """A booking lowers the flights' free seats (tau2-bench)."""
    overnight_as_today: bool
    """A connecting flight of the next day is shown with the seats and prices of the first day (tau-bench)."""
    last_id_again: bool
    """A reservation too many replaces the last one (tau-bench) instead of being refused."""


TAU = Dialect(
    now="2024-05-15T15:00:00",
    airports=_TAU_AIRPORTS,
    new_reservations=("HATHAT", "HATHAU", "HATHAV"),
    new_certificates=("certificate_3221322", "certificate_3221323", "certificate_3221324"),
    careful=False,
    extras_are_dropped=False,
    cabin_is_kept=True,
    seats_are_taken=False,
    overnight_as_today=True,
    last_id_again=True,
)
TAU2 = Dialect(
    now=TAU.now,
    airports=_TAU_AIRPORTS,
    new_reservations=TAU.new_reservations,
    new_certificates=TAU.new_certificates,
    careful=False,
    extras_are_dropped=True,
    cabin_is_kept=False,
    seats_are_taken=True,
    overnight_as_today=False,
    last_id_again=False,
)
OWN = Dialect(
    now="2025-03-16T12:00:00",
    airports=OWN_AIRPORTS,
    new_reservations=("NEWRS1", "NEWRS2", "NEWRS3", "NEWRS4"),
    new_certificates=("certificate_7710001", "certificate_7710002", "certificate_7710003"),
    careful=True,
    extras_are_dropped=True,
    cabin_is_kept=False,
    seats_are_taken=False,
    overnight_as_today=False,
    last_id_again=False,
)


TODAY = OWN.now[:10]
DAY_AGO = "2025-03-15T12:00:00"
"""Reservations made since then can be cancelled for any reason."""
ALLOWANCE = {
    "regular": {"basic_economy": 0, "economy": 1, "business": 2},
    "silver": {"basic_economy": 1, "economy": 2, "business": 3},
    "gold": {"basic_economy": 2, "economy": 3, "business": 3},
}
"""Free checked bags a passenger, by the booking customer's membership and the cabin."""
COVERED = ("health", "weather")
"""Reasons that insurance covers."""
CERTIFICATE = 100
"""Dollars a passenger for a flight that the airline cancelled."""


def used(reservation: Json) -> bool:
    """A flight of it was yesterday or before, or is today: nothing can be changed or cancelled any more."""
    return any(flight["date"] <= TODAY for flight in reservation["flights"])


def cancellable(reservation: Json, reason: str, grounded: bool) -> bool:
    """``reason`` is health, weather or anything else; ``grounded``: the airline cancelled one of the flights."""
    if used(reservation) or reservation.get("status") == "cancelled":
        return False
    insured = reservation["insurance"] == "yes" and reason in COVERED
    return grounded or insured or reservation["cabin"] == "business" or reservation["created_at"] >= DAY_AGO


def paid_bags(membership: str, cabin: str, passengers: int, total: int) -> int:
    """How many of ``total`` checked bags are not free."""
    return max(0, total - ALLOWANCE[membership][cabin] * passengers)


def compensated(membership: str, reservation: Json) -> bool:
    """Whether a cancelled flight of this reservation is worth a certificate."""
    return membership != "regular" or reservation["insurance"] == "yes" or reservation["cabin"] == "business"


def split_payment(price: int, balances: Sequence[tuple[str, int | None]]) -> list[Json]:
    """``price`` over payment methods in order; a balance of None bears the rest. Empty where it is not covered."""
    parts: list[Json] = []
    for payment_id, balance in balances:
        amount = price if balance is None else min(price, balance)
        if amount > 0:
            parts.append({"payment_id": payment_id, "amount": amount})
        price -= amount
    return parts if price == 0 else []
