"""A made-up world for each split: towns, people, companies, museums and works, and what is so among them.

Nothing in it is known from elsewhere, and no name is in two splits. Values are drawn so that entities of one sort have
about as many of each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from threading import Lock

import yaml

from environments.kit.ranking import Document, ranking
from mua.environment.protocol import Split
from mua.types import Json
from mua.utils.strict_json import read_file

COUNTS = {"town": 60, "person": 160, "company": 60, "museum": 40, "work": 80}
"""Entities of each kind in one split's world."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_PRACTICE, _PLAIN = "practice ", "plain "
_RIVERS = 16
"""In a world of plain names."""


@dataclass(frozen=True, slots=True)
class Relation:
    """What may be asked of an entity."""

    target: str
    """Kind of the entity that it leads to, or ``year``, ``river``, ``profession``, ``product``."""
    named: str
    """The thing in a question: "the town where {} was born"; of what leads to no entity, the whole question."""
    told: tuple[str, ...]
    """Wordings of pages, neither with the question's words."""


_GIVEN: Json = yaml.safe_load(read_file(Path(__file__).with_name("world.yaml")))
RELATIONS: Mapping[str, Mapping[str, Relation]] = {
    kind: {name: Relation(one["target"], one["named"], tuple(one["told"])) for name, one in of.items()}
    for kind, of in _GIVEN["relations"].items()
}
"""Of each kind of entity, what may be asked of it."""
PROFESSIONS: Sequence[str] = _GIVEN["professions"].split()
PRODUCTS: Sequence[str] = _GIVEN["products"].split()
ASIDES: Sequence[str] = _GIVEN["asides"]
"""Sentences that do not matter, with places for names, words and years."""


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing of a world."""

    name: str
    kind: str
    """A key of :data:`RELATIONS`."""
    sort: str
    """What it is called in a text."""
    facts: Mapping[str, str]
    """Relation -> the name of another entity, a year, or a word."""


def world_key(world: Split | int, *, plain: bool = False) -> str:
    """The key of a split's world, or of the practice world of that number, which belongs to no split.

    Practice worlds share names with one another, never with a split. Where names are ``plain``, each is made of two of
    66 common words and 40 first names, joined as in a wiki (``AgataLamp``), so that it is new as a pair alone; else no
    split has a stem of another.
    """
    return (_PLAIN if plain else "") + (f"{_PRACTICE}{world}" if isinstance(world, int) else world)


@lru_cache(maxsize=64)
def world(key: str) -> Mapping[str, Entity]:
    """Every entity of a world by name, by its key; the same in every process."""
    rng = random.Random(f"qa world/{key}")
    names = _names_of(key)
    words = words_of(key)
    found: dict[str, Entity] = {}
    for kind in COUNTS:
        values = {
            name: _evenly(words.get(relation.target) or names.get(relation.target) or [], COUNTS[kind], rng)
            for name, relation in RELATIONS[kind].items()
        }
        for place, name in enumerate(names[kind]):
            facts: dict[str, str] = {}
            for relation, of in RELATIONS[kind].items():
                year = str(rng.randint(1700, 1990))
                value = year if of.target == "year" else values[relation][place]
                if value == name or value in facts.values():
                    # Nobody is their own teacher, and a value tells its relation.
                    value = rng.choice([one for one in names[of.target] if one not in (name, *facts.values())])
                facts[relation] = value
            found[name] = Entity(name, kind, rng.choice(_GIVEN["sorts"][kind]), facts)
    return found


def words_of(key: str) -> Mapping[str, Sequence[str]]:
    """What relations lead to that is no entity, by their target."""
    river = "River" if key.startswith(_PLAIN) else "River "
    rivers = [f"{river}{name}" for name in _names_of(key)["river"]]
    return {"river": rivers, "profession": PROFESSIONS, "product": PRODUCTS}


def _evenly(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """``count`` of ``values``, each about as often, shuffled."""
    if not values:
        return []
    drawn = [value for _ in range(count // len(values) + 1) for value in rng.sample(list(values), len(values))][:count]
    rng.shuffle(drawn)
    return drawn


@lru_cache(maxsize=64)
def _names_of(key: str) -> Mapping[str, Sequence[str]]:
    """Names of each kind in a world."""
    plain, which = key.startswith(_PLAIN), key.removeprefix(_PLAIN)
    if not which.startswith(_PRACTICE):
        return _plain_names()[0][which] if plain else _names()[0][which]
    rng = random.Random(f"qa names/{key}")
    if plain:
        return {kind: rng.sample(left, _plain_count(kind)) for kind, left in _plain_names()[1].items()}
    _, stems, titles = _names()
    return _of_world(iter(rng.sample(stems, len(stems))), iter(rng.sample(titles, len(titles))), rng)


@lru_cache(maxsize=1)
def _plain_names() -> tuple[Mapping[str, Mapping[str, Sequence[str]]], Mapping[str, Sequence[str]]]:
    """Names of two common words of each kind, joined, dealt to the splits, and those that are left."""
    adjectives, nouns = _GIVEN["adjectives"].split(), _GIVEN["nouns"].split()
    words = [*adjectives, *nouns]
    pairs = {
        "town": product(words, ("Burg", "Haven", "Field", "Wick", "Stead", "Ford")),
        "person": product(_GIVEN["first"].split(), nouns),
        "company": product(words, ("Brothers", "Works", "Mills", "Limited")),
        "museum": product(words, ("Museum", "Gallery", "Hall")),
        "work": product([f"The {one}" for one in adjectives], nouns),
        "river": product(words, ("",)),
    }
    rng, dealt, left = (
        random.Random("qa plain names"),
        dict[str, dict[str, Sequence[str]]](),
        dict[str, Sequence[str]](),
    )
    for kind, made in pairs.items():
        names = ["".join(pair).replace(" ", "") for pair in made]
        rng.shuffle(names)
        count = _plain_count(kind)
        for place, split in enumerate(SPLITS):
            dealt.setdefault(split, {})[kind] = names[place * count : (place + 1) * count]
        left[kind] = names[len(SPLITS) * count :]
    return dealt, left


def _plain_count(kind: str) -> int:
    return COUNTS.get(kind, _RIVERS)


@lru_cache(maxsize=1)
def _names() -> tuple[Mapping[str, Mapping[str, Sequence[str]]], Sequence[str], Sequence[str]]:
    """Names of each kind, dealt to the splits; stems and titles that are left."""
    rng = random.Random("qa names")
    stems = ["".join(parts) for parts in product(*(_GIVEN[part].split() for part in ("onsets", "vowels", "middles")))]
    rng.shuffle(stems)
    titles = [f"The {one} {other}" for one, other in product(_GIVEN["adjectives"].split(), _GIVEN["nouns"].split())]
    rng.shuffle(titles)
    left, works = iter(stems), iter(titles)
    dealt: dict[str, Mapping[str, Sequence[str]]] = {split: _of_world(left, works, rng) for split in SPLITS}
    return dealt, list(left), list(works)


def _of_world(stems: Iterator[str], titles: Iterator[str], rng: random.Random) -> Mapping[str, Sequence[str]]:
    def named(count: int, ends: Sequence[str]) -> list[str]:
        return [next(stems) + rng.choice(ends) for _ in range(count)]

    surnames = named(COUNTS["person"], ("sen", "ak", "ova", "ier", "man", "ino"))
    people = [f"{rng.choice(_GIVEN['first'].split())} {surname}" for surname in surnames]
    firms = named(COUNTS["company"], ("ex", "or", "um", "ia"))
    halls = named(COUNTS["museum"], ("ar", "os", "und"))
    return {
        "town": named(COUNTS["town"], ("burg", "hafen", "field", "wick", "stead", "ford")),
        "person": people,
        "company": [f"{name} {rng.choice(('Brothers', 'Works', 'Mills', 'Limited'))}" for name in firms],
        "museum": [f"{name} {rng.choice(('Museum', 'Gallery', 'Hall'))}" for name in halls],
        "work": [next(titles) for _ in range(COUNTS["work"])],
        "river": named(30, ("a", "e", "ach")),
    }


# The pages about a world: what is so of an entity, among much that does not matter.

SENTENCES = 28
"""Sentences of a page besides its facts: with them a page has about 1,650 characters."""
_BUILDING = Lock()


class Pages:
    """All pages of one world, and their index."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._index = ranking(documents)
        self._by_title: Mapping[str, Document] = {one.title.casefold(): one for one in documents}

    def lookup(self, query: str, count: int) -> list[Document]:
        """The best pages for ``query``, best first."""
        return self._index.best(query, count)

    def open(self, title: str) -> Document | None:
        """The page of that title, whatever its case."""
        return self._by_title.get(" ".join(title.split()).casefold())


def pages(key: str, sentences: int = SENTENCES) -> Pages:
    """A world's pages, built once a process and shared by all episodes."""
    with _BUILDING:
        return _built(key, sentences)


def page_of(entity: Entity, key: str, sentences: int = SENTENCES) -> Document:
    """The page about ``entity`` of the world ``key``; with fewer ``sentences`` a part of what all tell."""
    rng = random.Random(f"qa page/{entity.name}")
    known = RELATIONS[entity.kind]
    told = [rng.choice(known[relation].told).format(value) for relation, value in entity.facts.items()]
    by_kind: dict[str, list[str]] = {kind: [] for kind in RELATIONS}
    for one in world(key).values():
        if one.name != entity.name:
            by_kind[one.kind].append(one.name)
    words, facts = words_of(key), len(told)
    for aside in rng.sample(ASIDES, SENTENCES):
        person, other = rng.sample(by_kind["person"], 2)
        drawn = {kind: rng.choice(by_kind[kind]) for kind in ("town", "company", "museum")}
        drawn |= {kind: rng.choice(words[kind]) for kind in words}
        told.append(aside.format(person=person, other=other, year=rng.randint(1700, 1990), **drawn))
    told = told[: facts + sentences]
    rng.shuffle(told)
    article = "an" if entity.sort[0] in "aeiou" else "a"
    return Document(entity.name, " ".join([f"{entity.name} is {article} {entity.sort}.", *told]))


def read(text: str, relation: str) -> str | None:
    """The value that a page's text states for ``relation``."""
    for stated in _patterns(relation):
        if found := stated.search(text):
            return found.group(1)
    return None


@lru_cache(maxsize=64)
def _patterns(relation: str) -> Sequence[re.Pattern[str]]:
    wordings = [one for of in RELATIONS.values() if relation in of for one in of[relation].told]
    return [re.compile(r"(?:^|(?<=\. ))" + re.escape(one).replace(r"\{\}", "([^.]+)")) for one in wordings]


@lru_cache(maxsize=64)
def _built(key: str, sentences: int) -> Pages:
    return Pages([page_of(entity, key, sentences) for entity in world(key).values()])
