"""The scheduler of groups: its bound on staleness as a property over random durations, order, refills, and its ends.

Groups are made-up coroutines; time is counted in turns of the event loop. Does not cover episodes
(test_rollout_runner.py), nor the thread between trainer and scheduler (mua/rollout/service.py, under tests/e2e).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mua.rollout.runner import GroupScheduler, Position, RolloutBatch, StepDemand
from mua.types import Group, Outcome, Segment, Trajectory
from mua.utils.errors import EngineError


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Log:
    """What a run did, in the order in which it did it."""

    started: list[tuple[int, int]] = field(default_factory=list)
    """(ordinal, version in the engines when the group started)"""
    most_held: int = 0
    batches: list[RolloutBatch] = field(default_factory=list)

    @property
    def taken(self) -> list[int]:
        return [group.ordinal for batch in self.batches for group in batch.groups]


@dataclass(frozen=True)
class World:
    """Made-up durations and verdicts, each list over and over."""

    rolling: list[int]
    training: list[int]
    useless: frozenset[int] = frozenset()
    """Ordinals, modulo 16, of groups that are not usable."""

    def usable(self, group: Group) -> bool:
        return group.ordinal % 16 not in self.useless


async def train(demand: StepDemand, world: World, *, first: int = 0, position: Position | None = None) -> Log:
    """A training run of steps ``first`` to ``demand.steps``."""
    log = Log()
    version = first

    async def roll_out(ordinal: int) -> Group:
        log.started.append((ordinal, version))
        await turns(world.rolling[(ordinal + len(log.started)) % len(world.rolling)])
        return Group(ordinal, "t", [])

    scheduler = GroupScheduler(roll_out, demand, step=first, position=position, usable=world.usable)
    scheduler.start()
    for step in range(first, demand.steps):
        rollout_batch = await scheduler.take()
        log.batches.append(rollout_batch)
        log.most_held = max(log.most_held, scheduler.in_flight + len(rollout_batch.usable))
        await turns(world.training[step % len(world.training)])
        version += 1
        scheduler.release()
    assert scheduler.in_flight == 0
    await scheduler.stop()
    return log


def steps_of(log: Log, first: int) -> dict[int, int]:
    """The step that took each ordinal."""
    return {g.ordinal: first + i for i, rollout_batch in enumerate(log.batches) for g in rollout_batch.groups}


def last_start(log: Log) -> dict[int, int]:
    return dict(log.started)


DURATIONS = st.lists(st.integers(0, 12), min_size=1, max_size=7)
WORLDS = st.builds(World, DURATIONS, DURATIONS)
CHOOSY = st.builds(World, DURATIONS, DURATIONS, st.frozensets(st.integers(0, 15), max_size=15))


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(1, 6), WORLDS)
def test_no_group_is_staler_than_allowed_and_none_is_lost(
    per_step: int, staleness: int, first: int, length: int, world: World
) -> None:
    demand = StepDemand(per_step, first + length, staleness)
    log = asyncio.run(train(demand, world, first=first, position=Position(first * per_step)))
    stream = list(range(first * per_step, demand.steps * per_step))
    assert log.taken == stream
    assert [ordinal for ordinal, _ in log.started] == stream
    assert all(len(rollout_batch.usable) == per_step for rollout_batch in log.batches)
    assert all(version >= ordinal // per_step - staleness for ordinal, version in log.started)
    assert all(version <= ordinal // per_step for ordinal, version in log.started)
    assert log.most_held == min((staleness + 1) * per_step, len(stream))  # all that is allowed is used
    assert log.batches[-1].position == Position(demand.steps * per_step)


@settings(max_examples=70)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 5), st.integers(1, 6), CHOOSY)
def test_refilled_steps_are_full_or_at_their_bound_and_never_stale(
    per_step: int, staleness: int, extra: int, steps: int, world: World
) -> None:
    demand = StepDemand(per_step, steps, staleness, extra)
    log = asyncio.run(train(demand, world))
    assert log.taken == list(range(len(log.taken)))  # the stream, without a gap
    assert Counter(ordinal for ordinal, _ in log.started) == Counter(log.taken)
    for rollout_batch in log.batches:
        assert rollout_batch.usable == [group for group in rollout_batch.groups if world.usable(group)]
        full, at_bound = len(rollout_batch.usable) == per_step, len(rollout_batch.groups) == per_step + extra
        assert full or at_bound
        assert len(rollout_batch.usable) <= per_step
        assert len(rollout_batch.groups) <= per_step + extra
        assert rollout_batch.cancelled == 0
    step_of = steps_of(log, 0)
    assert all(step_of[ordinal] - staleness <= version <= step_of[ordinal] for ordinal, version in log.started)


@settings(max_examples=70)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(2, 6), CHOOSY, DURATIONS, st.data())
def test_a_synchronous_run_takes_the_same_groups_however_long_they_take_and_wherever_it_is_resumed(
    per_step: int, extra: int, steps: int, world: World, rolling: list[int], data: st.DataObject
) -> None:
    demand = StepDemand(per_step, steps, extra=extra)
    whole = asyncio.run(train(demand, world))
    other = asyncio.run(train(demand, World(rolling, [0], world.useless)))
    assert [batch.groups for batch in other.batches] == [batch.groups for batch in whole.batches]
    assert other.started == whole.started
    done = data.draw(st.integers(1, steps - 1))
    saved = json.loads(json.dumps(whole.batches[done - 1].position.to_json()))
    rest = asyncio.run(
        train(demand, World(rolling, [0], world.useless), first=done, position=Position.from_json(saved))
    )
    assert [batch.groups for batch in rest.batches] == [batch.groups for batch in whole.batches[done:]]
    assert whole.started[-len(rest.started) :] == rest.started


@settings(max_examples=120)
@given(
    st.integers(1, 4), st.integers(0, 2), st.integers(0, 3), st.integers(1, 5), st.integers(2, 6),
    st.integers(0, 2), CHOOSY, st.data()
)  # fmt: skip
def test_oversampling_wastes_no_task_and_trains_nothing_stale(
    per_step: int, staleness: int, extra: int, oversample: int, steps: int, carry: int, world: World,
    data: st.DataObject,
) -> None:  # fmt: skip
    demand = StepDemand(per_step, steps, staleness, extra, oversample, carry=carry)
    log = asyncio.run(train(demand, world))
    first = 0
    if data.draw(st.booleans(), "resume"):
        first = data.draw(st.integers(1, steps - 1), "at")
        kept = log.batches[:first]
        log = asyncio.run(train(demand, world, first=first, position=kept[-1].position))
        log.batches = kept + log.batches
    step_of, start_of = steps_of(log, 0), last_start(log)
    assert len(step_of) == len(log.taken)  # no group is trained twice
    for ordinal, step in step_of.items():
        if step >= first:
            assert step - staleness - carry <= start_of[ordinal] <= step
    taken = set[int]()
    for rollout_batch in log.batches:
        taken |= {group.ordinal for group in rollout_batch.groups}
        position = rollout_batch.position
        assert taken | position.waiting.keys() == set(range(position.next))
        assert not taken & position.waiting.keys()
        assert len(rollout_batch.usable) == per_step or len(rollout_batch.groups) == demand.most
        assert len(rollout_batch.groups) <= demand.most
    assert all(a.position.next <= b.position.next for a, b in pairwise(log.batches))


@settings(max_examples=70)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(2, 8), CHOOSY, st.data())
def test_a_group_is_cancelled_no_more_often_than_allowed(
    per_step: int, patience: int, steps: int, world: World, data: st.DataObject
) -> None:
    oversample = data.draw(st.integers(1, per_step))
    log = asyncio.run(train(StepDemand(per_step, steps, oversample=oversample, max_cancellations=patience), world))
    for rollout_batch in log.batches[:-1]:  # the last step leaves behind what it does not need
        assert all(cancelled <= patience for cancelled in rollout_batch.position.waiting.values())


def sampled_by(ordinal: int, versions: list[int]) -> Trajectory:
    """One of a single segment; -1 is what nobody sampled."""
    version = np.asarray(versions, np.int32)
    nothing = np.zeros(len(version), np.int32)
    segment = Segment(nothing, nothing.astype(np.uint8), nothing.astype(np.float32), version, nothing)
    return Trajectory("t", ordinal, 0, [segment], [], 0.0, False, Outcome.USER_STOP)


class Desk:
    """Groups that end when they are told to; remembers which were started and which cancelled."""

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[None]] = {}
        self.cancelled: list[int] = []
        self.versions: list[int] = []

    async def __call__(self, ordinal: int) -> Group:
        self.ends[ordinal] = asyncio.get_running_loop().create_future()
        try:
            await self.ends[ordinal]
        except asyncio.CancelledError:
            await turns(3)  # giving back environments takes a while
            self.cancelled.append(ordinal)
            raise
        return Group(ordinal, "t", [sampled_by(ordinal, self.versions)])

    async def end(self, *ordinals: int) -> None:
        for ordinal in ordinals:
            self.ends[ordinal].set_result(None)
        await turns(4)

    @property
    def running(self) -> list[int]:
        return sorted(ordinal for ordinal, end in self.ends.items() if not end.done())


async def begun(desk: Desk, demand: StepDemand, position: Position | None = None, **more: object) -> GroupScheduler:
    scheduler = GroupScheduler(desk, demand, position=position, **more)  # type: ignore[arg-type]
    scheduler.start()
    await turns(2)
    return scheduler


async def test_an_oversampled_step_takes_the_first_and_waits_for_the_same_group_the_next_time() -> None:
    desk = Desk()
    scheduler = await begun(desk, StepDemand(2, 5, oversample=1))
    assert desk.running == [0, 1, 2]
    taking = asyncio.create_task(scheduler.take())
    await turns(2)
    await desk.end(2, 0)
    rollout_batch = await taking
    assert [group.ordinal for group in rollout_batch.groups] == [0, 2]
    assert (rollout_batch.cancelled, desk.cancelled) == (1, [1])
    assert rollout_batch.position == Position(3, {1: 1})
    assert scheduler.in_flight == 0  # the engines are idle before the trainer wants their memory
    scheduler.release()
    await turns(2)
    assert desk.running == [1, 3, 4]
    taking = asyncio.create_task(scheduler.take())
    await turns(2)
    await desk.end(3, 4)
    assert not taking.done()
    await desk.end(1)
    assert [group.ordinal for group in (await taking).groups] == [1, 3]
    await scheduler.stop()


async def test_a_carried_group_goes_on_within_its_bound_and_what_it_saves_is_counted() -> None:
    desk = Desk()
    scheduler = await begun(desk, StepDemand(1, 9, oversample=2, carry=1))
    assert desk.running == [0, 1, 2]
    await desk.end(0)
    rollout_batch = await scheduler.take()
    assert (rollout_batch.cancelled, rollout_batch.carried, rollout_batch.saved_tokens) == (0, 2, 0)
    assert rollout_batch.position == Position(3, {1: 0, 2: 0})  # a killed run starts them again
    scheduler.release()
    await turns(2)
    assert desk.running == [1, 2, 3]
    desk.versions = [-1, 0, 0, 1, -1]  # of what ordinal 2 samples: two tokens by the policy before
    await desk.end(2)
    rollout_batch = await scheduler.take()
    assert [group.ordinal for group in rollout_batch.groups] == [2]
    assert (rollout_batch.cancelled, rollout_batch.carried, rollout_batch.saved_tokens) == (1, 1, 2)
    assert desk.cancelled == [1]
    assert rollout_batch.position == Position(4, {1: 1, 3: 0})
    await scheduler.stop()


async def test_stop_cancels_what_runs_and_waits_until_it_is_gone() -> None:
    desk = Desk()
    scheduler = await begun(desk, StepDemand(3, 3))
    await desk.end(1)
    await scheduler.stop()
    assert sorted(desk.cancelled) == [0, 2]
    assert scheduler.in_flight == 0
    scheduler.release()
    await turns(2)
    assert sorted(desk.ends) == [0, 1, 2]  # nothing starts any more


async def test_the_fault_of_a_group_reaches_whoever_takes_it() -> None:
    desk = Desk()
    scheduler = await begun(desk, StepDemand(2, 2))
    await desk.end(0)
    desk.ends[1].set_exception(EngineError("all engines are gone"))
    with pytest.raises(EngineError, match="all engines are gone"):
        await scheduler.take()
    await scheduler.stop()


async def lengths_and_time(oversample: int, *, by_task: bool) -> tuple[float, float]:
    """Mean length of the groups that 100 steps of 8 train on, and the time of a step; log-normal, sigma 0.8."""
    demand, attempts, lengths = StepDemand(8, 100, oversample=oversample), Counter[int](), dict[int, int]()
    ticks = 0

    async def roll_out(ordinal: int) -> Group:
        attempts[ordinal] += 1
        draw = random.Random(f"{ordinal}" if by_task else f"{ordinal}/{attempts[ordinal]}")
        lengths[ordinal] = int(draw.lognormvariate(2.5, 0.8))
        await turns(lengths[ordinal])
        return Group(ordinal, "t", [])

    async def clock() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(clock())
    scheduler, trained = GroupScheduler(roll_out, demand), list[int]()
    scheduler.start()
    for _ in range(demand.steps):
        trained += [lengths[group.ordinal] for group in (await scheduler.take()).groups]
        scheduler.release()
    ticking.cancel()
    return sum(trained) / len(trained), ticks / demand.steps


async def test_oversampling_favors_short_groups_where_length_is_chance_and_not_where_the_task_decides_it() -> None:
    """The figures of docs/algorithms.md."""
    (offered, plain), (trained, faster) = [await lengths_and_time(n, by_task=False) for n in (0, 2)]
    assert 0.70 < trained / offered < 0.78
    assert 0.70 < faster / plain < 0.78
    (offered, plain), (trained, faster) = [await lengths_and_time(n, by_task=True) for n in (0, 2)]
    assert 0.97 < trained / offered < 1.03
    assert 0.97 < faster / plain < 1.10
