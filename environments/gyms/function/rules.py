"""Hidden rules over four numbers: the family they come from, their evaluation, and the tasks made of them.

A rule is an expression tree, ``"a"``, ``3`` or ``[operator, left, right]``; nothing is ever evaluated as code. The
family is ``L op R`` or ``(L op R) ± M`` with parts of one or two variables. Rules are told apart by their values at
fixed points, so that no rule stands in two tasks under two spellings.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias, Union

from environments.gyms._shared import dealt
from mua.environment.protocol import Split, Task

Rule: TypeAlias = Union[str, int, "Sequence[Rule]"]
Level = Literal["easy", "medium", "hard"]

VARIABLES = ("a", "b", "c", "d")
SIZES: dict[Split, int] = {"train": 460, "validation": 60, "test": 78}
LEVELS: tuple[Level, ...] = ("easy", "medium", "hard")
LARGEST: dict[Level, int] = {"easy": 200, "medium": 10_000, "hard": 1_000_000}
"""Bound of the value at the test numbers."""
TEST_RANGE: dict[Level, tuple[int, int]] = {"easy": (1, 9), "medium": (2, 12), "hard": (2, 12)}
_POINTS = ((2.3, 3.7, 5.9, 7.1), (-1.7, 4.3, 2.9, -3.1), (8.3, 1.9, -6.7, 0.7))


def value(rule: Rule, numbers: Mapping[str, float]) -> float:
    """What ``rule`` gives; raises ZeroDivisionError or OverflowError where it gives nothing."""
    if isinstance(rule, str):
        return float(numbers[rule])
    if isinstance(rule, int):
        return float(rule)
    operator, left, right = rule
    one, other = value(left, numbers), value(right, numbers)
    if operator == "+":
        return one + other
    if operator == "-":
        return one - other
    if operator == "*":
        return one * other
    if operator == "/":
        return one / other
    assert operator == "**", f"unknown operator {operator!r}"
    return math.pow(one, other)


def at(rule: Rule, vector: Sequence[float]) -> float:
    """``rule`` at a, b, c, d in this order."""
    return value(rule, dict(zip(VARIABLES, vector, strict=True)))


def text(rule: Rule) -> str:
    """``rule`` as a person writes it."""
    if isinstance(rule, str | int):
        return str(rule)
    operator, left, right = rule
    return f"({text(left)} {operator} {text(right)})"


def variables(rule: Rule) -> frozenset[str]:
    """The variables that stand in ``rule``."""
    if isinstance(rule, str):
        return frozenset({rule}) & frozenset(VARIABLES)
    if isinstance(rule, int):
        return frozenset()
    return variables(rule[1]) | variables(rule[2])


@lru_cache(maxsize=1)
def parts() -> tuple[Rule, ...]:
    """What L and R may be."""
    singles: list[Rule] = list(VARIABLES)
    scaled: list[Rule] = [["*", k, v] for v in VARIABLES for k in range(2, 6)]
    shifted: list[Rule] = [["+", v, k] for v in VARIABLES for k in range(1, 6)]
    powers: list[Rule] = [["**", v, k] for v in VARIABLES for k in (2, 3)]
    ordered = [(v, w) for v in VARIABLES for w in VARIABLES if v != w]
    pairs: list[Rule] = [[o, v, w] for v, w in ordered for o in "+*" if v < w]
    directed: list[Rule] = [[o, v, w] for v, w in ordered for o in "-/"]
    return (*singles, *scaled, *shifted, *powers, *pairs, *directed)


def thirds() -> list[Rule]:
    """What M may be."""
    return [*VARIABLES, *range(1, 10)]


def fingerprint(rule: Rule) -> tuple[str, ...] | None:
    """Equal for rules that are the same function; None for rules that are constant or undefined somewhere usual."""
    try:
        values = [at(rule, point) for point in _POINTS]
    except (ZeroDivisionError, OverflowError):
        return None
    if max(values) - min(values) < 1e-3:
        return None
    return tuple(f"{v:.8g}" for v in values)


def _easy(rng: random.Random) -> Rule:
    """At most two variables, whole values."""
    plain = [part for part in parts() if "/" not in text(part) and "**" not in text(part)]
    while True:
        rule: Rule = [rng.choice("+-*"), rng.choice(plain), rng.choice([*plain, *range(1, 6)])]
        if len(variables(rule)) <= 2:
            return rule


def _medium(rng: random.Random) -> Rule:
    """At least three variables, neither division nor powers."""
    plain = [part for part in parts() if "/" not in text(part) and "**" not in text(part)]
    while True:
        rule: Rule = [rng.choice("+-*"), rng.choice(plain), rng.choice(plain)]
        if len(variables(rule)) >= 3:
            return rule


def _hard(rng: random.Random) -> Rule:
    """Division or powers, often with a third part."""
    while True:
        rule: Rule = [rng.choice("+-*/"), rng.choice(parts()), rng.choice(parts())]
        if rng.random() < 0.6:
            rule = [rng.choice("+-"), rule, rng.choice(thirds())]
        if len(variables(rule)) >= 2 and ("/" in text(rule) or "**" in text(rule)):
            return rule


_MAKE = {"easy": _easy, "medium": _medium, "hard": _hard}


def _test_numbers(rule: Rule, level: Level, rng: random.Random) -> list[int] | None:
    """Whole numbers at which ``rule`` has a value that is neither tiny nor huge; None if they are hard to find."""
    low, high = TEST_RANGE[level]
    for _ in range(50):
        vector = [rng.randint(low, high) for _ in VARIABLES]
        try:
            result = at(rule, vector)
        except (ZeroDivisionError, OverflowError):
            continue
        if len(set(vector)) > 2 and 0.05 <= abs(result) <= LARGEST[level]:
            return vector
    return None


def _all_rules() -> Iterator[tuple[Level, Rule, list[int]]]:
    """As many rules as all splits need, no two the same function; levels in turn."""
    rng = random.Random("function/rules")
    seen: set[tuple[str, ...]] = set()
    made = 0
    while made < sum(SIZES.values()):
        level = LEVELS[made % len(LEVELS)]
        rule = _MAKE[level](rng)
        mark = fingerprint(rule)
        numbers = _test_numbers(rule, level, rng)
        if mark is None or mark in seen or numbers is None:
            continue
        seen.add(mark)
        made += 1
        yield level, rule, numbers


@lru_cache(maxsize=1)
def _splits() -> dict[Split, list[tuple[Level, Rule, list[int]]]]:
    return dealt(_all_rules(), SIZES, "function/splits")


def generate(split: Split) -> Iterator[Task]:
    """The tasks of a split."""
    for number, (level, rule, numbers) in enumerate(_splits()[split]):
        kind = "".join(sorted(operators(rule)))
        data = {"kind": kind, "difficulty": level, "rule": rule, "test": numbers}
        yield Task(f"gyms/function/{split}/{number:03d}", "gyms/function", split, data)


def operators(rule: Rule) -> frozenset[str]:
    """The operators in ``rule``, powers as ^."""
    if isinstance(rule, str | int):
        return frozenset()
    own = "^" if rule[0] == "**" else str(rule[0])
    return operators(rule[1]) | operators(rule[2]) | {own}
