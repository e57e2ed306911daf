"""Policies that find no rule: they guess from values nearby, fit curves, or go by what training rules gave."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations, product
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from environments.gyms._shared import act
from environments.gyms.function.rules import (
    LARGEST,
    PRIMES,
    SHAPES,
    SMALL,
    VARIABLES,
    Rule,
    at,
    filled,
    leaves,
    shape,
    value,
)
from environments.kit.canned import Glance, Player, end_at_once
from mua.environment.protocol import Move, Task

# An agent that finds hidden rules by trying points.
#
# It tries the same points in every episode and looks in the family (:mod:`environments.gyms.function.rules`) for the
# rules that give all that it saw there; what they give for the test numbers it answers, the most frequent value first.
# It knows of the task what the game tells.

PROBES = ((50, 47, 43, 49), (41, 50, 48, 37), (49, 38, 50, 46), (36, 45, 41, 50), (7, 31, 22, 13), (29, 3, 17, 40))
"""Mostly far out, where remainders have wrapped."""
SOLVED = "Correct"
_CONSTANTS: Mapping[str, Sequence[int]] = {"k": SMALL, "n": SMALL, "m": PRIMES}


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it answers what the first point gave, without looking further."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    numbers = [int(n) for n in re.findall(r"\d+", (yield act("search", "test")))]
    observed: list[int] = []
    for probe in PROBES:
        observed.append(int((yield act("action", " ".join(map(str, probe))))))
        if len(observed) == 1 and rng.random() < loose and SOLVED in (yield act("answer", str(observed[0]))):
            return
    for guess in _values_at(numbers, list(consistent(observed))):
        if SOLVED in (yield act("answer", str(guess))):
            return


def _values_at(numbers: Sequence[int], rules: Sequence[Rule]) -> list[int]:
    """What ``rules`` give at ``numbers``, most frequent first, without repetition."""
    return [found for found, _ in Counter(at(rule, numbers) for rule in rules).most_common()]


def consistent(observed: Sequence[int]) -> Iterator[Rule]:
    """The rules of the family that give ``observed`` at the first of the :data:`PROBES`."""
    for written in _all_shapes():
        seen = table(written)[2][:, : len(observed)]
        yield from (rule_of(written, row) for row in np.flatnonzero((seen == np.asarray(observed)).all(axis=1)))


def rule_of(written: str, row: int) -> Rule:
    """The shape ``written`` filled as a row of its :func:`table` says."""
    names, values, _ = table(written)
    slots = zip(names, values[row].tolist(), strict=True)
    return filled(shape(written), {name: v if name in _CONSTANTS else VARIABLES[v] for name, v in slots})


def _all_shapes() -> list[str]:
    return [written for levels in SHAPES.values() for shapes in levels.values() for written in shapes]


@lru_cache(maxsize=64)
def table(written: str) -> tuple[list[str], Any, Any]:
    """All ways to fill a shape: the names of its slots, a row of values for each way, and what it gives at the probes.

    A variable's value is its place in :data:`VARIABLES`.
    """
    inside = leaves(shape(written))
    variables, constants = sorted(inside - set(_CONSTANTS)), sorted(inside & set(_CONSTANTS))
    places = permutations(range(len(VARIABLES)), len(variables))
    values = np.array(
        [[*one, *rest] for one, rest in product(places, list(product(*map(_CONSTANTS.__getitem__, constants))))]
    )
    seen = [_at_probe(shape(written), [*variables, *constants], values, np.array(probe)) for probe in PROBES]
    return [*variables, *constants], values, np.stack(seen, axis=1)


def _at_probe(rule: Rule, names: Sequence[str], values: Any, probe: Any) -> Any:
    columns = {name: values[:, i] if name in _CONSTANTS else probe[values[:, i]] for i, name in enumerate(names)}
    return value(rule, columns)


assert all(len(probe) == len(VARIABLES) and max(probe) <= LARGEST for probe in PROBES)


Point: TypeAlias = tuple[int, ...]
Tried: TypeAlias = Mapping[Point, float]
Guess: TypeAlias = Callable[[Point, Tried, Glance], Sequence[float]]
MOST_POINTS = 20
MOST_ANSWERS = 3


def _guessing(points: Callable[[Point, random.Random], Sequence[Point]], guess: Guess) -> Player:
    """Tries ``points`` for the test numbers and answers what ``guess`` makes of their values, best first."""

    def play(glance: Glance) -> Generator[Move, str, None]:
        test = tuple(int(n) for n in re.findall(r"\d+", (yield act("search", "test"))))
        tried: dict[Point, float] = {}
        for point in points(test, glance.rng)[:MOST_POINTS]:
            said = yield act("action", " ".join(map(str, point)))
            if re.fullmatch(r"-?\d+(\.\d+)?", said):
                tried[point] = float(said)
        for guessed in guess(test, tried, glance):
            yield act("answer", f"{guessed:.10g}")

    return play


# Where they look.


def _around(test: Point, rng: random.Random) -> list[Point]:
    """One and two steps from the test numbers in each direction, or from the nearest point that may be tried."""
    near = tuple(min(n, LARGEST - 2) for n in test)
    steps = [
        tuple(n + step * (i == place) for i, n in enumerate(near)) for place in range(4) for step in (1, -1, 2, -2)
    ]
    return [near, *steps]


def _spread(test: Point, rng: random.Random) -> list[Point]:
    return [tuple(rng.randint(0, LARGEST) for _ in test) for _ in range(MOST_POINTS)]


def _less_a_divisor(test: Point, rng: random.Random) -> list[Point]:
    return [tuple(n - prime if n > LARGEST else n for n in test) for prime in PRIMES if min(test) >= prime]


# What they make of it.


def _frequent(values: Iterable[float]) -> list[float]:
    return [value for value, _ in Counter(values).most_common()]


def _by_distance(test: Point, tried: Tried, glance: Glance) -> list[float]:
    def far(point: Point) -> int:
        return sum(abs(p - t) for p, t in zip(point, test, strict=True))

    return [median(tried.values()), *(tried[point] for point in sorted(tried, key=far))]


def _around_fit(test: Point, tried: Tried, glance: Glance) -> list[float]:
    """What linear least squares say, and the whole numbers beside it."""
    rows = np.array([[1.0, *point] for point in tried])
    weights = np.linalg.lstsq(rows, np.array(list(tried.values())), rcond=None)[0]
    best = round(float(np.dot([1.0, *test], weights)))
    return [best, best + 1, best - 1]


def _of_training(test: Point, tried: Tried, glance: Glance) -> list[float]:
    return _frequent(at(task.data["rule"], task.data["test"]) for task in glance.training)


def _by_training_shape(test: Point, tried: Tried, glance: Glance) -> list[float]:
    """Training shapes with whatever constants give most of what was seen."""
    shapes = sorted({task.data["kind"] for task in glance.training})
    hits = {one: (table(one)[2] == np.array(list(tried.values()))).sum(axis=1) for one in shapes}
    best = sorted(shapes, key=lambda one: -int(hits[one].max()))[:MOST_ANSWERS]
    return [at(rule_of(one, int(hits[one].argmax())), test) for one in best]


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "median and nearest": _guessing(_around, _by_distance),
    "linear fit": _guessing(_spread, _around_fit),
    "frequent training values": _guessing(lambda *_: [], _of_training),
    "shapes of training rules": _guessing(lambda *_: PROBES, _by_training_shape),
    "less a likely divisor": _guessing(_less_a_divisor, lambda test, tried, _: _frequent(tried.values())),
}  # fmt: skip
"""Policies that deserve nothing, by name."""
