"""Trips by seed: aspects with search arguments, held preferences and options, of which one is best.

Options of an aspect (20 of them, in an order without meaning):

``best``     has everything that is wanted, and is the cheapest that does
``correct``  has everything that is wanted, but costs more; one or two
``wrong``    lacks something that is wanted; for at least half of the preferences one lacks nothing else and is cheaper
             than the best, so that whoever does not ask for them books that
``noise``    is for another place or another day

Options must not tell what is wanted. So the table comes first, drawn alike for every attribute and every price, and the
preferences are chosen afterwards, each with the same chance among all those under which some option is best. Whoever
asks nothing can only reckon how many preferences would make an option the best one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, cycle, islice
from typing import Any

import numpy as np

from environments.gyms.travel.catalog import Aspect, Attribute, catalog
from mua.environment.protocol import Split, Task
from mua.types import Json

NAME = "gyms/travel"
SIZES: dict[Split, int] = {"train": 925, "validation": 96, "test": 471}
FIRST_SEED: dict[Split, int] = {"train": 1_000_000, "validation": 2_000_000, "test": 3_000_000}
PATTERNS: Mapping[str, tuple[str, int]] = {
    "22": ("easy", 7),
    "33": ("easy", 6),
    "44": ("medium", 4),
    "233": ("medium", 4),
    "333": ("medium", 4),
    "334": ("hard", 3),
    "444": ("hard", 2),
    "2222": ("hard", 1),
}
"""Preferences of each aspect -> difficulty, and how often the pattern comes in a round of 31."""
CITIES = re.findall(
    r"\w+",
    "Antwerp Athens Bergen Bilbao Bologna Bordeaux Bruges Cardiff Catania Cork Dresden Dubrovnik Edinburgh Ghent "
    "Granada Graz Hamburg Innsbruck Krakow Leipzig Lisbon Ljubljana Lucerne Lyon Malaga Marseille Naples Nice Palermo "
    "Porto Prague Riga Rotterdam Salzburg Seville Sofia Split Tallinn Trieste Turin Utrecht Valencia Verona Vilnius",
)
MONTHS = ("April", "May", "June", "July", "August", "September", "October")
_HERE, _NOISE = 18, 2
"""Options of an aspect for the right place and day, and others."""
_STATED = 14
"""Attributes that an option states."""
_SPREAD: Mapping[int, float] = {2: 0.9, 3: 0.75, 4: 0.6}
"""By the number of preferences, how often an option leaves its column's commonest value to chance."""
_SETS = 64
"""Sets of columns that are looked at for a table."""


@dataclass(frozen=True, slots=True)
class Option:
    """One row of ``task.data["aspects"][i]["options"]``: [id, sort, price, values, place, date]."""

    id: str
    sort: str
    """best, correct, wrong or noise."""
    price: int
    values: Mapping[str, str]
    place: str
    date: str

    @classmethod
    def of(cls, aspect: Aspect, row: Sequence[str | int]) -> Option:
        """The option of one row, whose ``values`` are digits: which value of each attribute in order."""
        digits = zip(aspect.attributes.values(), str(row[3]), strict=True)
        values = {attribute.name: attribute.values[int(digit)].name for attribute, digit in digits}
        return cls(str(row[0]), str(row[1]), int(row[2]), values, str(row[4]), str(row[5]))


def generate_tasks(split: Split) -> Iterator[Task]:
    """The trips of a split."""
    rounds = [pattern for pattern, (_, times) in PATTERNS.items() for _ in range(times)]
    random.Random("patterns").shuffle(rounds)
    for number, pattern in enumerate(islice(cycle(rounds), SIZES[split])):
        seed = FIRST_SEED[split] + number
        yield Task(f"{NAME}/{split}/{seed}", NAME, split, _trip(random.Random(seed), pattern, split == "test"))


def _trip(rng: random.Random, pattern: str, unseen: bool) -> Json:
    """``unseen``: of the aspects that stand nowhere else."""
    home, goal, other = rng.sample(CITIES, 3)
    month, first = rng.choice(MONTHS), rng.randint(2, 18)
    stay = {"first": f"{first} {month}", "last": f"{first + rng.randint(2, 9)} {month}"}
    stay["evening"] = f"{first + 1} {month}"
    names = _aspects(rng, len(pattern), unseen)
    counts = rng.sample(pattern, len(pattern))
    where = {"home": home, "goal": goal, "other": other, "party": str(rng.randint(2, 8)), **stay}
    aspects = [_aspect(rng, catalog()[name], int(count), where) for name, count in zip(names, counts, strict=True)]
    return {"kind": pattern, "difficulty": PATTERNS[pattern][0], "aspects": aspects}


def _aspects(rng: random.Random, count: int, unseen: bool) -> list[str]:
    """Aspects of a trip; nobody books a hotel and an apartment unless nearly everything is booked."""
    possible = [name for name, aspect in catalog().items() if aspect.unseen == unseen]
    while True:
        names = rng.sample(possible, count)
        if count == 4 or not {"hotel", "apartment"} <= set(names):
            return names


def _aspect(rng: random.Random, aspect: Aspect, count: int, where: Mapping[str, str]) -> Json:
    table = _table(rng, count)
    held = dict(zip(rng.sample(aspect.cared_for(), count), table.chosen, strict=True))
    spare = iter(rng.sample([column for column in range(_STATED) if column not in table.chosen], _STATED - count))
    columns = [held[name] if name in held else next(spare) for name in aspect.attributes]
    rows = list(_options(rng, aspect, table, columns, where))
    rng.shuffle(rows)
    return {
        "aspect": aspect.name,
        "arguments": {name: where[fact] for name, fact in aspect.search.items()},
        "preferences": [
            _preference(rng, aspect.attributes[name], table.rows[table.best][column]) for name, column in held.items()
        ],
        "options": [[f"{aspect.letter}{number}", *row] for number, row in enumerate(rows, 1)],
    }


def _preference(rng: random.Random, attribute: Attribute, place: int) -> Json:
    value = attribute.values[place]
    hint, cue = rng.randrange(len(value.hints)), rng.randrange(len(attribute.cues))
    return {"attribute": attribute.name, "value": value.name, "hint": hint, "cue": cue}


def _options(
    rng: random.Random, aspect: Aspect, table: _Table, columns: Sequence[int], where: Mapping[str, str]
) -> Iterator[list[str | int]]:
    """Rows without ids, the cheapest first."""
    prices = sorted(rng.sample(range(*aspect.prices), len(table.rows)))
    place, date = where["goal"], where[aspect.day]
    for number, (price, row) in enumerate(zip(prices, table.rows, strict=True)):
        digits = "".join(str(row[column]) for column in columns)
        here = (place, date)
        if number in table.noise:
            here = (where["other"], date) if number == table.noise[0] else (place, _another_day(rng, date))
        yield [table.sort(number), price, digits, *here]


@dataclass(frozen=True, slots=True)
class _Table:
    """Options before anything has a name."""

    rows: Sequence[Sequence[int]]
    """The cheapest first, a digit for each column."""
    noise: Sequence[int]
    """Rows for elsewhere or another day."""
    best: int
    chosen: Sequence[int]
    """The columns that matter."""

    def sort(self, number: int) -> str:
        if number in self.noise:
            return "noise"
        fits = all(self.rows[number][column] == self.rows[self.best][column] for column in self.chosen)
        return "wrong" if not fits else "best" if number == self.best else "correct"


def _table(rng: random.Random, count: int) -> _Table:
    """Rows drawn alike, then what matters about them."""
    while True:
        rows = _rows(rng, _SPREAD[count])
        noise = rng.sample(range(len(rows)), _NOISE)
        here = [number for number in range(len(rows)) if number not in noise]
        sets = column_sets(count)
        sets = sets[rng.sample(range(len(sets)), min(_SETS, len(sets)))]
        possible = np.argwhere(best_under(np.array([rows[number] for number in here]), sets))
        if len(possible):
            best, chosen = possible[rng.randrange(len(possible))]
            columns = [column for column in range(_STATED) if sets[chosen] >> column & 1]
            return _Table(rows, noise, here[best], columns)


def _rows(rng: random.Random, spread: float) -> list[tuple[int, ...]]:
    columns = []
    for _ in range(_STATED):
        weights = [spread / 3] * 3
        weights[rng.randrange(3)] += 1 - spread
        columns.append(rng.choices((0, 1, 2), weights, k=_HERE + _NOISE))
    return list(zip(*columns, strict=True))


@lru_cache(maxsize=8)
def column_sets(count: int) -> Any:
    """Every set of ``count`` columns as bits."""
    return np.array([sum(1 << column for column in some) for some in combinations(range(_STATED), count)], np.uint16)


def best_under(rows: Any, sets: Any) -> Any:
    """Which row (first axis, the cheapest first) would be the best if a set of columns (second axis) mattered.

    It is the cheapest of two or three that agree with it there, and for at least half of the columns a cheaper row
    differs in that one alone.

    Args:
        rows: (rows, columns), small integers.
        sets: (sets,), columns as bits, equally many each.
    """
    differ = ((rows[:, None, :] != rows[None, :, :]) << np.arange(rows.shape[1])).sum(-1).astype(np.uint16)
    where = differ[:, :, None] & sets
    cheaper = np.tri(len(rows), k=-1, dtype=bool)[:, :, None]
    same = where == 0
    single = (where & (where - 1)) == 0
    lacking = np.bitwise_or.reduce(np.where(single & cheaper, where, 0), axis=1)
    fitting = same.sum(1)
    enough = 2 * np.bitwise_count(lacking) >= np.bitwise_count(sets)
    return (fitting >= 2) & (fitting <= 3) & ~(same & cheaper).any(1) & enough


def _another_day(rng: random.Random, date: str) -> str:
    day, month = date.split()
    return f"{(int(day) + rng.randint(2, 6) - 1) % 28 + 1} {month}"
