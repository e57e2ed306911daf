"""A made-up world for the search gym: people, towns, companies, works, events and schools, linked by relations.

No fact of it is true anywhere else, so that nothing can be answered from memory. Every name is unique, and every
relation of an entity has exactly one value: a chain of relations from a name leads to one answer. An entity has five
relations of each sort that it has at all, so that the right one has to be understood.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from environments.gyms.search.relations import relations

WORLD_SEED = 20_240
COUNTS = {"town": 240, "school": 60, "person": 1400, "company": 400, "work": 1000, "event": 400}


def _words(text: str) -> list[str]:
    return text.split()


_ONSETS = _words("B Br D Dr F Fj G Gr H J K Kl L M N P Pr R S Sk St T Tr V Z")
_VOWELS = _words("a e i o u au ei or al en ir ul")
_MIDDLES = _words("d l m n r s t v rd ld nt st rm lk")
_TOWN_ENDS = _words("berg stad mouth haven field wick ford minster dale holm")
_SURNAME_ENDS = _words("ovic sen ard elli man kov ez ini wood quist")
_COMPANY_KINDS = _words("Works Brothers Foundry Mills Instruments Shipping Chemicals Textiles Printing Railways")
_FIRST_NAMES = _words(
    "Adela Anton Beata Bruno Carla Cyril Dagny Dorian Edda Emil Fania Florian Greta Gustav Hanna Henrik Ilka Ivo "
    "Jasmin Jonas Karin Konrad Lidia Lorenz Magda Marius Nadia Nestor Odile Oskar Paula Petros Ragna Roland Selma "
    "Stefan Tamara Tobias Ursula Viktor Wanda Yusuf Zelda Zoran"
)
_ADJECTIVES = _words(
    "Amber Bitter Broken Crimson Distant Empty Frozen Gilded Hollow Iron Jealous Kindly Lonely Midnight Nameless "
    "Painted Quiet Restless Silver Sleeping Sunken Tender Unfinished Velvet Wandering Winter Wooden Yellow"
)
_NOUNS = _words(
    "Anchor Balcony Beggar Candle Carousel Chestnut Clockmaker Compass Courier Dowry Envoy Ferryman Garden Harvest "
    "Heron Island Juggler Kingdom Ladder Lantern Meadow Mirror Orchard Passenger Pilgrim Quarry Raven River "
    "Sailor Shepherd Staircase Tailor Threshold Umbrella Violin Watchman Window"
)
_EVENTS = {
    "regatta": "Regatta",
    "chess tournament": "Chess Open",
    "cycling race": "Cycling Classic",
    "poetry contest": "Poetry Prize",
    "ski race": "Ski Trophy",
}
_WORKS = ("novel", "opera", "film", "painting", "stage play")
_PROFESSIONS = _words(
    "architect botanist cartographer chemist composer engineer geologist historian lawyer linguist painter physician "
    "sculptor singer surveyor teacher"
)
YEARS = {"person": ((1880, 1910), (1930, 1990)), "town": ((1020, 1300), (1350, 1900))}
"""First and last year of how an entity of a kind begins (its first relation to a year), and of what happens later."""


@dataclass(frozen=True, slots=True)
class Entity:
    """One thing of the world."""

    name: str
    kind: str
    """A key of :data:`COUNTS`."""
    sort: str
    """What it is called in a text: "novel", "chemist", "regatta"."""
    facts: Mapping[str, str]
    """Relation -> the name of another entity, or a year."""


@lru_cache(maxsize=1)
def world() -> Mapping[str, Entity]:
    """Every entity by name; the same in every process."""
    return {entity.name: entity for entity in _entities(random.Random(WORLD_SEED))}


def aliases(value: str) -> list[str]:
    """Other names that mean ``value``: a surname that only one person bears, a company without its line of trade."""
    entity = world().get(value)
    if entity is None:
        return []
    if entity.kind == "company":
        return [value.rsplit(" ", 1)[0]]
    if entity.kind == "person" and _surnames()[value.rsplit(" ", 1)[1]] == 1:
        return [value.rsplit(" ", 1)[1]]
    return []


@lru_cache(maxsize=1)
def _surnames() -> Mapping[str, int]:
    found: dict[str, int] = {}
    for entity in world().values():
        if entity.kind == "person":
            surname = entity.name.rsplit(" ", 1)[1]
            found[surname] = found.get(surname, 0) + 1
    return found


def _entities(rng: random.Random) -> Iterator[Entity]:
    names = _names(rng)
    for kind, of_kind in names.items():
        for name in of_kind:
            yield Entity(name, kind, _sort(kind, name, rng), _facts(kind, names, rng))


def _sort(kind: str, name: str, rng: random.Random) -> str:
    if kind == "event":
        return next(sort for sort, title in _EVENTS.items() if f" {title} " in name)
    of_others: Mapping[str, Sequence[str]] = {"person": _PROFESSIONS, "work": _WORKS, "school": ["university"]}
    return rng.choice(of_others.get(kind, [kind]))


def _facts(kind: str, names: Mapping[str, Sequence[str]], rng: random.Random) -> dict[str, str]:
    """A value for each relation, no two the same."""
    found: dict[str, str] = {}
    begun = False
    for name, relation in relations()[kind].items():
        while (value := _value(kind, relation.target, begun, names, rng)) in found.values():
            pass
        found[name], begun = value, begun or relation.target == "year"
    return found


def _value(kind: str, target: str, begun: bool, names: Mapping[str, Sequence[str]], rng: random.Random) -> str:
    return str(rng.randint(*YEARS[kind][begun])) if target == "year" else rng.choice(names[target])


def _names(rng: random.Random) -> dict[str, list[str]]:
    towns = _invented(rng, _TOWN_ENDS, COUNTS["town"])
    surnames = _invented(rng, _SURNAME_ENDS, 420)
    titles = [f"The {one} {other}" for one, other in product(_ADJECTIVES, _NOUNS)]
    companies = _invented(rng, ("an", "ex", "or", "ia", "um"), COUNTS["company"])
    events = [f"{title} {year}" for title, year in product(_EVENTS.values(), range(1950, 2020))]
    hosts = _invented(rng, ("peak", "isle", "bay"), 60)
    return {
        "town": towns,
        "school": [f"University of {name}" for name in _invented(rng, ("mar", "lund", "ost"), COUNTS["school"])],
        "person": rng.sample([f"{one} {other}" for one, other in product(_FIRST_NAMES, surnames)], COUNTS["person"]),
        "company": [f"{name} {rng.choice(_COMPANY_KINDS)}" for name in companies],
        "work": rng.sample(titles, COUNTS["work"]),
        "event": rng.sample([f"{host} {event}" for host, event in product(hosts, events)], COUNTS["event"]),
    }


def _invented(rng: random.Random, ends: Sequence[str], count: int) -> list[str]:
    """``count`` different names that no language has."""
    stems = [one + two + three for one, two, three in product(_ONSETS, _VOWELS, _MIDDLES)]
    return [stem + end for stem, end in zip(rng.sample(stems, count), _endless(rng, ends), strict=False)]


def _endless(rng: random.Random, ends: Sequence[str]) -> Iterator[str]:
    while True:
        yield rng.choice(ends)
