"""Flights that can be booked: direct ones, and pairs with one stop."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Iterator

from environments.airline.dialects import Dialect
from environments.kit.overlay import Overlay
from mua.types import Json


def direct_flights(database: Overlay, origin: str, destination: str, date: str) -> list[Json]:
    """Every bookable flight of the route on the day, in the order of the table; no date field, as in tau-bench."""
    return [
        _shown(flight, date)
        for _, flight in database.items("flights")
        if flight["origin"] == origin and flight["destination"] == destination and _bookable(flight, date)
    ]


def onestop_flights(database: Overlay, dialect: Dialect, origin: str, destination: str, date: str) -> list[list[Json]]:
    """Every bookable pair, the second flight leaving no earlier than the first arrives."""
    return [
        [
            {**_shown(first, date), "date": date},
            {**_shown(second, date if dialect.overnight_as_today else onward), "date": onward},
        ]
        for first, second in _connections(database, origin, destination)
        if (onward := _onward(dialect, first, second, date)) is not None
        and _bookable(first, date)
        and _bookable(second, onward)
    ]


def _connections(database: Overlay, origin: str, destination: str) -> Iterator[tuple[Json, Json]]:
    flights = [flight for _, flight in database.items("flights")]
    arriving = defaultdict(list)
    for flight in flights:
        if flight["destination"] == destination:
            arriving[flight["origin"]].append(flight)
    for first in flights:
        if first["origin"] == origin:
            for second in arriving[first["destination"]]:
                yield first, second


def _onward(dialect: Dialect, first: Json, second: Json, date: str) -> str | None:
    """The second flight's day; None where it is missed."""
    arrival = first["scheduled_arrival_time_est"]
    onward = _next_day(dialect, date) if "+1" in arrival else date
    if not dialect.overnight_as_today:
        arrival = arrival.removesuffix("+1")
    return None if arrival > second["scheduled_departure_time_est"] else onward


def _next_day(dialect: Dialect, date: str) -> str:
    """tau-bench counts days of May without leading zeros, so that few of its overnight connections are ever found."""
    if dialect.overnight_as_today:
        return f"2024-05-{int(date[-2:]) + 1}"
    try:
        return (datetime.date.fromisoformat(date) + datetime.timedelta(days=1)).isoformat()
    except ValueError:
        return date


def _bookable(flight: Json, date: str) -> bool:
    day = flight["dates"].get(date)
    return day is not None and day["status"] == "available"


def _shown(flight: Json, date: str) -> Json:
    return {**{key: value for key, value in flight.items() if key != "dates"}, **flight["dates"][date]}
