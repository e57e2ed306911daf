"""The entities and what is true of them, read from ``entities.txt`` and ``attributes.yaml`` and checked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import yaml

from environments.gyms._shared import dealt
from environments.gyms._shared.oracles import plain
from mua.environment.protocol import Split, Task
from mua.utils.errors import MuaError

ENTITIES = Path(__file__).with_name("entities.txt")
ATTRIBUTES = Path(__file__).with_name("attributes.yaml")
UNSEEN = ("musical instrument", "vehicle", "insect", "drink")
"""Categories of the test split, which has no other: neither they nor what tells their members apart stand elsewhere."""
SIZES: dict[Split, int] = {"train": 540, "validation": 60, "test": 80}
LEVELS = ("easy", "medium", "hard")
ENOUGH = 3
"""Entities of a category that must have a vague tag before its absence means No there."""
REGIONAL = frozenset({"country", "city", "famous person"})
"""Categories whose members belong to the regions they are tagged with and to no other."""
Truth = Literal["Yes", "No", "Maybe"]

_HEADER = re.compile(r"\[(?P<category>[^;]+); (?P<broad>[^\]]+)\](?P<tags>.*)")
_LINE = re.compile(r"(?P<name>[^(:]+?)\s*(?:\((?P<synonyms>[^)]*)\))?:(?P<tags>.*)")


@dataclass(frozen=True, slots=True)
class Entity:
    """Something to think of."""

    name: str
    synonyms: tuple[str, ...]
    category: str
    broad: str
    true: frozenset[str]
    unsure: frozenset[str]

    def names(self) -> tuple[str, ...]:
        """All names, lower case."""
        return (self.name.lower(), *self.synonyms)


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something to ask for."""

    name: str
    phrases: tuple[str, ...]
    questions: tuple[str, ...]
    sort: Literal["classes", "plain", "vague", "regional"]


@lru_cache(maxsize=1)
def attributes() -> dict[str, Attribute]:
    """All attributes by name; raises :class:`MuaError` for a wrong file."""
    found: dict[str, Attribute] = {}
    raw = yaml.safe_load(ATTRIBUTES.read_text(encoding="utf-8"))
    for sort, members in raw.items():
        for name, given in members.items():
            if name in found or not isinstance(given, list) or len(given) < 2:
                raise MuaError(f"{ATTRIBUTES}: {sort}.{name}: must be named once, with phrases and a question")
            found[name] = Attribute(name, tuple(given[0].split("|")), tuple(given[1:]), sort)
    return found


@lru_cache(maxsize=1)
def entities() -> tuple[Entity, ...]:
    """All entities in the order of the file; raises :class:`MuaError` that names the line."""
    found: list[Entity] = []
    header: re.Match[str] | None = None
    for number, line in enumerate(ENTITIES.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            header = _HEADER.fullmatch(line)
            continue
        given = _LINE.fullmatch(line)
        if header is None or given is None:
            raise MuaError(f"{ENTITIES}:{number}: neither [category; class] tags nor name (synonyms): tags")
        found.append(_entity(header, given, f"{ENTITIES}:{number}"))
    _check_names(found)
    return tuple(found)


def _entity(header: re.Match[str], given: re.Match[str], where: str) -> Entity:
    true = {header["category"], header["broad"]} & set(attributes())
    unsure: set[str] = set()
    dropped: set[str] = set()
    for tag in [*header["tags"].split(), *given["tags"].split()]:
        mark, name = (tag[0], tag[1:]) if tag[0] in "?-" else ("", tag)
        if name not in attributes():
            raise MuaError(f"{where}: unknown tag {name!r}; add it to {ATTRIBUTES.name} or take it out")
        {"": true, "?": unsure, "-": dropped}[mark].add(name)
    synonyms = tuple(word.strip().lower() for word in (given["synonyms"] or "").split(",") if word.strip())
    unsure -= dropped
    return Entity(
        given["name"],
        synonyms,
        header["category"],
        header["broad"],
        frozenset(true - dropped - unsure),
        frozenset(unsure),
    )


def _check_names(found: list[Entity]) -> None:
    times = Counter(name for entity in found for name in entity.names())
    if twice := [name for name, count in times.items() if count > 1]:
        raise MuaError(f"{ENTITIES}: two entities are called {', '.join(twice)}; answers would be ambiguous")


@lru_cache(maxsize=1)
def by_name() -> Mapping[str, Entity]:
    """Entities by any of their names, lower case."""
    return {name: entity for entity in entities() for name in entity.names()}


def entity_of(task: Task) -> Entity:
    """What is thought of in ``task``; a record's entity has no attributes."""
    data = task.data
    if "gloss" not in data:
        return by_name()[data["entity"].lower()]
    return Entity(data["entity"], tuple(data["synonyms"]), data["kind"], "", frozenset(), frozenset())


@lru_cache(maxsize=1)
def _decided() -> frozenset[tuple[str, str]]:
    """Pairs of category and vague attribute where absence means No."""
    times = Counter((entity.category, tag) for entity in entities() for tag in entity.true)
    return frozenset(pair for pair, count in times.items() if count >= ENOUGH)


def truth(entity: Entity, attribute: str) -> Truth:
    """Whether ``attribute`` holds of ``entity``."""
    if attribute in entity.true:
        return "Yes"
    if attribute in entity.unsure:
        return "Maybe"
    sort = attributes()[attribute].sort
    open_to_doubt = (sort == "vague" and (entity.category, attribute) not in _decided()) or (
        sort == "regional" and entity.category not in REGIONAL
    )
    return "Maybe" if open_to_doubt else "No"


@lru_cache(maxsize=1)
def _splits() -> dict[Split, list[Entity]]:
    hands: dict[Split, list[Entity]] = {}
    for unseen, splits in ((False, ("train", "validation")), (True, ("test",))):
        given = [entity for entity in entities() if (entity.category in UNSEEN) == unseen]
        hands |= dealt(given, {split: size for split, size in SIZES.items() if split in splits}, "telepathy/splits")
    return hands


def generate_tasks(split: Split) -> Iterator[Task]:
    """The tasks of a split; no entity stands in two, and no category of the test split in another."""
    for number, entity in enumerate(_splits()[split]):
        data = {
            "kind": entity.category,
            "difficulty": LEVELS[number % len(LEVELS)],
            "entity": entity.name,
            "broad": entity.broad,
        }
        yield Task(f"gyms/telepathy/{split}/{number:03d}", "gyms/telepathy", split, data)


# Answers to yes/no questions from the table: an attribute in any of its wordings.
#
# What the table can not tell is Maybe: comparisons, negations, things it does not know. Names are for the choice
# answer: whoever may ask "Is it a dog?" or for letters finds everything by going through a list.

_GUESS = re.compile(
    r"(?:is|was|could|might|are|would)\s+(?:it|this|that|you|he|she)\s+(?:maybe\s+|perhaps\s+)?(?:be\s+|thinking\s+of\s+)?"
    r"(?:an?\s+|the\s+|some\s+)?(?P<name>.+?)"
)
_OF_THE_NAME = re.compile(
    r"\b(letters?|spell\w*|spelt|syllables?|rhymes?|alphabet\w*|vowels?|consonants?|(?:its|the) name)\b"
)
_STARTS = re.compile(r"\b(?:start|begin|end)s?\s+(?:with|in)\s+(?:an?\s+|the\s+)?['\"]?[a-z]['\"]?$")
_UNDECIDED = re.compile(r"\bthan\b|\bnot\b|n't\b|\bnever\b|\bexcept\b")
_ARTICLE = re.compile(r"^(?:it\s+is|it's|is\s+it|i\s+think\s+it\s+is|my\s+answer\s+is)?\s*(?:an?|the|some)?\s+")


def answer(entity: Entity, question: str) -> Truth:
    """Yes, No or Maybe to a yes/no question about what ``entity`` is like."""
    asked, rest = asked_for(plain(question))
    if not asked or _UNDECIDED.search(rest):
        return "Maybe"
    return _joined([truth(entity, name) for name in asked], rest)


def about_name(question: str) -> bool:
    """Whether ``question`` is about a name or its letters."""
    text = plain(question)
    return bool(_OF_THE_NAME.search(text) or _STARTS.search(text))


def names_something(question: str, others: Container[str] = ()) -> bool:
    """Whether ``question`` names an entity of the table, or one of ``others``: a guess, which is no question."""
    text = plain(question)
    guess = _GUESS.fullmatch(text)
    if guess is None or not (guess["name"] in by_name() or guess["name"] in others):
        return False
    return guess["name"] in others or not asked_for(text)[0]


def is_named(entity: Entity, text: str) -> bool:
    """Whether ``text`` is one of the names of ``entity``, with or without an article or a plural's s."""
    said = plain(text).strip("'\"")
    forms = {said, _ARTICLE.sub("", said), _ARTICLE.sub("", f" {said}")}
    return not {name for form in forms for name in (form, form.removesuffix("s"))}.isdisjoint(entity.names())


def _joined(values: Sequence[Truth], rest: str) -> Truth:
    """``or`` between attributes needs one of them, anything else all; in three-valued logic."""
    one, other = ("Yes", "No") if re.search(r"\bor\b", rest) else ("No", "Yes")
    if one in values:
        return one  # type: ignore[return-value]
    return "Maybe" if "Maybe" in values else other  # type: ignore[return-value]


def asked_for(text: str) -> tuple[list[str], str]:
    """The attributes whose phrases stand in ``text``, and the text without these phrases."""
    found: list[str] = []
    rest = plain(text)
    for phrase, name, pattern in _phrases():
        if phrase in rest:
            rest, times = pattern.subn(" # ", rest)
            if times and name not in found:
                found.append(name)
    return found, rest


@lru_cache(maxsize=1)
def _phrases() -> Sequence[tuple[str, str, re.Pattern[str]]]:
    """Phrases, longest first, each with its attribute and pattern."""
    return sorted(_each_phrase(), key=lambda entry: (-len(entry[0]), entry[0]))


def _each_phrase() -> Iterator[tuple[str, str, re.Pattern[str]]]:
    for name, attribute in attributes().items():
        for phrase in attribute.phrases:
            yield phrase, name, re.compile(rf"\b{re.escape(phrase)}\b")
