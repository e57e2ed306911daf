"""A few tasks that stand for many: in the proportions of their kinds and difficulties, and always the same ones."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from mua.environment.protocol import Task


def stratified(tasks: Sequence[Task], count: int | None) -> list[Task]:
    """``count`` of ``tasks`` (None, or more than there are: all), in their order.

    Places go to kinds by :func:`apportioned`, a kind's places to its difficulties likewise, and within those tasks are
    taken in the order of a digest of their domain and id: no seed, no position and no other task decides about one.
    Every kind has a place where there are as many places as kinds, and a smaller sample is part of a larger one.
    """
    if count is None or count >= len(tasks):
        return list(tasks)
    chosen: set[str] = set()
    for kind, places in _shares(tasks, "kind", count):
        for alike, seats in _shares(kind, "difficulty", places):
            chosen.update(task.id for task in sorted(alike, key=_draw)[:seats])
    return [task for task in tasks if task.id in chosen]


def apportioned(sizes: Mapping[str, int], places: int) -> dict[str, int]:
    """How many of ``places`` each part gets, by its size; never more than it has.

    Sainte-Lague's method with one place for each part first, the largest first: the next place goes to the part with
    the largest ``size / (2 given + 1)``, ties to the name that comes first. One more place takes none away.
    """
    given = dict.fromkeys(sizes, 0)
    for _ in range(min(places, sum(sizes.values()))):
        open_ones = (name for name in sorted(sizes) if given[name] < sizes[name])
        given[max(open_ones, key=lambda name: (given[name] == 0, sizes[name] / (2 * given[name] + 1)))] += 1
    return given


def _shares(tasks: Sequence[Task], label: str, places: int) -> list[tuple[list[Task], int]]:
    """The tasks of each value of ``label``, with their part of ``places``."""
    parts = _split(tasks, lambda task: str(task.data.get(label, "-")))
    given = apportioned({name: len(part) for name, part in parts.items()}, places)
    return [(part, given[name]) for name, part in parts.items()]


def _split(tasks: Sequence[Task], key: Callable[[Task], str]) -> dict[str, list[Task]]:
    parts: defaultdict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        parts[key(task)].append(task)
    return dict(parts)


def _draw(task: Task) -> str:
    return hashlib.sha256(f"sample\0{task.domain}\0{task.id}".encode()).hexdigest()
