"""The stream of tasks: every epoch is a permutation, and a position has its task whoever asks and when.

Under a curriculum: who is drawn how often against the weights by hand, and that a restored stream continues exactly.
Does not cover whether a curriculum learns faster.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mua.config.schema import CurriculumConfig
from mua.environment.protocol import Task
from mua.rollout.curriculum import TaskStream
from mua.types import Group, Outcome, Trajectory
from mua.utils.errors import ConfigError


def tasks(count: int) -> list[Task]:
    return [Task(str(i), "toy", "train", {}) for i in range(count)]


def ids(stream: TaskStream, ordinals: range) -> list[str]:
    return [stream.task(ordinal).id for ordinal in ordinals]


@given(st.integers(1, 40), st.integers(0, 9))
def test_no_task_is_lost_or_repeated_in_an_epoch(count: int, seed: int) -> None:
    stream = TaskStream([(1.0, tasks(count))], seed)
    for epoch in range(3):
        found = ids(stream, range(epoch * count, (epoch + 1) * count))
        assert sorted(found, key=int) == [str(i) for i in range(count)]


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = {
        tuple(ids(TaskStream([(1.0, tasks(30))], seed), range(epoch * 30, epoch * 30 + 30)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


# ---- by success rate

CURRICULUM = CurriculumConfig(kind="success_rate", floor=0.1, decay=0.5)


def by_rate(counts: list[int], seed: int = 0, **changed: float) -> TaskStream:
    """A stream over domains ``d0``, ``d1``, ... with so many tasks each, shared evenly."""
    parts = [
        (1.0, [Task(f"d{part}/{i}", f"d{part}", "train", {}) for i in range(count)])
        for part, count in enumerate(counts)
    ]
    return TaskStream(parts, seed, CURRICULUM.model_copy(update=changed))


def outcome(task: Task, ordinal: int, rate: float, size: int = 8, faults: int = 0) -> Group:
    """A group of which the share ``rate`` succeeded, beside ``faults`` members that no one scored."""
    right = round(rate * size)
    members = [
        Trajectory(task.id, ordinal, i, [], [], 0.0, i < right, Outcome.USER_STOP, domain=task.domain)
        for i in range(size)
    ]
    members += [Trajectory(task.id, ordinal, size, [], [], 0.0, False, Outcome.TIMEOUT) for _ in range(faults)]
    return Group(ordinal, task.id, members)


def learn(stream: TaskStream, rates: dict[str, float], ordinals: range, *, at_once: int = 1) -> list[str]:
    """Draw ``at_once`` tasks, observe them, and so on; the ids of all tasks that were drawn."""
    drawn: list[str] = []
    for start in range(ordinals.start, ordinals.stop, at_once):
        batch = [(o, stream.task(o)) for o in range(start, min(start + at_once, ordinals.stop))]
        stream.observe([outcome(task, o, rates[task.id]) for o, task in batch])
        drawn += [task.id for _, task in batch]
    return drawn


@given(st.integers(1, 12), st.integers(0, 9), st.integers(1, 5))
def test_every_task_comes_once_before_any_comes_again(count: int, seed: int, at_once: int) -> None:
    stream = by_rate([count], seed)
    drawn = learn(stream, dict.fromkeys((f"d0/{i}" for i in range(count)), 1.0), range(count), at_once=at_once)
    assert len(set(drawn)) == count


def test_tasks_are_drawn_in_proportion_to_their_weight_and_none_is_forgotten() -> None:
    """At a standstill of rates 0, 1/2 and 1 the decayed counts are 16, so p = 1/18, 1/2 and 17/18."""
    rates = {"d0/0": 0.0, "d0/1": 0.5, "d0/2": 1.0}
    stream = by_rate([3])
    learn(stream, rates, range(60))
    drawn = Counter(learn(stream, rates, range(60, 4060)))
    extreme = 0.1 + 0.9 * 4 * (1 / 18) * (17 / 18)
    expected = {"d0/0": extreme, "d0/1": 1.0, "d0/2": extreme}
    for task, weight in expected.items():
        share = weight / sum(expected.values())
        assert abs(drawn[task] / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_what_a_younger_policy_did_counts_less() -> None:
    stream = by_rate([1], decay=0.5)
    for ordinal, rate in enumerate((0.0, 1.0, 1.0)):
        stream.observe([outcome(stream.task(ordinal), ordinal, rate)])
    # Of 2, 4 and 8 rollouts that are left of three groups of eight, the last two succeeded.
    assert stream.metrics()["rollout/curriculum/mean_rate"] == pytest.approx(12 / 14)
    forever = by_rate([1], decay=1.0)
    for ordinal, rate in enumerate((0.0, 1.0, 1.0)):
        forever.observe([outcome(forever.task(ordinal), ordinal, rate)])
    assert forever.metrics()["rollout/curriculum/mean_rate"] == pytest.approx(16 / 24)


def test_faults_are_no_failures() -> None:
    stream = by_rate([2])
    stream.observe([outcome(stream.task(0), 0, 1.0, size=2, faults=6)])
    assert stream.metrics()["rollout/curriculum/mean_rate"] == 1.0
    stream.observe([outcome(stream.task(1), 1, 0.0, size=0, faults=8)])
    assert stream.metrics() == {
        "rollout/curriculum/mean_rate": 1.0,
        "rollout/curriculum/always_solved": 1.0,
        "rollout/curriculum/never_solved": 0.0,
        "rollout/curriculum/known": 0.5,
    }


def test_tasks_under_way_are_left_out_while_there_are_others() -> None:
    stream = by_rate([4])
    learn(stream, {f"d0/{i}": 0.5 for i in range(4)}, range(4))
    assert len({stream.task(ordinal).id for ordinal in range(4, 8)}) == 4
    assert stream.task(8).id in {f"d0/{i}" for i in range(4)}
    assert [stream.task(ordinal) for ordinal in range(4, 8)] == [stream.task(ordinal) for ordinal in range(4, 8)]


@settings(max_examples=30)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 9), st.integers(0, 12), st.integers(1, 4))
def test_a_restored_stream_continues_exactly(counts: list[int], seed: int, done: int, at_once: int) -> None:
    rates = {f"d{part}/{i}": ((part + i) % 5) / 4 for part, count in enumerate(counts) for i in range(count)}
    whole = by_rate(counts, seed)
    learn(whole, rates, range(done), at_once=at_once)
    under_way = [whole.task(ordinal) for ordinal in range(done, done + 2)]  # drawn, and then the run was cut
    state = json.loads(json.dumps(whole.state()))
    restored = by_rate(counts, seed)
    restored.restore(state)
    assert [restored.task(ordinal) for ordinal in range(done, done + 2)] == under_way
    assert restored.metrics() == whole.metrics()
    later = range(done, done + 20)
    assert learn(restored, rates, later, at_once=at_once) == learn(whole, rates, later, at_once=at_once)


def test_a_mix_keeps_its_shares_and_each_domain_its_own_order() -> None:
    rates = {"d0/0": 0.5, "d0/1": 0.0, "d1/0": 1.0, "d1/1": 0.5}
    stream = by_rate([2, 2])
    drawn = learn(stream, rates, range(2000))
    counts = Counter(task[:2] for task in drawn)
    assert abs(counts["d0"] - 1000) < 4 * 500**0.5
    assert Counter(drawn)["d0/0"] > 2 * Counter(drawn)["d0/1"]
    assert Counter(drawn)["d1/1"] > 2 * Counter(drawn)["d1/0"]
    metrics = stream.metrics()
    assert (metrics["rollout/curriculum/mean_rate"], metrics["rollout/curriculum/known"]) == (0.5, 1.0)
    assert (metrics["rollout/curriculum/d0/mean_rate"], metrics["rollout/curriculum/d1/mean_rate"]) == (0.25, 0.75)
    assert (metrics["rollout/curriculum/d0/never_solved"], metrics["rollout/curriculum/d1/never_solved"]) == (0.5, 0.0)


def test_a_checkpoint_of_other_tasks_is_refused() -> None:
    stream = by_rate([3])
    learn(stream, {f"d0/{i}": 0.5 for i in range(3)}, range(3))
    with pytest.raises(ConfigError, match=r"counts successes of 1 tasks .* such as 'd0/2'"):
        by_rate([2]).restore(stream.state())
    with pytest.raises(ConfigError, match="counts successes in 1 domains, the run in 2"):
        by_rate([2, 2]).restore(stream.state())


# ---- by kinds that fail

KINDS = CurriculumConfig(kind="failing_kinds", floor=0.1, decay=0.5)


def by_kind(tasks_of: dict[str, int], seed: int = 0) -> TaskStream:
    every = [Task(f"{kind}/{i}", "toy", "train", {"kind": kind}) for kind, n in tasks_of.items() for i in range(n)]
    return TaskStream([(1.0, every)], seed, KINDS)


def learn_kinds(stream: TaskStream, rates: dict[str, float], ordinals: range) -> list[str]:
    return learn(stream, {f"{kind}/{i}": rate for kind, rate in rates.items() for i in range(300)}, ordinals)


def test_kinds_that_fail_come_more_often_and_none_is_forgotten() -> None:
    stream = by_kind({"easy": 20, "half": 200, "hard": 100})
    drawn = Counter(one.split("/")[0] for one in learn_kinds(stream, {"easy": 1, "half": 0.5, "hard": 0}, range(3000)))
    # After many rollouts the decayed counts are 16 in all: the rates are 1/18, 9/18 and 17/18 of failing.
    weights = {kind: 0.1 + 0.9 * p for kind, p in (("easy", 1 / 18), ("half", 1 / 2), ("hard", 17 / 18))}
    for kind, weight in weights.items():
        assert drawn[kind] / 3000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_every_kind_comes_soon_again() -> None:
    """Drawn at random, one of twelve equal kinds is missing from 30 draws in a row in 0.07 of all cases."""
    kinds = {f"kind {i}": 30 for i in range(12)}
    stream = by_kind(kinds)
    drawn = [one.split("/")[0] for one in learn_kinds(stream, dict.fromkeys(kinds, 0.5), range(600))]
    assert all(set(drawn[start : start + 30]) == set(kinds) for start in range(60, 570))


@pytest.mark.parametrize("at_once", [1, 5])
def test_a_restored_stream_of_kinds_continues_exactly(at_once: int) -> None:
    rates = {f"{kind}/{i}": rate for kind, rate in (("a", 0.25), ("b", 0.75)) for i in range(9)}
    stream, again = by_kind({"a": 9, "b": 9}), by_kind({"a": 9, "b": 9})
    learn(stream, rates, range(40), at_once=at_once)
    under_way = [stream.task(ordinal).id for ordinal in range(40, 44)]
    again.restore(json.loads(json.dumps(stream.state())))
    assert [again.task(ordinal).id for ordinal in range(40, 44)] == under_way
    assert learn(stream, rates, range(40, 80)) == learn(again, rates, range(40, 80))


def test_a_checkpoint_of_another_curriculum_is_refused() -> None:
    kinds, rates = by_kind({"a": 3}), by_rate([3])
    with pytest.raises(ConfigError, match="of kinds of task, not of tasks"):
        rates.restore(kinds.state())
    with pytest.raises(ConfigError, match="of other kinds of task"):
        kinds.restore(rates.state())
    with pytest.raises(ConfigError, match="of other kinds of task"):
        by_kind({"a": 3, "b": 3}).restore(kinds.state())
