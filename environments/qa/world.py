"""A made-up world for each split: towns, people, companies, museums and works, and what is so among them.

Nothing in it is known from elsewhere, and no name is in two splits. Values are drawn so that entities of one sort have
about as many of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import yaml

from mua.environment.protocol import Split
from mua.types import Json
from mua.untrusted import read_file

COUNTS = {"town": 60, "person": 160, "company": 60, "museum": 40, "work": 80}
"""Entities of each kind in one split's world."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


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


@lru_cache(maxsize=len(SPLITS))
def world(split: Split) -> Mapping[str, Entity]:
    """Every entity of a split's world by name; the same in every process."""
    rng = random.Random(f"qa world/{split}")
    names = _names()[split]
    words = words_of(split)
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


def words_of(split: Split) -> Mapping[str, Sequence[str]]:
    """What relations lead to that is no entity, by their target."""
    rivers = [f"River {name}" for name in _names()[split]["river"]]
    return {"river": rivers, "profession": PROFESSIONS, "product": PRODUCTS}


def _evenly(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """``count`` of ``values``, each about as often, shuffled."""
    if not values:
        return []
    drawn = [value for _ in range(count // len(values) + 1) for value in rng.sample(list(values), len(values))][:count]
    rng.shuffle(drawn)
    return drawn


@lru_cache(maxsize=1)
def _names() -> Mapping[Split, Mapping[str, Sequence[str]]]:
    """Names of each kind, dealt to the splits."""
    rng = random.Random("qa names")
    stems = ["".join(parts) for parts in product(*(_GIVEN[part].split() for part in ("onsets", "vowels", "middles")))]
    rng.shuffle(stems)
    titles = [f"The {one} {other}" for one, other in product(_GIVEN["adjectives"].split(), _GIVEN["nouns"].split())]
    rng.shuffle(titles)
    left, works = iter(stems), iter(titles)
    return {split: _of_split(left, works, rng) for split in SPLITS}


def _of_split(stems: Iterator[str], titles: Iterator[str], rng: random.Random) -> Mapping[str, Sequence[str]]:
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
