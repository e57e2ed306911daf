"""The policy page (``policy.md``) as code, for the makers of tasks and the expert: what may be done with what.

A reservation is judged by what the tools show of it. "Used" is judged by dates alone: no tool tells how a flight of
today stands.
"""

from __future__ import annotations

from collections.abc import Sequence

from environments.airline.dialects import OWN
from mua.types import Json

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
