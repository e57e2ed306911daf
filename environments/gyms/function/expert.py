"""An agent that finds hidden rules by trying points.

It tries the same points in every episode and looks in the family (:mod:`environments.gyms.function.rules`) for the
rules that give all that it saw there; what they give for the test numbers it answers, the most frequent value first.
It knows of the task what the game tells.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import permutations, product
from typing import Any

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
from mua.environment.protocol import Move, Task

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
