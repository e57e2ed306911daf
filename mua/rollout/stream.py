"""The run's endless stream of tasks: every position has its task, whoever asks and whenever."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mua.environment.protocol import Task
from mua.errors import ConfigError
from mua.rollout.seeds import derived_seed


class TaskStream:
    """Tasks of one or several domains. ``ordinal`` is the position: the whole data state of a run.

    Each position belongs to a domain, drawn by the shares; the tasks of a domain come in epochs, each a fresh
    permutation. Resuming needs only the next ordinal, because the stream is a pure function of (tasks, shares, seed).
    """

    def __init__(self, parts: Sequence[tuple[float, Sequence[Task]]], seed: int) -> None:
        """``parts`` holds each domain's share (any positive numbers) and its tasks."""
        if not parts or not all(tasks for _, tasks in parts):
            raise ConfigError("environment: the split has no tasks; choose another split, or other difficulties")
        self._parts = [_Epochs(tasks, derived_seed("part", seed, index)) for index, (_, tasks) in enumerate(parts)]
        self._shares = [share for share, _ in parts]
        self._draw = random.Random(derived_seed("shares", seed))
        self._counts = [0] * len(parts)
        self._places: list[tuple[int, int]] = []

    def task(self, ordinal: int) -> Task:
        """The task at ``ordinal`` (from 0)."""
        while len(self._places) <= ordinal:
            part = self._draw.choices(range(len(self._parts)), self._shares)[0]
            self._places.append((part, self._counts[part]))
            self._counts[part] += 1
        part, position = self._places[ordinal]
        return self._parts[part].task(position)


class _Epochs:
    """One domain's tasks, over and over."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def task(self, position: int) -> Task:
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(derived_seed("epoch", self._seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[index]]
