"""UserRL's rules: +, -, *, / and powers over a, b, c and d, each of which stands there once, and squares of such.

The expert tries a few points and looks in the family for the rules that give what it saw there. It knows of the task
what the game tells.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import combinations
from typing import Any, TypeAlias

import numpy as np

from environments.gyms._shared import act
from environments.gyms._shared.records import FunctionRecord, Rule, rule_at
from environments.gyms.function.rules import LARGEST, VARIABLES
from mua.environment.protocol import Move, Task
from mua.types import Json

PROBES = ((2, 3, 5, 4), (3, 5, 2, 7), (5, 4, 7, 2), (7, 2, 3, 5), (4, 7, 1, 3), (11, 13, 2, 17))
"""Small ones first: powers of powers have no value far out."""
CLOSE = 1e-6
"""Within this share of the value, or this near to it, an answer is right; as in UserRL."""
SHOWN = 4
"""Decimals of a value that is told."""
MOST_SQUARES = 2
MOST_GUESSES = 3
LEAST_NUMBERS = 3
"""Probes at which a rule of the family gives a number."""
_NUMBER = re.compile(r"-?[\d.]+(?:e[-+]?\d+)?")
_WORDS = {0: "easy", 1: "medium"}
_FAMILY_CLOSE = 1e-9
"""Within this share a rule of the family gives what was seen."""
_DIGITS = 9
"""Digits to which two rules that agree at all probes are one."""

Family: TypeAlias = tuple[Any, list[Rule], list[int]]
"""Values (rules, probes), the rules, and how many squares each has."""


def data_of(record: FunctionRecord) -> Json:
    """``data`` of a task; harder the more squares there are."""
    squares = str(record.rule).count("'**'")
    level = _WORDS.get(squares, "hard")
    data = {"kind": f"{squares}_squares", "difficulty": level, "rule": record.rule, "test": list(record.test_case)}
    return {**data, "expected": record.expected_result}


def rule_value(rule: Rule, numbers: Sequence[int]) -> str:
    """What the rule gives, to :data:`SHOWN` decimals; ValueError where it gives nothing."""
    value = round(rule_at(rule, dict(zip(VARIABLES, map(float, numbers), strict=True))), SHOWN)
    return str(int(value)) if value == int(value) else repr(value)


def is_value(number: float, expected: float) -> bool:
    """Whether ``number`` is the value."""
    return math.isclose(number, expected, rel_tol=CLOSE, abs_tol=CLOSE)


def record_moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it answers what the first point gave, without looking further."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    test = [int(n) for n in re.findall(r"-?\d+", (yield act("search", "test")))]
    seen: dict[int, float] = {}
    for place, probe in enumerate(PROBES):
        if list(probe) == test:
            continue
        said = yield act("action", " ".join(map(str, probe)))
        seen[place] = float(said) if _NUMBER.fullmatch(said) else math.nan
        if len(seen) == 1 and rng.random() < loose and "Correct" in (yield act("answer", said)):
            return
    for guess in _guesses(_fitting(seen), test)[:MOST_GUESSES]:
        if "Correct" in (yield act("answer", guess)):
            return
    yield act("finish")


def _guesses(rules: Sequence[Rule], test: Sequence[int]) -> list[str]:
    """What ``rules`` give at the test numbers, without repetition."""
    found = []
    for rule in rules:
        with suppress(ValueError):
            found.append(repr(rule_at(rule, dict(zip(VARIABLES, map(float, test), strict=True)))))
    return list(dict.fromkeys(found))


def _fitting(seen: Mapping[int, float]) -> list[Rule]:
    """The rules of the family that give what was ``seen`` at the probes of these numbers, as far as it is told."""
    values, rules, _ = family()
    near = np.isclose(
        values[:, list(seen)], list(seen.values()), rtol=_FAMILY_CLOSE, atol=2 * 10.0**-SHOWN, equal_nan=True
    ).all(axis=1)
    return [rules[row] for row in np.flatnonzero(near)]


@lru_cache(maxsize=1)
def family() -> Family:
    """Every rule over all four letters with at most :data:`MOST_SQUARES` squares, none twice."""
    return _over(frozenset(VARIABLES))


@lru_cache(maxsize=16)
def _over(letters: frozenset[str]) -> Family:
    if len(letters) == 1:
        (letter,) = letters
        return _distinct([_with_squares(_column(letter), [letter], [0])])
    halves = [
        frozenset(some)
        for size in range(1, len(letters))
        for some in combinations(sorted(letters), size)
        if size * 2 < len(letters) or (size * 2 == len(letters) and min(letters) in some)
    ]
    return _distinct([_with_squares(*_joined(_over(half), _over(letters - half))) for half in halves])


def _column(letter: str) -> Any:
    place = VARIABLES.index(letter)
    return np.array([[float(probe[place]) for probe in PROBES]])


def _joined(left: Family, right: Family) -> Family:
    """The two sides under every operator, in both orders where that matters."""
    rows = [(i, j) for i, p in enumerate(left[2]) for j, q in enumerate(right[2]) if p + q <= MOST_SQUARES]
    one, other = (side[0][[row[place] for row in rows]] for place, side in enumerate((left, right)))
    with np.errstate(all="ignore"):
        ordered = [one - other, other - one, one / other, other / one, one**other, other**one]
        values = np.concatenate([one + other, one * other, *ordered])
    signs = (("+", 1), ("*", 1), ("-", 1), ("-", -1), ("/", 1), ("/", -1), ("**", 1), ("**", -1))
    rules = [_rule(sign, left[1][i], right[1][j], way) for sign, way in signs for i, j in rows]
    return values, rules, [left[2][i] + right[2][j] for _ in signs for i, j in rows]


def _rule(sign: str, left: Rule, right: Rule, way: int) -> Rule:
    return [sign, left, right] if way > 0 else [sign, right, left]


def _with_squares(values: Any, rules: list[Rule], squares: list[int]) -> Family:
    """The same, and each one squared where that is not too much."""
    more = [row for row, count in enumerate(squares) if count < MOST_SQUARES]
    with np.errstate(all="ignore"):
        both = np.concatenate([values, values[more] ** 2])
    return both, [*rules, *(["**", rules[row], 2] for row in more)], [*squares, *(squares[row] + 1 for row in more)]


def _distinct(families: Sequence[Family]) -> Family:
    """All of them, the first of those that agree at every probe; no number is nan."""
    values = np.concatenate([one[0] for one in families])
    values[~np.isfinite(values)] = math.nan
    rules = [rule for one in families for rule in one[1]]
    squares = [count for one in families for count in one[2]]
    kept = list(_first_of_each(values, squares))
    return values[kept], [rules[row] for row in kept], [squares[row] for row in kept]


def _first_of_each(values: Any, squares: Sequence[int]) -> Iterator[int]:
    known = np.isfinite(values).sum(axis=1) >= LEAST_NUMBERS
    seen: set[bytes] = set()
    mantissas, exponents = np.frexp(values)
    marks = np.concatenate([np.round(mantissas, _DIGITS) + 0.0, exponents], axis=1)  # + 0.0: no negative zero
    for row in np.argsort(np.asarray(squares), kind="stable"):
        mark = marks[row].tobytes()
        if known[row] and mark not in seen:
            seen.add(mark)
            yield int(row)


assert all(max(probe) <= LARGEST for probe in PROBES)
