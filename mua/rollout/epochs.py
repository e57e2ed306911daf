"""Tasks over and over: epochs, each a fresh permutation."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mua.environment.protocol import Task
from mua.rollout.seeds import derived_seed


class Epochs:
    """The endless order of some tasks; a pure function of tasks, seed and position."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def task(self, position: int) -> Task:
        """The task at ``position`` (from 0)."""
        epoch, index = divmod(position, len(self._tasks))
        if epoch != self._epoch:
            self._order = list(range(len(self._tasks)))
            random.Random(derived_seed("epoch", self._seed, epoch)).shuffle(self._order)
            self._epoch = epoch
        return self._tasks[self._order[index]]
