"""The scheduler of groups: its bound on staleness as a property over random durations, order, and its ends.

Groups are made-up coroutines; time is counted in turns of the event loop. Does not cover episodes
(test_rollout_runner.py), nor the thread between trainer and scheduler (mua/rollout/service.py, under tests/e2e).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.errors import EngineError
from mua.rollout.scheduler import GroupScheduler
from mua.types import Group


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Log:
    """What a run did, in the order in which it did it."""

    started: list[tuple[int, int]] = field(default_factory=list)
    """(ordinal, version in the engines when the group started)"""
    most_held: int = 0
    taken: list[int] = field(default_factory=list)


async def train(
    *, per_step: int, staleness: int, first_step: int, steps: int, rolling: list[int], training: list[int]
) -> Log:
    """A training run of ``steps`` from ``first_step``; the lists give durations, over and over."""
    log = Log()
    version = first_step

    async def roll_out(ordinal: int) -> Group:
        log.started.append((ordinal, version))
        log.most_held = max(log.most_held, len(log.started) - (version - first_step) * per_step)
        await turns(rolling[ordinal % len(rolling)])
        return Group(ordinal, "t", [])

    slots = (staleness + 1) * per_step
    scheduler = GroupScheduler(roll_out, slots=slots, first=first_step * per_step, last=steps * per_step)
    scheduler.start()
    for step in range(first_step, steps):
        groups = await scheduler.take(per_step)
        log.taken += [group.ordinal for group in groups]
        await turns(training[step % len(training)])
        version += 1
        scheduler.release(per_step)
        assert scheduler.in_flight <= slots
    assert scheduler.in_flight == 0
    await scheduler.stop()
    return log


DURATIONS = st.lists(st.integers(0, 12), min_size=1, max_size=7)


@given(
    st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(1, 6), DURATIONS, DURATIONS
)  # fmt: skip
def test_no_group_is_staler_than_allowed_and_none_is_lost(
    per_step: int, staleness: int, first_step: int, length: int, rolling: list[int], training: list[int]
) -> None:
    steps = first_step + length
    log = asyncio.run(
        train(
            per_step=per_step, staleness=staleness, first_step=first_step, steps=steps, rolling=rolling,
            training=training,
        )
    )  # fmt: skip
    stream = list(range(first_step * per_step, steps * per_step))
    assert log.taken == stream
    assert [ordinal for ordinal, _ in log.started] == stream
    assert all(version >= ordinal // per_step - staleness for ordinal, version in log.started)
    assert all(version <= ordinal // per_step for ordinal, version in log.started)
    assert log.most_held == min((staleness + 1) * per_step, len(stream))  # all that is allowed is used


class Desk:
    """Groups that end when they are told to; remembers which were started and which cancelled."""

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []

    async def __call__(self, ordinal: int) -> Group:
        self.ends[ordinal] = asyncio.get_running_loop().create_future()
        try:
            await self.ends[ordinal]
        except asyncio.CancelledError:
            await turns(3)  # giving back environments takes a while
            self.cancelled.append(ordinal)
            raise
        return Group(ordinal, "t", [])


async def test_groups_are_taken_in_order_however_they_end() -> None:
    desk = Desk()
    scheduler = GroupScheduler(desk, slots=4, first=10, last=20)
    scheduler.start()
    await turns(2)
    assert sorted(desk.ends) == [10, 11, 12, 13]
    taking = asyncio.create_task(scheduler.take(2))
    for ordinal in (13, 12, 11):
        desk.ends[ordinal].set_result(None)
        await turns(3)
        assert not taking.done()
    desk.ends[10].set_result(None)
    assert [group.ordinal for group in await taking] == [10, 11]
    assert scheduler.in_flight == 2
    assert [group.ordinal for group in await scheduler.take(2)] == [12, 13]
    await scheduler.stop()


async def test_only_a_release_starts_new_groups() -> None:
    desk = Desk()
    scheduler = GroupScheduler(desk, slots=2, first=0, last=5)
    scheduler.start()
    await turns(2)
    for ordinal in (0, 1):
        desk.ends[ordinal].set_result(None)
    await scheduler.take(2)
    scheduler.start()
    await turns(3)
    assert sorted(desk.ends) == [0, 1]
    scheduler.release(1)
    await turns(2)
    assert sorted(desk.ends) == [0, 1, 2]
    await scheduler.stop()


async def test_the_last_step_may_be_short_and_nothing_starts_behind_it() -> None:
    desk = Desk()
    scheduler = GroupScheduler(desk, slots=10, first=0, last=3)
    scheduler.start()
    await turns(2)
    assert sorted(desk.ends) == [0, 1, 2]
    for end in desk.ends.values():
        end.set_result(None)
    assert [group.ordinal for group in await scheduler.take(2)] == [0, 1]
    assert [group.ordinal for group in await scheduler.take(2)] == [2]
    assert await scheduler.take(2) == []
    scheduler.release(2)
    await turns(2)
    assert scheduler.in_flight == 0


async def test_stop_cancels_what_runs_and_waits_until_it_is_gone() -> None:
    desk = Desk()
    scheduler = GroupScheduler(desk, slots=3, first=0, last=9)
    scheduler.start()
    await turns(2)
    desk.ends[1].set_result(None)
    await turns(2)
    await scheduler.stop()
    assert sorted(desk.cancelled) == [0, 2]
    assert scheduler.in_flight == 0


async def test_nothing_starts_after_stop() -> None:
    desk = Desk()
    scheduler = GroupScheduler(desk, slots=1, first=0, last=9)
    scheduler.start()
    await turns(2)
    await scheduler.stop()
    scheduler.release(1)
    await turns(2)
    assert sorted(desk.ends) == [0]
    assert scheduler.in_flight == 0


async def test_the_fault_of_a_group_reaches_whoever_takes_it() -> None:
    desk = Desk()
    scheduler = GroupScheduler(desk, slots=2, first=0, last=4)
    scheduler.start()
    await turns(2)
    desk.ends[0].set_result(None)
    desk.ends[1].set_exception(EngineError("all engines are gone"))
    with pytest.raises(EngineError, match="all engines are gone"):
        await scheduler.take(2)
    await scheduler.stop()
