"""A made-up world for the search gym: people, towns, companies, works, events and schools, linked by relations.

No fact of it is true anywhere else, so that nothing can be answered from memory. Every name is unique, and every
relation of an entity has exactly one value: a chain of relations from a name leads to one answer. An entity has five
relations of each sort that it has at all, so that the right one has to be understood.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any, Literal, get_args

import yaml

from environments.kit.ranking import Document, Ranking, ranking
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError
from mua.utils.strict_json import JsonError, read_file, read_json

# The relations of ``relations.yaml``: where they lead, how documents state them, how questions name them.

Target = Literal["person", "town", "year"]
FILE = Path(__file__).with_name("relations.yaml")


@dataclass(frozen=True, slots=True)
class Relation:
    """What entities of one kind have exactly one of."""

    name: str
    target: Target
    """A kind of entity, or a year."""
    split: Split
    """Questions of this split alone follow it."""
    wordings: Sequence[str]
    """What a document says; ``{}`` is the value."""
    noun: str
    """What a question calls it; ``{x}`` is the entity and ``{sort}`` its sort. Empty for years."""
    question: str
    """How a question ends that asks for it."""


@lru_cache(maxsize=1)
def relations() -> Mapping[str, Mapping[str, Relation]]:
    """By kind of entity and name; raises :class:`MuaError` that names what is wrong in the file."""
    raw: dict[str, dict[str, list[Any]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {kind: {name: _relation(kind, name, given) for name, given in of.items()} for kind, of in raw.items()}


def _relation(kind: str, name: str, given: list[Any]) -> Relation:
    target, split, wordings, noun, *asked = given
    if target not in get_args(Target) or split not in get_args(Split) or any("{}" not in one for one in wordings):
        raise MuaError(
            f"{FILE}: {kind}.{name}: write [person, town or year, a split, wordings with {{}}, noun, question]"
        )
    if not asked and target != "person":
        raise MuaError(f"{FILE}: {kind}.{name}: leads to a {target}; add how it is asked for")
    question = asked[0] if asked else f"Who is {noun}?".replace("Who is whoever", "Who")
    return Relation(name, target, split, tuple(wordings), noun, question)


WORLD_SEED = 20_240
COUNTS = {"town": 240, "school": 60, "person": 1400, "company": 400, "work": 1000, "event": 400}


_WORDS: dict[str, list[str]] = {
    name: words.split() for name, words in yaml.safe_load(read_file(Path(__file__).with_name("words.yaml"))).items()
}
_EVENTS = {
    "regatta": "Regatta",
    "chess tournament": "Chess Open",
    "cycling race": "Cycling Classic",
    "poetry contest": "Poetry Prize",
    "ski race": "Ski Trophy",
}
_WORKS = ("novel", "opera", "film", "painting", "stage play")
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
    of_others: Mapping[str, Sequence[str]] = {"person": _WORDS["professions"], "work": _WORKS, "school": ["university"]}
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
    towns = _invented(rng, _WORDS["town_ends"], COUNTS["town"])
    surnames = _invented(rng, _WORDS["surname_ends"], 420)
    titles = [f"The {one} {other}" for one, other in product(_WORDS["adjectives"], _WORDS["nouns"])]
    companies = _invented(rng, ("an", "ex", "or", "ia", "um"), COUNTS["company"])
    events = [f"{title} {year}" for title, year in product(_EVENTS.values(), range(1950, 2020))]
    hosts = _invented(rng, ("peak", "isle", "bay"), 60)
    return {
        "town": towns,
        "school": [f"University of {name}" for name in _invented(rng, ("mar", "lund", "ost"), COUNTS["school"])],
        "person": rng.sample(
            [f"{one} {other}" for one, other in product(_WORDS["first_names"], surnames)], COUNTS["person"]
        ),
        "company": [f"{name} {rng.choice(_WORDS['company_kinds'])}" for name in companies],
        "work": rng.sample(titles, COUNTS["work"]),
        "event": rng.sample([f"{host} {event}" for host, event in product(hosts, events)], COUNTS["event"]),
    }


def _invented(rng: random.Random, ends: Sequence[str], count: int) -> list[str]:
    """``count`` different names that no language has."""
    stems = [one + two + three for one, two, three in product(_WORDS["onsets"], _WORDS["vowels"], _WORDS["middles"])]
    return [stem + end for stem, end in zip(rng.sample(stems, count), _endless(rng, ends), strict=False)]


def _endless(rng: random.Random, ends: Sequence[str]) -> Iterator[str]:
    while True:
        yield rng.choice(ends)


# The search gym's corpus: one short document for each entity of the world, and reading a fact out of one.
#
# A relation has two wordings; which one a document uses depends on its entity, and neither has the question's words.


@lru_cache(maxsize=1)
def corpus() -> tuple[Document, ...]:
    """One document for each entity."""
    return tuple(_document(entity) for entity in world().values())


def read(text: str, relation: str) -> str | None:
    """The value that a document's text states for ``relation``."""
    for stated in _patterns(relation):
        if found := stated.search(text):
            return found.group(1).strip()
    return None


@lru_cache(maxsize=64)
def _patterns(relation: str) -> Sequence[re.Pattern[str]]:
    """How documents of any kind state a relation of this name."""
    wordings = [one for of in relations().values() if relation in of for one in of[relation].wordings]
    return [re.compile(r"(?:^|(?<=\. ))" + re.escape(one).replace(r"\{\}", r"([^.]+?)")) for one in wordings]


def _document(entity: Entity) -> Document:
    rng = random.Random(entity.name)
    known = relations()[entity.kind]
    sentences = [rng.choice(known[relation].wordings).format(value) for relation, value in entity.facts.items()]
    rng.shuffle(sentences)
    article = "an" if entity.sort[0] in "aeio" else "a"
    return Document(entity.name, " ".join([f"{entity.name} is {article} {entity.sort}.", *sentences]))


# BM25 over the corpus: built once a process, shared by all episodes, read only.

_BUILDING = Lock()


def shared_index() -> Ranking[Document]:
    """The corpus's index, built on first use."""
    with _BUILDING:
        return _built()


async def ready_index() -> Ranking[Document]:
    """The same, without holding up the event loop while it is built."""
    return shared_index() if _built.cache_info().currsize else await asyncio.to_thread(shared_index)


@lru_cache(maxsize=1)
def _built() -> Ranking[Document]:
    return ranking(corpus())


# Whether an answer is the right one: normalised exact match with the answer or one of its aliases.


def normal(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (as SQuAD's exact match compares)."""
    words = re.sub(r"[^\w\s]", " ", text.lower().replace("-", " ")).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def matches(given: str, accepted: Iterable[str]) -> bool:
    """Whether ``given`` is one of ``accepted`` once both are normalised."""
    said = normal(given)
    return bool(said) and said in {normal(one) for one in accepted}


# Questions of two to four hops over the world, dealt to splits.
#
# A question names one entity and asks for the end of a chain of relations from it. No document on the way but the last
# holds the answer. The splits follow different relations.

NAME = "gyms/search"
SIZES: dict[Split, dict[str, int]] = {
    "train": {},
    "validation": {"easy": 25, "medium": 25, "hard": 10},
    "test": {"easy": 80, "medium": 80, "hard": 20},
}
"""Questions by difficulty; the gym is held out."""
HOPS = {"easy": 2, "medium": 3, "hard": 4}
_SEED = "search questions"


def generate_tasks(split: Split) -> Iterator[Task]:
    """The questions of a split."""
    return iter(_questions().get(split, ()))


@lru_cache(maxsize=1)
def _questions() -> dict[Split, list[Task]]:
    """All splits at once: no question, and no first entity, occurs twice."""
    rng = random.Random(_SEED)
    starts = [entity for entity in world().values() if entity.kind in ("work", "event", "company", "school")]
    rng.shuffle(starts)
    left = iter(starts)
    found: dict[Split, list[Task]] = {}
    for split, sizes in SIZES.items():
        wanted = [difficulty for difficulty, count in sizes.items() for _ in range(count)]
        found[split] = [_task(split, number, difficulty, left, rng) for number, difficulty in enumerate(wanted)]
    return found


def _task(split: Split, number: int, difficulty: str, starts: Iterator[Entity], rng: random.Random) -> Task:
    while (data := _question(next(starts), split, difficulty, rng)) is None:
        pass
    return Task(f"{NAME}/{split}/{number}", NAME, split, data)


def _question(start: Entity, split: Split, difficulty: str, rng: random.Random) -> Json | None:
    """A question from ``start``; None where the chain comes back to what was named, or the answer stands there."""
    chain: list[Relation] = []
    entity, named = start, [start.name]
    for _ in range(HOPS[difficulty] - 1):
        chain.append(rng.choice([one for one in _asked(entity, split) if one.target != "year"]))
        entity = world()[entity.facts[chain[-1].name]]
        named.append(entity.name)
    chain.append(rng.choice(_asked(entity, split)))
    answer = entity.facts[chain[-1].name]
    if len({*named, answer}) <= len(named) or any(_told(answer, name) for name in named[:-1]):
        return None
    return {
        "kind": f"{len(chain)}_hops", "difficulty": difficulty, "question": _worded(start, chain), "answer": answer,
        "aliases": aliases(answer), "start": start.name, "chain": [relation.name for relation in chain],
    }  # fmt: skip


def _asked(entity: Entity, split: Split) -> list[Relation]:
    return [relation for relation in relations()[entity.kind].values() if relation.split == split]


def _told(answer: str, name: str) -> bool:
    return answer.lower() in _texts()[name].lower()


@lru_cache(maxsize=1)
def _texts() -> dict[str, str]:
    return {document.title: document.text for document in corpus()}


def _worded(start: Entity, chain: Sequence[Relation]) -> str:
    phrase = start.name
    for relation in chain[:-1]:
        phrase = relation.noun.format(x=phrase, sort=start.sort)
    return chain[-1].question.format(x=phrase)


# Questions from a folder instead of the made-up world: for the web search, or for a benchmark of one's own.
#
# UserRL's questions are read by :mod:`environments.gyms._shared.official`.
#
# The folder holds ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl``, any of them; each line is an object with
# ``question``, ``answer``, and optionally ``id``, ``aliases`` (a list) and ``difficulty``.

_DIFFICULTIES = ("easy", "medium", "hard")


def load_questions(folder: Path) -> Mapping[Split, tuple[Task, ...]]:
    """The tasks of each split; raises :class:`ConfigError` that names the file and line of what is wrong."""
    splits: tuple[Split, ...] = get_args(Split)
    files = {split: folder / f"{split}.jsonl" for split in splits}
    if not any(file.is_file() for file in files.values()):
        raise ConfigError(f"environment.data: {folder} holds none of {', '.join(file.name for file in files.values())}")
    return {split: tuple(_tasks(split, file)) if file.is_file() else () for split, file in files.items()}


def _tasks(split: Split, file: Path) -> Iterator[Task]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if line.strip():
            yield _task_given(split, number, line, f"environment.data: {file}, line {number}")


def _text(file: Path) -> str:
    try:
        return read_file(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"environment.data: {file}: not UTF-8 text (byte {error.start})") from None


def _task_given(split: Split, number: int, line: str, where: str) -> Task:
    try:
        given = read_json(line)
    except JsonError as error:
        raise ConfigError(f"{where}: no JSON ({error})") from error
    if not isinstance(given, dict) or not all(_is_text(given.get(key)) for key in ("question", "answer")):
        raise ConfigError(f'{where}: give an object with the texts "question" and "answer"')
    aliases, difficulty = given.get("aliases", []), given.get("difficulty", "medium")
    if not isinstance(aliases, list) or not all(map(_is_text, aliases)):
        raise ConfigError(f'{where}: "aliases" must be a list of texts')
    if difficulty not in _DIFFICULTIES:
        raise ConfigError(f'{where}: "difficulty" must be one of {", ".join(_DIFFICULTIES)}')
    data = {"kind": "given", "difficulty": difficulty, "question": given["question"], "answer": given["answer"]}
    return Task(f"{NAME}/{split}/{given.get('id', number)}", NAME, split, {**data, "aliases": aliases})


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
