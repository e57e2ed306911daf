"""The stream of tasks: every epoch is a permutation, and a position has its task whoever asks and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.environment.protocol import Task
from mua.errors import ConfigError
from mua.rollout.stream import TaskStream


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


@given(st.integers(1, 20), st.integers(0, 9), st.lists(st.integers(0, 100), max_size=20))
def test_random_access_equals_the_sequence(count: int, seed: int, ordinals: list[int]) -> None:
    sequence = ids(TaskStream([(1.0, tasks(count))], seed), range(101))
    stream = TaskStream([(1.0, tasks(count))], seed)
    assert [stream.task(ordinal).id for ordinal in ordinals] == [sequence[ordinal] for ordinal in ordinals]


def test_epochs_and_seeds_differ_in_order() -> None:
    orders = {
        tuple(ids(TaskStream([(1.0, tasks(30))], seed), range(epoch * 30, epoch * 30 + 30)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_no_tasks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the split has no tasks"):
        TaskStream([], 0)
