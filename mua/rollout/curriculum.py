"""Tasks by how often they are solved: those that teach most come most often, none is forgotten.

``success_rate`` knows each task by itself. The variance of a success of probability ``p``, ``p (1 - p)``, is what
rollouts of a task can differ by, and with it how much a group-relative advantage can teach (learnability, arXiv
2502.12272). A task is drawn with a probability proportional to ::

    weight(p) = floor + (1 - floor) * 4 p (1 - p)        1 at p = 1/2, floor where p is 0 or 1

where ``p = (s + 1) / (n + 2)`` from its ``s`` successes in ``n`` rollouts, both multiplied by ``decay`` whenever the
task was rolled out again: what a younger policy did counts less. Tasks that were never drawn come first, in the order
of a permutation; tasks under way are left out while there are others.

``failing_kinds`` knows kinds of task, so that it serves runs that meet no task twice. A kind is drawn with a
probability proportional to ::

    weight(p) = floor + (1 - floor) * (1 - p)            1 where a kind is never solved, floor where it always is

with ``p`` as above, over all rollouts of the kind; its tasks come in epochs. How many tasks a kind has does not count,
so that none is so rare that the policy unlearns it. A kind that is solved now and then holds tasks of both ends, which
is why what it fails at counts and not its variance. Where a domain tells cases of a kind apart (``task.data["case"]``:
the rules by which a wish is refused), each case is a kind here.

Kinds are drawn by a sequence of low discrepancy, ``u(position) = start + position / golden ratio mod 1`` on the line of
their cumulative weights, so that each comes in nearly every step. Group-relative advantages need that: groups that are
all solved teach nothing, so that what other kinds teach can unlearn a kind within a few steps, and then its groups all
fail and teach nothing either. Only the groups in between hold it (docs/benchmarks/demo.md).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from mua.config.schema import CurriculumConfig
from mua.environment.protocol import Task
from mua.types import Group, Json
from mua.utils.errors import ConfigError
from mua.utils.hooks import call_hook, check_numbers, is_hook, wrong_result
from mua.utils.seeds import derived_seed

GOLDEN_RATIO = (1 + 5**0.5) / 2


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


class Curriculum(ABC):
    """The order of one domain's tasks; one of your own has this constructor and these methods.

    A draw is a function of seed, position and what was observed and drawn before. Every position is drawn once and kept
    until its group is observed.
    """

    counted = "counts"
    """Key of the counts in :meth:`state`."""

    def __init__(self, tasks: Sequence[Task], seed: int, config: CurriculumConfig) -> None:
        self.domain = tasks[0].domain
        self.size = len(tasks)
        """How many are told apart."""
        self._tasks = {task.id: task for task in tasks}
        self._seed = seed
        self._config = config
        self._counts: dict[str, tuple[float, float]] = {}
        """Rollouts and successes, the earlier ones counting less."""
        self._under_way: dict[int, str] = {}
        """Position -> task."""

    @abstractmethod
    def draw(self, position: int) -> str:
        """The id of the task at ``position``, asked for once."""

    def key(self, task: Task) -> str:
        """What the rollouts of ``task`` are counted for."""
        return task.id

    def task(self, position: int) -> Task:
        """The task at ``position``, drawn when it is first asked for."""
        if position not in self._under_way:
            self._under_way[position] = self.draw(position)
        return self._tasks[self._under_way[position]]

    def observe(self, position: int, group: Group) -> None:
        """Learn from the group of ``position``; only scored members count."""
        key, scored = self.key(self._tasks[self._under_way.pop(position)]), group.scored
        if scored:
            rollouts, successes = (self._config.decay * count for count in self._counts[key])
            self._counts[key] = (rollouts + len(scored), successes + sum(t.success for t in scored))

    def rates(self) -> list[float]:
        """Running success rate of all that was observed."""
        return [successes / rollouts for rollouts, successes in self._counts.values() if rollouts]

    def state(self) -> Json:
        """Everything that further draws depend on, JSON-able."""
        counts = {key: list(counts) for key, counts in self._counts.items()}
        return {self.counted: counts, "under_way": [list(item) for item in sorted(self._under_way.items())]}

    def restore(self, state: Json) -> None:
        """Continue from :meth:`state`. Raises :class:`ConfigError` when it tells of other tasks."""
        self._counts = {key: (rollouts, successes) for key, (rollouts, successes) in state[self.counted].items()}
        self._under_way = dict(state["under_way"])


class SuccessRateCurriculum(Curriculum):
    """Tasks by their own success rate."""

    def __init__(self, tasks: Sequence[Task], seed: int, config: CurriculumConfig) -> None:
        super().__init__(tasks, seed, config)
        self._unknown = list(self._tasks)
        """Never drawn, the next one last."""
        random.Random(derived_seed("curriculum", seed)).shuffle(self._unknown)

    def draw(self, position: int) -> str:
        if self._unknown:
            task = self._unknown.pop()
            self._counts[task] = (0.0, 0.0)
            return task
        busy, floor = set(self._under_way.values()), self._config.floor
        choices = [task for task in self._tasks if task not in busy] or list(self._tasks)

        def weight(rollouts: float, successes: float) -> float:
            rate = (successes + 1) / (rollouts + 2)
            return floor + (1 - floor) * 4 * rate * (1 - rate)

        rng = random.Random(derived_seed("curriculum", self._seed, position))
        return rng.choices(choices, [weight(*self._counts[task]) for task in choices])[0]

    def restore(self, state: Json) -> None:
        if "counts" not in state:
            raise ConfigError(
                "algorithm.curriculum: the checkpoint counts successes of kinds of task, not of tasks; continue with "
                "kind: failing_kinds, or choose another output folder"
            )
        if gone := state["counts"].keys() - self._tasks.keys():
            raise ConfigError(
                f"algorithm.curriculum: the checkpoint counts successes of {len(gone)} tasks that environment does not "
                f"have, such as {min(gone)!r}; continue with the tasks of the run, or choose another output folder"
            )
        super().restore(state)
        self._unknown = [task for task in self._unknown if task not in self._counts]


class FailingKindsCurriculum(Curriculum):
    """Kinds of task by how often they fail."""

    counted = "kinds"

    def __init__(self, tasks: Sequence[Task], seed: int, config: CurriculumConfig) -> None:
        super().__init__(tasks, seed, config)
        kinds: dict[str, list[Task]] = {}
        for task in tasks:
            kinds.setdefault(self.key(task), []).append(task)
        self._kinds = {kind: Epochs(own, derived_seed("kind", seed, kind)) for kind, own in kinds.items()}
        self._counts = dict.fromkeys(self._kinds, (0.0, 0.0))
        self._drawn = dict.fromkeys(self._kinds, 0)
        self._start = random.Random(derived_seed("curriculum", seed, 0)).random()
        self.size = len(self._kinds)

    def key(self, task: Task) -> str:
        kind, case = str(task.data.get("kind", "")), task.data.get("case")
        return f"{kind}: {case}" if case else kind

    def draw(self, position: int) -> str:
        floor = self._config.floor
        failing = (1 - (successes + 1) / (rollouts + 2) for rollouts, successes in self._counts.values())
        ends = list(accumulate(floor + (1 - floor) * share for share in failing))
        at = (self._start + position / GOLDEN_RATIO) % 1.0 * ends[-1]
        kind = list(self._kinds)[min(bisect_right(ends, at), len(ends) - 1)]
        self._drawn[kind] += 1
        return self._kinds[kind].task(self._drawn[kind] - 1).id

    def state(self) -> Json:
        return {**super().state(), "drawn": dict(self._drawn)}

    def restore(self, state: Json) -> None:
        if state.get("kinds", {}).keys() != self._kinds.keys():
            raise ConfigError(
                "algorithm.curriculum: the checkpoint counts successes of other kinds of task than environment has; "
                "continue with the tasks and the curriculum of the run, or choose another output folder"
            )
        super().restore(state)
        self._drawn = dict(state["drawn"])


class HookCurriculum(SuccessRateCurriculum):
    """Tasks by the weights that a hook gives for their decayed rollouts and successes."""

    def __init__(self, tasks: Sequence[Task], seed: int, config: CurriculumConfig) -> None:
        super().__init__(tasks, seed, config)
        self._unknown = []  # the hook decides about tasks that were never drawn, too
        self._counts = dict.fromkeys(self._tasks, (0.0, 0.0))

    def draw(self, position: int) -> str:
        key, path = "algorithm.curriculum.kind", self._config.kind
        rollouts, successes = ([counts[side] for counts in self._counts.values()] for side in (0, 1))
        found = call_hook(key, path, list(self._tasks.values()), rollouts, successes, self._config)
        weights = check_numbers(key, path, found, len(self._tasks))
        if weights.min() < 0 or not weights.any():
            raise wrong_result(key, path, "gave a weight below 0, or none above it")
        busy = set(self._under_way.values())
        free = [0.0 if task in busy else weight for task, weight in zip(self._tasks, weights.tolist(), strict=True)]
        rng = random.Random(derived_seed("curriculum", self._seed, position))
        return rng.choices(list(self._tasks), free if any(free) else weights.tolist())[0]

    def restore(self, state: Json) -> None:
        super().restore(state)
        self._counts = dict.fromkeys(self._tasks, (0.0, 0.0)) | self._counts


def make_curriculum(tasks: Sequence[Task], seed: int, config: CurriculumConfig) -> Curriculum:
    """The order that ``config`` asks for; ``off`` is :class:`Epochs`."""
    if is_hook(config.kind):
        return HookCurriculum(tasks, seed, config)
    return (SuccessRateCurriculum if config.kind == "success_rate" else FailingKindsCurriculum)(tasks, seed, config)


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
        self._orders: list[Epochs | Curriculum] = [
            Epochs(tasks, own) if curriculum.kind == "off" else make_curriculum(tasks, own, curriculum)
            for (_, tasks), own in zip(parts, seeds, strict=True)
        ]
        self._curricula = [order for order in self._orders if isinstance(order, Curriculum)]
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
            if isinstance(order, Curriculum):
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

    def _place(self, ordinal: int) -> tuple[int, int]:
        """The domain of a position, and its own position in it."""
        while len(self._places) <= ordinal:
            part = self._draw.choices(range(len(self._orders)), self._shares)[0]
            self._places.append((part, self._counts[part]))
            self._counts[part] += 1
        return self._places[ordinal]


def _rates(prefix: str, orders: Sequence[Curriculum]) -> dict[str, float]:
    rates = [rate for order in orders for rate in order.rates()]
    if not rates:
        return {}
    return {
        f"{prefix}/mean_rate": sum(rates) / len(rates),
        f"{prefix}/always_solved": sum(rate == 1 for rate in rates) / len(rates),
        f"{prefix}/never_solved": sum(rate == 0 for rate in rates) / len(rates),
        f"{prefix}/known": len(rates) / sum(order.size for order in orders),
    }
