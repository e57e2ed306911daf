"""The run's endless stream of tasks: every position has its task, whoever asks and whenever."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mua.environment.protocol import Task
from mua.errors import ConfigError
from mua.rollout.seeds import derived_seed


class TaskStream:
    """Tasks in epochs, each a fresh permutation. ``ordinal`` is the position: the whole data state of a run.

    Resuming needs only the next ordinal, because the stream is a pure function of (tasks, seed).
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise ConfigError("environment: the split has no tasks")
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def task(self, ordinal: int) -> Task:
        """The task at ``ordinal`` (from 0)."""
        epoch, position = divmod(ordinal, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(derived_seed("epoch", self._seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[position]]
