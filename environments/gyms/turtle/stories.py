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
from environments.gyms._shared.oracles import NEGATED, pattern, plain
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


def generate_tasks(split: Split) -> Iterator[Task]:
    """The tasks of a split."""
    for number, data in enumerate(_splits()[split]):
        yield Task(f"gyms/turtle/{split}/{number:03d}", "gyms/turtle", split, data)


# Answers to yes/no questions about a story, and scores of attempts to explain it, by keywords.

_REACH = 3
"""Words before a keyword in which a negation takes it back."""
_WORD = re.compile(r"[\w'-]+")
_BESIDES = 5
"""Words that a question may have besides what it is about; more are a list, of which a Yes tells nothing."""
_COMMON = frozenset(
    """a an the in on of to from at by for with and but or so as it its is was were be been are am has have had do does
    did can could will would may might must that this these those which who whom what when where why how there here they
    them their he him his she her i you your one someone somebody something anyone anybody anything people person man
    woman thing things reason cause part play because if than then only really true case story important matter found
    about any some other into out up down more very also""".split()  # noqa: SIM905
)


def answer(story: Story, question: str) -> Truth:
    """Yes, No or Maybe; Maybe where the facts do not tell, and for negated questions."""
    text = plain(question)
    if NEGATED.search(text):
        return "Maybe"
    return _about_hidden(story, text) or _about_points(story, text) or _about_facts(story, text)


def asked_about(criterion: Criterion, question: str, surface: str) -> bool:
    """Whether ``question`` (answered with Yes) has found out the point of ``criterion``.

    It has to name the true value of a hidden slot and no other, or, where there is none, have a keyword of the point
    that the surface does not have; and it may not be a list of things.
    """
    text = plain(question)
    if criterion.told:
        named, others = pattern(criterion.told).search(text), pattern(criterion.rivals).search(text)
        return named is not None and others is None and not _lists(text, [criterion.told], surface)
    told = matches(criterion.groups, _affirmed(surface))
    found = any(now and not before for now, before in zip(matches(criterion.groups, text), told, strict=True))
    return found and not _lists(text, criterion.groups, surface)


def _lists(text: str, groups: Sequence[Sequence[str]], surface: str) -> bool:
    """Whether ``text`` names more than :data:`_BESIDES` things besides those of ``groups`` and of the ``surface``."""
    rest = pattern([word for group in groups for word in group]).sub(" ", text)
    known = {*_WORD.findall(plain(surface)), *_COMMON}
    return len({word for word in _WORD.findall(rest) if word not in known}) > _BESIDES


def _about_hidden(story: Story, text: str) -> Truth | None:
    """Whether the text names the true value of a hidden slot, or another one."""
    right = any(pattern(aliases).search(text) for aliases in story.found.values())
    wrong = any(pattern(aliases).search(text) for values in story.excluded.values() for aliases in values)
    if right and wrong:
        return "Yes" if re.search(r"\bor\b", text) else "Maybe"
    return "Yes" if right else "No" if wrong else None


def _about_points(story: Story, text: str) -> Truth | None:
    """Yes where the text says all of a point that has no hidden slot."""
    points = [criterion for criterion in story.criteria if not criterion.told]
    return "Yes" if any(score(point, text, story.surface) for point in points) else None


def _about_facts(story: Story, text: str) -> Truth:
    """The answer of the facts that say most about the text; Maybe where two of them disagree."""
    fitting = [fact for fact in story.facts if all(matches(fact.groups, text))]
    if not fitting:
        return "Maybe"
    most = max(len(fact.groups) for fact in fitting)
    truths = {fact.truth for fact in fitting if len(fact.groups) == most}
    return truths.pop() if len(truths) == 1 else "Maybe"


def score(criterion: Criterion, text: str, surface: str) -> float:
    """1 where every group of keywords stands in one sentence of ``text``, else 0.

    Groups that the ``surface`` has too earn nothing alone: repeating what was told explains nothing. Neither does
    naming several values of a hidden slot.
    """
    if criterion.rivals and pattern(criterion.rivals).search(_affirmed(text)):
        return 0.0
    told = matches(criterion.groups, _affirmed(surface))
    return float(any(_says(criterion, _affirmed(sentence), told) for sentence in re.split(r"[.;!?]", text)))


def _says(criterion: Criterion, sentence: str, told: Sequence[bool]) -> bool:
    found = matches(criterion.groups, sentence)
    return all(found) and not all(told)


def _affirmed(text: str) -> str:
    """``text`` without the words that a negation takes back; the negation itself stays."""
    return ". ".join(" ".join(_clause(clause)) for clause in re.split(r"[.;!?,]|\bbut\b", plain(text)))


def _clause(clause: str) -> Iterator[str]:
    left = 0
    for word in _WORD.findall(clause):
        if NEGATED.fullmatch(word) or word.endswith("n't"):
            left = _REACH
            yield word
        elif left:
            left -= 1
        else:
            yield word
