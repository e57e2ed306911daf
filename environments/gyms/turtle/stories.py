"""The schemas of ``schemas.yaml``, filled and checked, and the tasks made of them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from environments.gyms._shared import dealt
from environments.gyms._shared.questions import pattern
from environments.gyms._shared.records import TurtleRecord
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import MuaError

FILE = Path(__file__).with_name("schemas.yaml")
SIZES: dict[Split, int] = {"train": 430, "validation": 40, "test": 60}
Truth = Literal["Yes", "No", "Maybe"]
Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""Keywords: of each group one must be there."""
_TRUTHS: dict[object, Truth] = {True: "Yes", False: "No", "Maybe": "Maybe"}  # YAML reads Yes and No as booleans


@dataclass(frozen=True, slots=True)
class Criterion:
    """One thing that an answer has to contain."""

    weight: float
    statement: str
    groups: Groups
    told: tuple[str, ...]
    """Words for the values of the hidden slots in it."""
    rivals: tuple[str, ...]
    """Words for the other values of the hidden slots in it: an answer that names one of them too only lists what could
    be."""


@dataclass(frozen=True, slots=True)
class Fact:
    """The answer to questions that contain the keywords."""

    groups: Groups
    truth: Truth


@dataclass(frozen=True, slots=True)
class Story:
    """One filled schema."""

    schema: str
    surface: str
    hidden_story: str
    criteria: tuple[Criterion, ...]
    facts: tuple[Fact, ...]
    found: Mapping[str, tuple[str, ...]]
    """Of each hidden slot the value with its aliases."""
    excluded: Mapping[str, tuple[tuple[str, ...], ...]]
    """Of each hidden slot the other values."""


@lru_cache(maxsize=1)
def schemas() -> dict[str, Json]:
    """The raw schemas by name; raises :class:`MuaError` that names what is wrong in the file."""
    raw: dict[str, Json] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    for name, schema in raw.items():
        if not math.isclose(sum(weight for weight, *_ in schema["criteria"]), 1.0):
            raise MuaError(f"{FILE}: {name}.criteria: weights must sum to 1")
        if schema.setdefault("split", "train") not in SIZES:
            raise MuaError(f"{FILE}: {name}.split: {schema['split']!r} is none of {', '.join(SIZES)}")
        if unknown := [truth for truth in schema["facts"].values() if truth not in _TRUTHS]:
            raise MuaError(f"{FILE}: {name}.facts: {unknown[0]!r} is neither Yes, No nor Maybe")
    return raw


@lru_cache(maxsize=1024)
def story(schema: str, shown: tuple[tuple[str, str], ...], hidden: tuple[tuple[str, str], ...]) -> Story:
    """The story of ``schema`` with these values in its slots."""
    raw, open_values = schemas()[schema], dict(shown)
    found = {slot: tuple(value.split("|")) for slot, value in hidden}
    words = open_values | {slot: aliases[0] for slot, aliases in found.items()}
    own = found | {slot: (value,) for slot, value in shown}
    excluded = {slot: tuple(tuple(v.split("|")) for v in raw["hidden"][slot] if v != value) for slot, value in hidden}
    return Story(
        schema,
        _sentences(raw["surface"].format(**words)),
        _sentences(raw["story"].format(**words)),
        tuple(
            Criterion(
                weight, _sentences(statement.format(**words)), _groups(keys, own), *_hidden(keys, found, excluded)
            )
            for weight, statement, keys in raw["criteria"]
        ),
        tuple(Fact(_groups(keys, own), _TRUTHS[truth]) for keys, truth in raw["facts"].items()),
        found,
        excluded,
    )


def story_of(task: Task) -> Story:
    """The story behind ``task``; a record's has no keywords and no facts, so that no rule can answer about it."""
    data = task.data
    if "criteria" in data:
        points = tuple(Criterion(weight, statement, (), (), ()) for weight, statement in data["criteria"])
        return Story(data["kind"], data["surface"], data["story"], points, (), {}, {})
    return story(data["kind"], tuple(sorted(data["shown"].items())), tuple(sorted(data["hidden"].items())))


def _sentences(text: str) -> str:
    """Capitals at the beginnings of sentences and nowhere else, whatever a slot was filled with."""
    inner = re.sub(r"(?<=[a-z,;:] )(An?|The|That|This)\b", lambda word: word[0].lower(), text)
    parts = inner.split(". ")
    return ". ".join(part[:1].upper() + part[1:] for part in parts)


def _groups(keys: str, values: Mapping[str, Sequence[str]]) -> Groups:
    """``a|b & {slot}`` as groups; a slot alone stands for all its aliases, inside a phrase for its value."""
    return tuple(tuple(_words(group, values)) for group in keys.split("&"))


def _hidden(
    keys: str, found: Mapping[str, Sequence[str]], excluded: Mapping[str, Sequence[Sequence[str]]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words for the true values and for the other values of the hidden slots in ``keys``."""
    slots = [slot for slot in excluded if f"{{{slot}}}" in keys]
    told = tuple(word for slot in slots for word in found[slot])
    return told, tuple(word for slot in slots for aliases in excluded[slot] for word in aliases)


def _words(group: str, values: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for word in group.strip().split("|"):
        alone = word[1:-1] if word.startswith("{") and word.endswith("}") else ""
        yield from values.get(alone) or (word.format(**{slot: aliases[0] for slot, aliases in values.items()}),)


def matches(groups: Groups, text: str) -> list[bool]:
    """Which of the groups stand in ``text``."""
    return [_found(group, text) for group in groups]


def _found(group: tuple[str, ...], text: str) -> bool:
    return _pattern(group).search(text) is not None


_pattern = lru_cache(maxsize=4096)(pattern)


def data_of(record: TurtleRecord) -> Json:
    """``data`` of the task that one of UserRL's records makes."""
    data = {
        "kind": f"{len(record.evaluation)}_points", "surface": record.new_surface, "story": record.new_bottom,
        "criteria": [[point.score, point.statement] for point in record.evaluation],
    }  # fmt: skip
    return {**data, "difficulty": _LEVELS.get(len(record.evaluation), "hard")}


_LEVELS = {1: "easy", 2: "medium"}


def difficulty(filled: Story) -> str:
    """Hard from three criteria on; easy where few values are possible."""
    if len(filled.criteria) >= 3:
        return "hard"
    return "easy" if sum(len(others) + 1 for others in filled.excluded.values()) <= 3 else "medium"


def _fillings(name: str) -> list[Json]:
    """All ways to fill a schema, shuffled."""
    raw = schemas()[name]
    slots = {**raw["slots"], **raw["hidden"]}
    combinations = [dict(zip(slots, values, strict=True)) for values in product(*slots.values())]
    random.Random(f"turtle/{name}").shuffle(combinations)
    return [
        {"shown": {k: str(c[k]) for k in raw["slots"]}, "hidden": {k: c[k] for k in raw["hidden"]}}
        for c in combinations
    ]


def _made(name: str, filled: Json) -> Json:
    made = story(name, tuple(sorted(filled["shown"].items())), tuple(sorted(filled["hidden"].items())))
    return {
        "kind": name,
        "difficulty": difficulty(made),
        "surface": made.surface,
        **filled,
    }


def _tasks(names: Sequence[str], count: int) -> Iterator[Json]:
    """Schemas in turn, as long as they have fillings left, until there are enough."""
    left = {name: _fillings(name) for name in names}
    while count and any(left.values()):
        for name in [name for name in names if left[name]][:count]:
            count -= 1
            yield _made(name, left[name].pop())


@lru_cache(maxsize=1)
def _splits() -> dict[Split, list[Json]]:
    """Each split has schemas of its own, so that no story can be told by what was learned of another."""
    hands: dict[Split, list[Json]] = {}
    for split, size in SIZES.items():
        own = [name for name, schema in schemas().items() if schema["split"] == split]
        hands |= dealt(_tasks(own, size), {split: size}, f"turtle/{split}")
    return hands


def generate(split: Split) -> Iterator[Task]:
    """The tasks of a split."""
    for number, data in enumerate(_splits()[split]):
        yield Task(f"gyms/turtle/{split}/{number:03d}", "gyms/turtle", split, data)
