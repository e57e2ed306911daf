"""Trips by seed: aspects with search arguments, held preferences and options, of which one is best.

Options of an aspect (13 to 15 of them, in an order without meaning):

``best``     has everything that is wanted, and is the cheapest that does
``correct``  has everything that is wanted, but costs more
``wrong``    lacks something that is wanted; for each preference one lacks nothing else and is cheaper than the best
``noise``    has everything that is wanted and is cheaper, but is for another place or another day

so that choosing well takes every preference of the aspect.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from environments.gyms.travel.catalog import Aspect, catalog
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
_CORRECT, _WRONG, _NOISE = 2, 5, 3
_PRICES = {"flight": (110, 380), "hotel": (420, 1300), "apartment": (380, 1100), "rental_car": (160, 620),
           "restaurant": (35, 120)}  # fmt: skip


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


def generate(split: Split) -> Iterator[Task]:
    """The trips of a split."""
    rounds = [pattern for pattern, (_, times) in PATTERNS.items() for _ in range(times)]
    random.Random("patterns").shuffle(rounds)
    for number, pattern in enumerate(islice(cycle(rounds), SIZES[split])):
        seed = FIRST_SEED[split] + number
        yield Task(f"{NAME}/{split}/{seed}", NAME, split, _trip(random.Random(seed), pattern))


def _trip(rng: random.Random, pattern: str) -> Json:
    home, goal, other = rng.sample(CITIES, 3)
    month, first = rng.choice(MONTHS), rng.randint(2, 18)
    stay = {"first": f"{first} {month}", "last": f"{first + rng.randint(2, 9)} {month}"}
    stay["evening"] = f"{first + 1} {month}"
    names = _aspects(rng, len(pattern))
    counts = rng.sample(pattern, len(pattern))
    where = {"home": home, "goal": goal, "other": other, "party": str(rng.randint(2, 8)), **stay}
    aspects = [_aspect(rng, catalog()[name], int(count), where) for name, count in zip(names, counts, strict=True)]
    return {"kind": pattern, "difficulty": PATTERNS[pattern][0], "aspects": aspects}


def _aspects(rng: random.Random, count: int) -> list[str]:
    """Aspects of a trip; nobody books a hotel and an apartment unless nearly everything is booked."""
    while True:
        names = rng.sample(list(catalog()), count)
        if count == 4 or not {"hotel", "apartment"} <= set(names):
            return names


def arguments_of(aspect: str, where: Mapping[str, str]) -> dict[str, str]:
    """What a search for ``aspect`` has to state."""
    if aspect == "flight":
        return {"origin": where["home"], "destination": where["goal"], "date": where["first"]}
    if aspect == "restaurant":
        return {"city": where["goal"], "date": where["evening"], "guests": where["party"]}
    names = ("pick-up date", "return date") if aspect == "rental_car" else ("check-in date", "check-out date")
    return {"city": where["goal"], names[0]: where["first"], names[1]: where["last"]}


def _aspect(rng: random.Random, aspect: Aspect, count: int, where: Mapping[str, str]) -> Json:
    held = {name: rng.randrange(3) for name in rng.sample(list(aspect.attributes), count)}
    preferences = [
        {"attribute": name, "value": (value := aspect.attributes[name].values[place]).name,
         "hint": rng.randrange(len(value.hints))}
        for name, place in held.items()
    ]  # fmt: skip
    rows = list(_options(rng, aspect, held, where))
    rng.shuffle(rows)
    return {
        "aspect": aspect.name,
        "arguments": arguments_of(aspect.name, where),
        "preferences": preferences,
        "options": [[f"{aspect.letter}{number}", *row] for number, row in enumerate(rows, 1)],
    }


def _options(
    rng: random.Random, aspect: Aspect, held: Mapping[str, int], where: Mapping[str, str]
) -> Iterator[list[str | int]]:
    """Rows without ids; prices are all different, so that one option is the cheapest."""
    low, high = _PRICES[aspect.name]
    prices = sorted(rng.sample(range(low, high), 40))
    cheaper, dearer = prices[:16], prices[17:]
    rng.shuffle(cheaper)
    rng.shuffle(dearer)
    place, date = where["goal"], where["evening" if aspect.name == "restaurant" else "first"]
    yield ["best", prices[16], _values(rng, aspect, held, ()), place, date]
    for _ in range(_CORRECT):
        yield ["correct", dearer.pop(), _values(rng, aspect, held, ()), place, date]
    for name in held:
        yield ["wrong", cheaper.pop(), _values(rng, aspect, held, (name,)), place, date]
    for _ in range(_WRONG):
        lacking = rng.sample(list(held), rng.randint(1, len(held)))
        pool = rng.choice((cheaper, dearer))
        yield ["wrong", pool.pop(), _values(rng, aspect, held, lacking), place, date]
    for number in range(_NOISE):
        elsewhere = (where["other"], date) if number % 2 else (place, _another_day(rng, date))
        yield ["noise", cheaper.pop(), _values(rng, aspect, held, ()), *elsewhere]


def _values(rng: random.Random, aspect: Aspect, held: Mapping[str, int], lacking: Sequence[str]) -> str:
    """A digit an attribute: what is wanted, something else where it is ``lacking``, anything where nothing is."""
    digits = []
    for name in aspect.attributes:
        if name in lacking:
            digits.append((held[name] + rng.randint(1, 2)) % 3)
        else:
            digits.append(held.get(name, rng.randrange(3)))
    return "".join(map(str, digits))


def _another_day(rng: random.Random, date: str) -> str:
    day, month = date.split()
    return f"{(int(day) + rng.randint(2, 6) - 1) % 28 + 1} {month}"
