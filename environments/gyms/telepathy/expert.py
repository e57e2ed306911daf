"""An agent that knows the table: it asks what splits the remaining candidates best, then names those that are left."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import lru_cache
from typing import Any

import numpy as np

from environments.gyms._shared import act
from environments.gyms.telepathy.table import Entity, attributes, entities, truth
from mua.environment.protocol import Move, Task

QUESTIONS = 20
"""Asked at most, then it guesses."""
_CODES = {"Yes": 1, "No": -1, "Maybe": 0}


@lru_cache(maxsize=1)
def _table() -> tuple[list[str], Any]:
    """Names of the attributes, and truth by entity and attribute as 1, -1 and 0."""
    names = list(attributes())
    return names, np.array([[_CODES[truth(entity, name)] for name in names] for entity in entities()], dtype=np.int8)


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it asks at random, or names a candidate too early."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    left = [i for i, entity in enumerate(entities()) if _fits_opening(entity, task)]
    asked: set[int] = set()
    while left:
        hasty = rng.random() < loose
        column = _best(_table()[1][left], asked, hasty, rng) if len(asked) < QUESTIONS else None
        if column is None or (hasty and len(left) < 8 and rng.random() < 0.5):
            guess = rng.choice(left)
            yield act("answer", entities()[guess].name)
            left.remove(guess)
        else:
            asked.add(column)
            left = yield from _ask(left, column, rng)


def _fits_opening(entity: Entity, task: Task) -> bool:
    """What the opening gives away: the category of easy tasks, the broad class of medium ones."""
    level = task.data["difficulty"]
    if level == "easy":
        return entity.category == task.data["kind"]
    return level == "hard" or entity.broad == task.data["broad"]


def _ask(left: list[int], column: int, rng: random.Random) -> Generator[Move, str, list[int]]:
    names, table = _table()
    said = yield act("action", rng.choice(attributes()[names[column]].questions))
    code = _CODES.get(said.rstrip("."))
    return [i for i in left if table[i, column] == code] if code is not None else left


def _best(rows: Any, asked: set[int], hasty: bool, rng: random.Random) -> int | None:
    """The attribute that leaves the fewest candidates on average; None where none tells them apart.

    An answer Maybe is taken to rule nothing out here, so that questions with clear answers come first.
    """
    yes, no, maybe = ((rows == code).sum(axis=0).astype(float) for code in (1, -1, 0))
    expected = (yes * (yes + maybe) + no * (no + maybe) + maybe * len(rows)) / len(rows)
    splits = np.maximum(np.maximum(yes, no), maybe) < len(rows)
    usable = [int(c) for c in np.argsort(expected, kind="stable") if splits[c] and int(c) not in asked]
    if not usable:
        return None
    return rng.choice(usable) if hasty else usable[0]
