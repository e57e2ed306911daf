"""What keeps requests away from an endpoint: its rate limits, and a breaker while it is broken.

A breaker's states::

    closed ── ``faults`` in a row ──► open ── ``seconds`` pass ──► half-open: one request probes
      ▲                                ▲                              │
      └────────── probe answered ──────┼──────────────────────────────┤
                                       └────────── probe failed ──────┘
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mua.environment.endpoint.chat import Trouble

MINUTE = 60.0
Clock = Callable[[], float]


@dataclass(slots=True)
class Reservation:
    """A reservation in a :class:`RateLimit`."""

    start: float
    """When it may be used, by the clock of the window."""
    amount: float
    counted: bool = True


class RateLimit:
    """At most ``limit`` units within any ``seconds``: a sliding window, places given in order of asking.

    An amount above the limit waits for an empty window and then fills it.
    """

    def __init__(self, limit: float, seconds: float = MINUTE) -> None:
        self._limit = limit
        self._seconds = seconds
        self._places: deque[Reservation] = deque()
        self._used = 0.0

    def wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` would have its place, if it were asked for now."""
        return self._start(min(amount, self._limit), now) - now

    def reserve(self, amount: float, now: float) -> Reservation:
        """The next place for ``amount``; use it no earlier than its start."""
        place = Reservation(self._start(min(amount, self._limit), now), min(amount, self._limit))
        while self._places and self._places[0].start <= place.start - self._seconds:
            gone = self._places.popleft()
            gone.counted = False
            self._used -= gone.amount
        self._places.append(place)
        self._used += place.amount
        return place

    def correct(self, place: Reservation, amount: float) -> None:
        """``place`` took ``amount`` in the end; 0 gives it back."""
        if place.counted:
            self._used += min(amount, self._limit) - place.amount
            place.amount = min(amount, self._limit)

    def _start(self, amount: float, now: float) -> float:
        """When ``amount`` fits: after all places given before, once enough of them have left the window."""
        start = max(now, self._places[-1].start) if self._places else now
        used = self._used
        for place in self._places:
            if place.start > start - self._seconds and used + amount <= self._limit:
                break
            start = max(start, place.start + self._seconds)
            used -= place.amount
        return start


class Breaker:
    """Leaves a broken endpoint alone; see the drawing above. Belongs to one event loop."""

    def __init__(self, faults: int, seconds: float, clock: Clock) -> None:
        self._limit = faults
        self._seconds = seconds
        self._clock = clock
        self._faults = 0
        self._opens_at: float | None = None
        self._probing = False
        self._changed = asyncio.Event()
        self.trouble: Trouble | None = None
        """The last fault."""
        self.failed_probes = 0

    @property
    def closed(self) -> bool:
        return self._opens_at is None

    def wait(self) -> float:
        """Seconds until a request may be sent, 0 for now. While a probe is out nobody knows: one more period."""
        if self._opens_at is None:
            return 0.0
        return self._seconds if self._probing else max(0.0, self._opens_at - self._clock())

    async def change(self, seconds: float) -> None:
        """Sleep until the state changes, ``seconds`` at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def enter(self) -> bool:
        """A request is about to be sent; whether it is the probe."""
        if self._opens_at is None or self._probing:
            return False
        self._probing = True
        return True

    def leave(self, probe: bool, fault: Trouble | None) -> bool:
        """The request has ended: with an answer of whatever kind, or with a fault of the endpoint.

        Gives whether the endpoint, which was asked until now, is left alone because of it.
        """
        if fault is None:
            self._faults = 0
            self._set(None)
            return False
        self.trouble = fault
        self._faults += 1
        self.failed_probes += probe
        opens = self.closed and self._faults >= self._limit
        if probe or opens:
            self._set(self._clock() + self._seconds)
        return opens

    def abandon(self, probe: bool) -> None:
        """The request was cancelled: it says nothing about the endpoint."""
        if probe:
            self._set(self._opens_at)

    def _set(self, opens_at: float | None) -> None:
        """Whoever waits wakes up and looks again."""
        self._opens_at = opens_at
        self._probing = False
        self._changed.set()
        self._changed = asyncio.Event()
