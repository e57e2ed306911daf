"""Policies that deserve nothing: they book by what a list of options tells of itself, or ask without reading.

They know more than they should: how trips are made (:mod:`scenarios`), and for each column of a list the very question
that the scripted agent would ask. What they lack is to understand what the traveller lets on.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from environments.gyms._shared import act
from environments.gyms.travel.catalog import COMPLETE, MISS, VAGUE, Aspect, catalog, openings
from environments.gyms.travel.scenarios import best_under, column_sets
from environments.kit.canned import Glance, Player, end_at_once
from mua.environment.protocol import Move, Task

# An agent that books every trip well: it asks about what the traveller lets on, lists options, and takes the cheapest.
#
# The trip's facts it reads from the opening (here: from ``task.data["aspects"][i]["arguments"]``, which the opening
# states), and so what is on the traveller's mind; every wish it learns from the traveller's words. It understands
# both by the catalog.

_OPTION = re.compile(r"^([A-Z]\d+): (.+?), (.+?), (\d+) EUR; (.+)$", re.MULTILINE)
_STATED = re.compile(r"^id: place, day, price; (.+)$", re.MULTILINE)
_BROAD = ("Is there anything that matters to you?", "What are your preferences?", "Tell me what you like.")

Wishes = dict[tuple[str, str], str]
"""(aspect, attribute) -> value."""


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """``loose`` is how often it asks a vague question first, or leaves a question out."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    aspects = {one["aspect"]: one["arguments"] for one in task.data["aspects"]}
    opening = openings(task)[0]
    wishes: Wishes = {}
    for name, arguments in aspects.items():
        aspect = catalog()[name]
        yield from _ask(rng, aspect, _on_the_mind(aspect, opening, rng, loose), list(aspects), wishes)
        listed = ""
        while "Options" not in listed:
            listed = yield act("search", query(aspect, arguments))
        options = [option for option in options_of(listed) if _fits(option, arguments)]
        yield act("answer", _cheapest(options, {key: value for key, value in wishes.items() if key[0] == name}))


def query(aspect: Aspect, arguments: Mapping[str, str]) -> str:
    """A search that states every argument."""
    return f"{aspect.noun}: " + ", ".join(f"{name} {value}" for name, value in arguments.items())


def _on_the_mind(aspect: Aspect, opening: str, rng: random.Random, loose: float) -> list[str]:
    """Questions about what the opening lets on; a ``loose`` agent leaves some out and asks a broad one."""
    told = [one for one in aspect.attributes.values() if any(cue in opening for cue in one.cues)]
    questions = [one.question for one in told if rng.random() >= loose / 4]
    return [rng.choice(_BROAD), *questions] if rng.random() < loose else questions


def _ask(
    rng: random.Random, aspect: Aspect, questions: Sequence[str], aspects: Sequence[str], wishes: Wishes
) -> Generator[Move, str, None]:
    """Ask until the traveller says that there is nothing more."""
    for question in rng.sample(questions, len(questions)):
        heard = yield act("action", question)
        wishes |= _understood(heard, aspects)
        if COMPLETE.format(noun=aspect.noun) in heard:
            return


def _understood(heard: str, aspects: Sequence[str]) -> Wishes:
    """The wishes that the words let know."""
    return {
        (name, attribute): value
        for name in aspects
        for hint, attribute, value in catalog()[name].hints()
        if hint in heard
    }


def options_of(listed: str) -> list[dict[str, str]]:
    """The options in a list of them: id, place, on, price and what they state."""
    stated = _STATED.search(listed)
    names = stated[1].split("; ") if stated else []
    rows = []
    for match in _OPTION.finditer(listed):
        values = dict(zip(names, match[5].split("; "), strict=True))
        rows.append({"id": match[1], "place": match[2], "on": match[3], "price": match[4], **values})
    return rows


def _fits(option: Mapping[str, str], arguments: Mapping[str, str]) -> bool:
    """For the right place, and beginning on the right day."""
    first = next(value for name, value in arguments.items() if "date" in name)
    return option["place"] in arguments.values() and option["on"] == first


def _cheapest(options: Sequence[Mapping[str, str]], wishes: Wishes) -> str:
    fitting = [o for o in options if all(o[attribute] == value for (_, attribute), value in wishes.items())]
    return min(fitting or options, key=lambda option: int(option["price"]))["id"]


Row: TypeAlias = Mapping[str, str]
Moves: TypeAlias = Generator[Move, str, None]
_SENTENCE = re.compile(r"(?<=[.!?]) ")
_FIXED = frozenset({"id", "place", "on", "price"})
_MOST_HELD = 4
_BESIDE = (*MISS, *VAGUE)
_ENOUGH = 3
"""Questions in vain after which a policy goes on; long before that nothing is paid any more."""


@dataclass
class Part:
    """One part of the trip, as the opening tells and a search lists it."""

    aspect: Aspect
    need: str
    """The sentence that asks for it."""
    cues: Sequence[str]
    rows: Sequence[Row] = ()
    """For the commonest place and day, the cheapest first."""

    @property
    def columns(self) -> list[str]:
        return [name for name in self.rows[0] if name not in _FIXED]

    def question(self, column: str) -> str:
        """The best question about a column that there is."""
        return self.aspect.attributes[column].question or f"What about the {column} of the {self.aspect.noun}?"


def parts_of(opening: str) -> list[Part]:
    """The parts in the order of the opening; sentences behind one's need are what it lets on."""
    found: list[Part] = []
    for sentence in _SENTENCE.split(opening):
        aspects = [one for one in catalog().values() if one.named.search(sentence)]
        if aspects and re.search(r"\d", sentence):
            found.append(Part(aspects[0], sentence, []))
        elif found and len(found[-1].cues) < _MOST_HELD:
            found[-1].cues = [*found[-1].cues, sentence]
    return found


def _listed(part: Part) -> Moves:
    """Search until the list comes."""
    heard = ""
    for _ in range(3):
        heard = yield act("search", part.need)
        if heard.startswith("Options"):
            break
    rows = _read(heard)
    (place, day), _ = Counter((row["place"], row["on"]) for row in rows).most_common(1)[0]
    part.rows = sorted(
        (row for row in rows if (row["place"], row["on"]) == (place, day)), key=lambda row: int(row["price"])
    )


@lru_cache(maxsize=2048)
def _read(listed: str) -> Sequence[Row]:
    """Read once for all policies."""
    return options_of(listed)


def _booking(texts: Callable[[Part], Iterable[str]]) -> Player:
    """List each part, ask ``texts`` about it, book the commonest option."""

    def play(glance: Glance) -> Moves:
        for part in parts_of(glance.opening):
            yield from _listed(part)
            useless = 0
            for text in texts(part):
                heard = yield act("action", text)
                useless += any(beside in heard for beside in _BESIDE)
                if useless == _ENOUGH:
                    break
            yield act("answer", _commonest(part)["id"])

    return play


# Choices by statistics over the list.


def _commonest(part: Part) -> Row:
    """The row that shares most with the others."""
    counts = {column: Counter(row[column] for row in part.rows) for column in part.columns}
    return max(part.rows, key=lambda row: sum(counts[column][row[column]] for column in part.columns))


class Reckoning:
    """Every wish that could stand behind a list, weighed as trips are made; what was heard rules some out."""

    def __init__(self, part: Part) -> None:
        values = {column: sorted({row[column] for row in part.rows}) for column in part.columns}
        self.columns = part.columns
        self._part = part
        self._coded = np.array([[values[column].index(row[column]) for column in self.columns] for row in part.rows])
        count = min(_MOST_HELD, max(2, len(part.cues)))
        self._sets = column_sets(count)
        self.weight = best_under(self._coded, self._sets) + 1e-9

    def heard(self, column: str, matters: bool) -> None:
        held = (self._sets >> self.columns.index(column) & 1).astype(bool)
        self.weight = self.weight * np.where(held == matters, 1.0, 0.0)

    def likeliest(self, asked: Sequence[str]) -> str:
        """The column that matters most probably, of those that have not been asked about."""
        each = {column: self._share(number) for number, column in enumerate(self.columns) if column not in asked}
        return max(each, key=lambda column: each[column])

    def _share(self, number: int) -> float:
        return float(self.weight[:, (self._sets >> number & 1).astype(bool)].sum())

    def choice(self) -> Row:
        """The row that is worth most on average: 1 as the best, 0.8 as the other that fits."""
        differ = (self._coded[:, None, :] != self._coded[None, :, :]) << np.arange(len(self.columns))
        fits = (differ.sum(-1).astype(np.uint16)[:, :, None] & self._sets) == 0
        worth = self.weight.sum(1) * 0.2 + 0.8 * np.einsum("rbh,rh->b", fits, self.weight)
        return self._part.rows[int(worth.argmax())]


# Questions that read nothing.


def _by_pair(part: Part) -> Iterator[str]:
    columns = part.columns
    for one, other in zip(columns[::2], columns[1::2], strict=True):
        yield f"{part.question(one)} And what about the {other}?"


def _reckoning_on(glance: Glance) -> Moves:
    """Asks for the likeliest column, reckons with what mattered, and goes on while it is paid; then books likewise."""
    useless = 0
    for part in parts_of(glance.opening):
        yield from _listed(part)
        reckoning = Reckoning(part)
        asked: list[str] = []
        while useless < 2 and len(asked) < len(part.cues):
            asked.append(reckoning.likeliest(asked))
            heard = yield act("action", part.question(asked[-1]))
            missed = any(text in heard for text in _BESIDE)
            useless += missed
            reckoning.heard(asked[-1], not missed)
        yield act("answer", reckoning.choice()["id"])


def _by_shared_words(glance: Glance) -> Moves:
    """Asks for the column whose name, values and question share most words with what the traveller lets on."""
    for part in parts_of(glance.opening):
        yield from _listed(part)
        wanted: list[str] = []
        for cue in part.cues:
            column = max(
                part.columns, key=lambda column: len(_stems(cue) & _stems(_words_of(part.aspect.name, column)))
            )
            wanted.append((yield act("action", part.question(column))))
        yield act("answer", _nearest(part, " ".join(wanted))["id"])


@lru_cache(maxsize=256)
def _words_of(aspect: str, column: str) -> str:
    attribute = catalog()[aspect].attributes[column]
    return " ".join([column, attribute.question, *(value.name for value in attribute.values)])


def _nearest(part: Part, heard: str) -> Row:
    """The cheapest of the rows that share most words with what was heard."""
    return max(part.rows, key=lambda row: sum(len(_stems(heard) & _stems(row[column])) for column in part.columns))


@lru_cache(maxsize=8192)
def _stems(text: str) -> frozenset[str]:
    return frozenset(word[:5] for word in re.findall(r"[a-z]{4,}", text.lower()))


def _every_id(glance: Glance) -> Moves:
    """Books one id after another."""
    parts = parts_of(glance.opening)
    for part in parts:
        yield from _listed(part)
    for number in range(1, 21):
        for part in parts:
            yield act("answer", f"{part.aspect.letter}{number}")


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "books the commonest": _booking(lambda part: ()),
    "books every id": _every_id,
    "asks for two columns at a time": _booking(_by_pair),
    "asks for the likeliest column": _reckoning_on,
    "asks for what shares words": _by_shared_words,
}
"""Policies that deserve nothing, by name."""
