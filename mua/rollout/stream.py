"""The run's endless stream of tasks: every position has its task, whoever asks and whenever."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mua.config.schema import CurriculumConfig
from mua.environment.protocol import Task
from mua.rollout.curriculum import CurriculumOrder, Epochs, curriculum_order
from mua.types import Group, Json
from mua.utils.errors import ConfigError
from mua.utils.seeds import derived_seed


class TaskStream:
    """Tasks of one or several domains. ``ordinal`` is the position.

    Each position belongs to a domain, drawn by the shares. Without a curriculum the tasks of a domain come in epochs,
    each a fresh permutation, and the stream is a pure function of (tasks, shares, seed). With one, a position's task
    depends on what was observed when it was first asked for (:mod:`mua.rollout.curriculum`); then :meth:`state` is part
    of a run's state, and a position may be asked for until its group is observed.
    """

    def __init__(
        self,
        parts: Sequence[tuple[float, Sequence[Task]]],
        seed: int,
        curriculum: CurriculumConfig = CurriculumConfig(),
    ) -> None:
        """``parts`` holds each domain's share (any positive numbers) and its tasks."""
        if not parts or not all(tasks for _, tasks in parts):
            raise ConfigError("environment: the split has no tasks; choose another split, or other difficulties")
        seeds = [derived_seed("part", seed, index) for index in range(len(parts))]
        self._orders: list[Epochs | CurriculumOrder] = [
            Epochs(tasks, own) if curriculum.kind == "off" else curriculum_order(tasks, own, curriculum)
            for (_, tasks), own in zip(parts, seeds, strict=True)
        ]
        self._shares = [share for share, _ in parts]
        self._draw = random.Random(derived_seed("shares", seed))
        self._counts = [0] * len(parts)
        self._places: list[tuple[int, int]] = []

    def task(self, ordinal: int) -> Task:
        """The task at ``ordinal`` (from 0)."""
        part, position = self._place(ordinal)
        return self._orders[part].task(position)

    def observe(self, groups: Sequence[Group]) -> None:
        """What became of tasks, in the order in which it is to be learnt from."""
        for group in groups:
            part, position = self._place(group.ordinal)
            order = self._orders[part]
            if isinstance(order, CurriculumOrder):
                order.observe(position, group)

    def state(self) -> list[Json]:
        """What the curriculum knows, a domain each; empty without one. JSON-able."""
        return [order.state() for order in self._curricula]

    def restore(self, state: Sequence[Json]) -> None:
        """Continue from :meth:`state`; a run that had no curriculum before begins one."""
        if state and len(state) != len(self._curricula):
            raise ConfigError(
                f"algorithm.curriculum: the checkpoint counts successes in {len(state)} domains, the run in "
                f"{len(self._curricula)}; continue with the environment it had, or choose another output folder"
            )
        for order, known in zip(self._curricula, state, strict=False):
            order.restore(known)

    def metrics(self) -> dict[str, float]:
        """Running success rates under a curriculum, over the tasks that were observed; in a mix of each domain too."""
        orders = self._curricula
        metrics = _rates("rollout/curriculum", orders)
        for order in orders if len(orders) > 1 else ():
            metrics |= _rates(f"rollout/curriculum/{order.domain}", [order])
        return metrics

    @property
    def _curricula(self) -> list[CurriculumOrder]:
        return [order for order in self._orders if isinstance(order, CurriculumOrder)]

    def _place(self, ordinal: int) -> tuple[int, int]:
        """The domain of a position, and its own position in it."""
        while len(self._places) <= ordinal:
            part = self._draw.choices(range(len(self._orders)), self._shares)[0]
            self._places.append((part, self._counts[part]))
            self._counts[part] += 1
        return self._places[ordinal]


def _rates(prefix: str, orders: Sequence[CurriculumOrder]) -> dict[str, float]:
    rates = [rate for order in orders for rate in order.rates()]
    if not rates:
        return {}
    return {
        f"{prefix}/mean_rate": sum(rates) / len(rates),
        f"{prefix}/always_solved": sum(rate == 1 for rate in rates) / len(rates),
        f"{prefix}/never_solved": sum(rate == 0 for rate in rates) / len(rates),
        f"{prefix}/known": len(rates) / sum(len(order) for order in orders),
    }
