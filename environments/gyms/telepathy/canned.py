"""Policies that deserve nothing: names by heart, questions by heart, the name spelled out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import lru_cache

from environments.gyms._shared import act
from environments.gyms.telepathy.table import Entity, attributes, by_name, truth
from environments.kit.canned import Canned, Glance, Player, echo, end_at_once
from mua.environment.protocol import Move, Task

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


def _asks_for_the_famous(glance: Glance) -> Generator[Move, str, None]:
    """Goes through names as questions, then gives the first that was not turned down."""
    for name in _famous(glance.opening):
        if (yield act("action", f"Is it a {name}?")).startswith("Yes"):
            yield act("answer", name)
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


def _entities(training: Sequence[Task]) -> tuple[Entity, ...]:
    return tuple(by_name()[task.data["entity"].lower()] for task in training)


def _asks_by_heart(glance: Glance) -> Generator[Move, str, None]:
    """The same questions always, then the things of the training split that fit the answers best."""
    known = _entities(glance.training)
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


def policies() -> dict[str, Canned]:
    """All of them by name."""
    players: dict[str, Player] = {
        "ends at once": end_at_once,
        "echoes": echo,
        "names what everybody thinks of": _names_the_famous,
        "asks name by name": _asks_for_the_famous,
        "spells the name": _spells,
        "recites the training split": _recites,
        "asks by heart and names the nearest": _asks_by_heart,
        "asks for everything at once": _all_at_once,
    }
    return {name: Canned(player) for name, player in players.items()}
