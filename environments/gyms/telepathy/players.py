"""Policies that deserve nothing: names by heart, questions by heart, the name spelled out."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from environments.gyms._shared import act
from environments.gyms.telepathy.table import Entity, attributes, by_name, entities, truth
from environments.kit.canned import Glance, Player, end_at_once
from mua.environment.protocol import Move, Task

# An agent that knows the table: it asks what splits the remaining candidates best, then names those that are left.

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


FAMOUS = {
    "animal": "dog cat horse ant bee butterfly fly spider mosquito wasp beetle",
    "drink": "water coffee tea beer wine milk juice",
    "food": "apple bread cheese water coffee beer wine tea",
    "insect": "ant bee butterfly fly spider mosquito wasp beetle",
    "musical instrument": "guitar piano violin drum trumpet flute harp",
    "vehicle": "car bicycle train bus boat truck motorcycle aeroplane",
    "thing": "car guitar piano table chair book phone",
}
"""What comes to everybody's mind first, by what the opening says."""
_FIXED = 17


def _famous(opening: str) -> list[str]:
    return next((names.split() for sort, names in FAMOUS.items() if sort in opening), ["car", "dog", "water"])


def _names(names: Sequence[str]) -> Generator[Move, str, None]:
    for name in names[:3]:
        yield act("answer", name)


def _names_the_famous(glance: Glance) -> Generator[Move, str, None]:
    yield from _names(_famous(glance.opening))


def _spells(glance: Glance) -> Generator[Move, str, None]:
    """Finds the first letter, then names what begins so."""
    low, high = "a", "z"
    while low < high:
        middle = chr((ord(low) + ord(high) + 1) // 2)
        if (yield act("action", f"Does it start with a letter before {middle}?")).startswith("Yes"):
            high = chr(ord(middle) - 1)
        else:
            low = middle
    names = _famous(glance.opening)
    yield from _names(sorted(names, key=lambda name: name[0] != low))


def _recites(glance: Glance) -> Generator[Move, str, None]:
    """Names things of the training split, of the sort that the opening names where there are any."""
    alike = [task for task in glance.training if task.data["kind"] in glance.opening] or list(glance.training)
    yield from _names([task.data["entity"] for task in glance.rng.sample(alike, min(3, len(alike)))])


@lru_cache(maxsize=1)
def _by_heart(entities: tuple[Entity, ...]) -> tuple[str, ...]:
    """The attributes that split the training split most evenly."""
    yes = {name: sum(truth(one, name) == "Yes" for one in entities) for name in attributes()}
    return tuple(sorted(yes, key=lambda name: abs(2 * yes[name] - len(entities))))[:_FIXED]


def _asks_by_heart(glance: Glance) -> Generator[Move, str, None]:
    """The same questions always, then the things of the training split that fit the answers best."""
    known = tuple(by_name()[task.data["entity"].lower()] for task in glance.training)
    said = {}
    for name in _by_heart(known):
        said[name] = (yield act("action", attributes()[name].questions[0])).rstrip(".")
    fits = sorted(known, key=lambda one: -sum(truth(one, name) == word for name, word in said.items()))
    yield from _names([one.name for one in fits])


def _all_at_once(glance: Glance) -> Generator[Move, str, None]:
    yield act("action", " ".join(attribute.questions[0] for attribute in list(attributes().values())[:40]))
    yield act("action", "Is it an animal or a plant or food or an object or a place or a person?")
    yield act("answer", " or ".join(_famous(glance.opening)))
    yield from _names(_famous(glance.opening))


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "names what everybody thinks of": _names_the_famous,
    "spells the name": _spells,
    "recites the training split": _recites,
    "asks by heart and names the nearest": _asks_by_heart,
    "asks for everything at once": _all_at_once,
}
"""Policies that deserve nothing, by name."""
