"""Where the three airlines differ that the tools serve: tau-bench's, tau2-bench's and this project's own.

tau-bench's oddities are kept for its own data alone, since its recorded answers and gold states rest on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TAU_AIRPORTS = {
    "SFO": "San Francisco",
    "JFK": "New York",
    "LAX": "Los Angeles",
    "ORD": "Chicago",
    "DFW": "Dallas",
    "DEN": "Denver",
    "SEA": "Seattle",
    "ATL": "Atlanta",
    "MIA": "Miami",
    "BOS": "Boston",
    "PHX": "Phoenix",
    "IAH": "Houston",
    "LAS": "Las Vegas",
    "MCO": "Orlando",
    "EWR": "Newark",
    "CLT": "Charlotte",
    "MSP": "Minneapolis",
    "DTW": "Detroit",
    "PHL": "Philadelphia",
    "LGA": "LaGuardia",
}
OWN_AIRPORTS = {
    "AUS": "Austin",
    "BNA": "Nashville",
    "BWI": "Baltimore",
    "CLE": "Cleveland",
    "CMH": "Columbus",
    "FLL": "Fort Lauderdale",
    "IND": "Indianapolis",
    "MCI": "Kansas City",
    "MSY": "New Orleans",
    "OAK": "Oakland",
    "PDX": "Portland",
    "PIT": "Pittsburgh",
    "RDU": "Raleigh",
    "SAN": "San Diego",
    "SLC": "Salt Lake City",
    "STL": "St. Louis",
    "TPA": "Tampa",
    "YUL": "Montreal",
    "YVR": "Vancouver",
    "YYZ": "Toronto",
}


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
