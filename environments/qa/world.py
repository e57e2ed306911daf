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

from mua.environment.protocol import Split

COUNTS = {"town": 60, "person": 160, "company": 60, "museum": 40, "work": 80}
"""Entities of each kind in one split's world."""
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_ONSETS = "B Br D Dr F G Gr H J K Kl L M N P Pr R S Sk St T Tr V Z".split()  # noqa: SIM905
_VOWELS = "a e i o u au ei or al en ir ul".split()  # noqa: SIM905
_MIDDLES = "bb dd ll mm nn rr ss tt v rd ld nt st lk".split()  # noqa: SIM905
_FIRST = ["Abel", "Agata", "Berta", "Bodo", "Cilla", "Conny", "Dora", "Eike", "Elmo", "Falko", "Frida", "Gesa", "Gero", "Hedda", "Helmo", "Ilse", "Imke", "Jorin", "Katja", "Kuno", "Lasse", "Leni", "Malte", "Merle", "Nils", "Nora", "Ole", "Onno", "Petra", "Rasmus", "Rieke", "Silke", "Sven", "Thea", "Tilo", "Udo", "Ute", "Veit", "Wiebke", "Wim"]
_ADJECTIVES = ["Ashen", "Bright", "Clouded", "Crooked", "Drowned", "Early", "Faded", "Folded", "Glass", "Green", "Hidden", "Hollow", "Humming", "Idle", "Late", "Mended", "Narrow", "Nervous", "Patient", "Pale", "Rusted", "Salted", "Scattered", "Second", "Slow", "Sunlit", "Threaded", "Upper", "Vacant", "Whispering"]
_NOUNS = ["Acrobat", "Almanac", "Baker", "Bridge", "Cellar", "Clerk", "Cradle", "Drummer", "Estuary", "Feast", "Gate", "Glazier", "Hourglass", "Kettle", "Key", "Lamp", "Letter", "Loom", "Mason", "Needle", "Oar", "Parade", "Plough", "Quarrel", "Rope", "Saddle", "Shore", "Signal", "Spindle", "Stair", "Tide", "Trumpet", "Vineyard", "Weaver", "Well"]
PROFESSIONS = ["apothecary", "baker", "bookbinder", "brewer", "carpenter", "clockmaker", "cooper", "dentist", "farrier", "florist", "glazier", "goldsmith", "gardener", "interpreter", "joiner", "librarian", "mason", "midwife", "notary", "optician", "potter", "saddler", "stoker", "surveyor", "tailor", "tanner", "thatcher", "typesetter", "vet", "weaver"]
PRODUCTS = ["accordions", "anchors", "barrels", "bicycles", "bricks", "brushes", "buttons", "candles", "carpets", "chisels", "clogs", "combs", "crates", "gloves", "hammocks", "hinges", "kettles", "ladders", "lanterns", "locks", "mirrors", "nails", "needles", "oars", "pipes", "ropes", "sails", "scales", "skates", "umbrellas"]
SORTS: Mapping[str, Sequence[str]] = {
    "town": ("town",),
    "person": ("person",),
    "company": ("family firm", "company", "workshop"),
    "museum": ("museum",),
    "work": ("painting", "tapestry", "carving", "engraving"),
}


@dataclass(frozen=True, slots=True)
class Relation:
    """What may be asked of an entity."""

    target: str
    """Kind of the entity that it leads to, or ``year``, ``river``, ``profession``, ``product``."""
    named: str
    """The thing in a question: "the town where {} was born"; of what leads to no entity, the whole question."""
    told: tuple[str, str]
    """Two wordings of pages, neither with the question's words."""


RELATIONS: Mapping[str, Mapping[str, Relation]] = {
    "town": {
        "mayor": Relation("person", "the mayor of {}", ("The chain of office is worn by {}.", "The council is led by {}.")),
        "twin": Relation("town", "the twin town of {}", ("School classes are exchanged with {}.", "A pact of friendship ties it to {}.")),
        "river": Relation("river", "Which river flows through {}?", ("Barges reach it by the {}.", "Its mills are driven by the {}.")),
        "founded": Relation("year", "In which year was {} founded?", ("Its charter bears the date {}.", "The first stone was laid in {}.")),
    },
    "person": {
        "birthplace": Relation("town", "the town where {} was born", ("The cradle stood in {}.", "The baptism is on record in {}.")),
        "employer": Relation("company", "the company that employs {}", ("Wages come from {}.", "A desk is kept at {}.")),
        "teacher": Relation("person", "the teacher of {}", ("The craft was learned from {}.", "Lessons were taken with {}.")),
        "profession": Relation("profession", "What is the profession of {}?", ("The trade on the passport is {}.", "A sign by the door says {}.")),
        "born": Relation("year", "In which year was {} born?", ("Life began in {}.", "The first birthday candle was lit a year after {}.")),
    },
    "company": {
        "founder": Relation("person", "the founder of {}", ("The first shop was opened by {}.", "It was set up by {}.")),
        "seat": Relation("town", "the town where {} has its head office", ("Letters are to be sent to {}.", "The management sits in {}.")),
        "product": Relation("product", "What does {} make?", ("The workshops turn out {}.", "Customers come for its {}.")),
        "founded": Relation("year", "In which year was {} founded?", ("The accounts go back to {}.", "The licence was granted in {}.")),
    },
    "museum": {
        "place": Relation("town", "the town where {} stands", ("Visitors find it in {}.", "It is a short walk from the station of {}.")),
        "director": Relation("person", "the director of {}", ("The collection is in the care of {}.", "The keys are held by {}.")),
        "opened": Relation("year", "In which year did {} open?", ("The first ticket was sold in {}.", "The doors were unlocked in {}.")),
    },
    "work": {
        "maker": Relation("person", "the maker of {}", ("It comes from the hand of {}.", "The signature reads {}.")),
        "home": Relation("museum", "the museum that shows {}", ("It can be seen at {}.", "It is on permanent loan to {}.")),
        "owner": Relation("company", "the company that owns {}", ("Title to it rests with {}.", "It was bought by {}.")),
        "finished": Relation("year", "In which year was {} finished?", ("The last touch was given in {}.", "A note on the back says {}.")),
    },
}  # fmt: skip


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
    rivers = [f"River {name}" for name in names["river"]]
    words = {"river": rivers, "profession": PROFESSIONS, "product": PRODUCTS}
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
            found[name] = Entity(name, kind, rng.choice(SORTS[kind]), facts)
    return found


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
    stems = [one + two + three for one, two, three in product(_ONSETS, _VOWELS, _MIDDLES)]
    rng.shuffle(stems)
    titles = [f"The {one} {other}" for one, other in product(_ADJECTIVES, _NOUNS)]
    rng.shuffle(titles)
    left, works = iter(stems), iter(titles)
    return {split: _of_split(left, works, rng) for split in SPLITS}


def _of_split(stems: Iterator[str], titles: Iterator[str], rng: random.Random) -> Mapping[str, Sequence[str]]:
    def named(count: int, ends: Sequence[str]) -> list[str]:
        return [next(stems) + rng.choice(ends) for _ in range(count)]

    people = [
        f"{rng.choice(_FIRST)} {surname}"
        for surname in named(COUNTS["person"], ("sen", "ak", "ova", "ier", "man", "ino"))
    ]
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
