"""An agent that finds hidden rules by probing.

It reads the test numbers and then tries two ways. First it changes one test number at a time: where two changes leave
the same value, those numbers probably do not matter and the value is the answer. This solves every easy rule with
short messages. Otherwise it probes points without structure and searches the family of rules
(:mod:`environments.gyms.function.rules`) for those that give what was seen.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

from environments.gyms._shared import act
from environments.gyms.function.rules import VARIABLES, Rule, at, parts, thirds
from mua.environment.protocol import Move, Task

STEPS = (1, 2, 3, 5)
"""How much each test number is changed; different, so that a sum does not react to two of them alike."""
PROBES = ((2.3, 3.7, 5.9, 7.1), (8.3, 1.9, 6.7, 4.7), (5.3, 7.9, 1.3, 3.1))
SOLVED = "Correct"


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it answers what the first probe gave, without looking further."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", (yield act("search", "test")))]
    seen = yield from _one_at_a_time(numbers, task.data["difficulty"] == "easy", rng.random() < loose)
    for guess in seen:
        if SOLVED in (yield act("answer", guess)):
            return
    yield from _by_search(numbers)


def _one_at_a_time(numbers: list[float], worth_trying: bool, hasty: bool) -> Generator[Move, str, list[str]]:
    """Values that two changes agree on, the most frequent first."""
    if not worth_trying:
        return []
    values = []
    for place, step in enumerate(STEPS):
        changed = [n + step * (i == place) for i, n in enumerate(numbers)]
        values.append((yield act("action", " ".join(f"{n:g}" for n in changed))))
        if hasty:
            return values
        if len(values) == 3 and len(set(values)) == 1:
            break
    return [value for value, times in Counter(values).most_common() if times > 1]


def _by_search(numbers: Sequence[float]) -> Generator[Move, str, None]:
    observed = []
    for probe in PROBES:
        answer = yield act("action", " ".join(f"{n:g}" for n in probe))
        observed.append((probe, float(answer)))
    for guess in _values_at(numbers, list(consistent(observed))):
        if SOLVED in (yield act("answer", repr(guess))):
            return


def _values_at(numbers: Sequence[float], rules: Sequence[Rule]) -> list[float]:
    """What ``rules`` give at ``numbers``, most frequent first, without repetition."""
    values: Counter[float] = Counter()
    for rule in rules:
        try:
            values[float(f"{at(rule, numbers):.9g}")] += 1
        except (ZeroDivisionError, OverflowError):
            continue
    return [found for found, _ in values.most_common()]


def consistent(observed: Sequence[tuple[Sequence[float], float]]) -> Iterator[Rule]:
    """The rules of the family that give all observed values to four decimals."""
    whole = parts()
    for operator in "+-*/":
        two = _matching(observed, operator)
        yield from ([operator, whole[i], whole[j]] for i, j in np.argwhere(two))
    for operator, outer, third in product("+-*/", "+-", thirds()):
        three = _matching(observed, operator, outer, third)
        yield from ([outer, [operator, whole[i], whole[j]], third] for i, j in np.argwhere(three))


def _matching(
    observed: Sequence[tuple[Sequence[float], float]], operator: str, outer: str = "+", third: Rule = 0
) -> Any:
    """For each L and R whether ``(L operator R) outer third`` gives everything observed."""
    fits = np.ones((len(parts()), len(parts())), dtype=bool)
    for vector, result in observed:
        last = at(third, vector)
        inner = result - last if outer == "+" else result + last
        fits &= np.abs(_grid(tuple(vector), operator) - inner) < 0.6e-4
        if not fits.any():
            break
    return fits


def _grid(vector: tuple[float, ...], operator: str) -> Any:
    """``L operator R`` for all L (rows) and R (columns)."""
    key = (vector, operator)
    if key not in _GRIDS:
        column = np.array([at(part, vector) for part in parts()])
        left, right = column[:, None], column[None, :]
        _GRIDS[key] = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[operator]
    return _GRIDS[key]


_GRIDS: dict[tuple[tuple[float, ...], str], Any] = {}
"""The probes are always the same, and so are their grids: 12 of 60 kB."""
assert all(len(probe) == len(VARIABLES) for probe in PROBES)
