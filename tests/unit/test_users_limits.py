"""Rate windows and circuit breakers by themselves, on a clock of their own.

Not covered: that requests keep to them (test_users_pool.py).
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mua.environment.endpoint.chat import RequestError
from mua.environment.endpoint.connection import Accounts, Breaker, RateLimit

FAULT = RequestError("connection", "nobody there", "look")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 12), st.floats(0, 1)), min_size=1, max_size=40),
    st.integers(5, 20),
)
def test_no_window_ever_holds_more_than_its_limit(asked: list[tuple[float, int, float]], limit: int) -> None:
    """Places asked for at any times, some corrected downwards: any 60 seconds hold at most the limit."""
    window, now, places = RateLimit(limit), 0.0, []
    for pause, amount, kept in asked:
        now += pause
        expected = window.wait(amount, now)
        place = window.reserve(amount, now)
        assert place.start == pytest.approx(now + expected)
        assert place.start >= now
        if kept < 0.3:
            window.correct(place, amount * kept)
        places.append(place)
    assert [p.start for p in places] == sorted(p.start for p in places)
    for first in places:
        inside = [p.amount for p in places if first.start <= p.start < first.start + 60]
        assert sum(inside) <= limit + 1e-9


def test_a_place_given_back_is_free_again() -> None:
    window = RateLimit(1)
    window.correct(window.reserve(1, 0.0), 0.0)
    assert window.wait(1, 1.0) == 0.0


def test_an_amount_above_the_limit_waits_for_an_empty_window() -> None:
    window = RateLimit(10)
    window.reserve(1, 0.0)
    assert window.reserve(500, 5.0).start == 60.0
    assert window.wait(1, 61.0) == pytest.approx(59.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def broken(clock: Clock) -> Breaker:
    """A breaker of two faults and ten seconds that has just opened."""
    breaker = Breaker(2, 10.0, clock)
    for _ in range(2):
        assert breaker.wait() == 0.0
        breaker.leave(breaker.enter(), FAULT)
    return breaker


async def test_a_cancelled_probe_leaves_its_place_to_another() -> None:
    clock = Clock()
    breaker = broken(clock)
    clock.now = 10.0
    breaker.abandon(breaker.enter())
    assert (breaker.wait(), breaker.failed_probes) == (0.0, 0)
    assert breaker.enter()


@pytest.mark.parametrize(
    ("seconds", "half", "most"), [([float(i) for i in range(100, 0, -1)], 50.0, 95.0), ([7.0], 7.0, 7.0)]
)
def test_latencies_are_told_by_nearest_rank(seconds: list[float], half: float, most: float) -> None:
    accounts = Accounts()
    for one in seconds:
        accounts.answered(one)
    told = accounts.take()
    assert (told["latency_p50_seconds"], told["latency_p95_seconds"]) == (half, most)
