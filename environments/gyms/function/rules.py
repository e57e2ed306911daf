"""Hidden rules over four whole numbers: their shapes, their evaluation, and the tasks made of them.

A rule is an expression tree, ``"a"``, ``3`` or ``[operator, left, right]``; nothing is ever evaluated as code. It is a
shape of :data:`SHAPES` with variables for x, y, z, w, small constants for k and n, and a prime for m. Every rule takes
a remainder, so that no value tells of its neighbours', and what fits all values near zero is wrong further out. No
shape stands in two splits. Rules are told apart by their values, so that none stands in two tasks under two spellings.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal, TypeAlias, Union

import numpy as np

from environments.gyms._shared import dealt
from mua.environment.protocol import Split, Task

Rule: TypeAlias = Union[str, int, "Sequence[Rule]"]
Level = Literal["easy", "medium", "hard"]

VARIABLES = ("a", "b", "c", "d")
SIZES: dict[Split, int] = {"train": 460, "validation": 60, "test": 78}
LEVELS: tuple[Level, ...] = ("easy", "medium", "hard")
LARGEST = 50
"""Numbers from 0 to this may be tried."""
TESTED = (60, 99)
"""Test numbers lie here: what the rule gives for them has to be worked out."""
SMALL = range(3, 10)
PRIMES = (41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
"""Divisors: so large that a guess hardly hits a remainder, so small that every rule passes them within LARGEST."""
SHAPES: Mapping[Split, Mapping[Level, Sequence[str]]] = {
    "train": {
        "easy": ("(k*x + y) % m", "(k*x) % m + y", "(k*x) % m + n*y", "(x*x) % m + y", "(x*x + y) % m"),
        "medium": ("(k*x + n*y) % m + z", "(x*y + z) % m", "(k*x + y + z) % m - w", "(k*x + y) % m + z + w"),
        "hard": ("k*((x*y) % m) + z*w", "z*((x*x + k*y) % m)", "(x*x + y*z) % m + w", "(x*y + k*z) % m - n*w"),
    },
    "validation": {
        "easy": ("k*((n*x + y) % m)", "(k*x*y) % m"),
        "medium": ("(k*x) % m + n*y - z", "z - (k*x + y) % m"),
        "hard": ("(x*y*z) % m + w", "(x*x*y) % m + k*z"),
    },
    "test": {
        "easy": ("(k*x - y) % m - x", "k*((x - n*y) % m) + y", "y - (x*y) % m", "(k*x - n*y) % m + x"),
        "medium": ("(k*max(x, y) + z) % m + w", "n*((k*x - y) % m) + z", "y*z - (k*x - w) % m", "(k*(x - y) + z) % m"),
        "hard": ("z*((x*y - w) % m)", "(x*x*x + y) % m * k - z", "x*y - (k*z*w) % m", "((k*x + y)*z) % m + n*w"),
    },
}  # fmt: skip
_OPERATORS: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "%": operator.mod, "max": np.maximum,
}  # fmt: skip
_READ: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Mod: "%"}
_POINTS = ((13, 37, 29, 41), (47, 19, 31, 7), (23, 43, 11, 50), (75, 62, 91, 84))


def value(rule: Rule, numbers: Mapping[str, Any]) -> Any:
    """What ``rule`` gives for whole numbers, or for arrays of them."""
    if isinstance(rule, str):
        return numbers[rule]
    if isinstance(rule, int):
        return rule
    sign, left, right = rule
    assert sign in _OPERATORS, f"unknown operator {sign!r}"
    return _OPERATORS[str(sign)](value(left, numbers), value(right, numbers))


def at(rule: Rule, vector: Sequence[int]) -> int:
    """``rule`` at a, b, c, d in this order."""
    return int(value(rule, dict(zip(VARIABLES, vector, strict=True))))


def text(rule: Rule) -> str:
    """``rule`` as a person writes it."""
    if isinstance(rule, str | int):
        return str(rule)
    if rule[0] == "max":
        return f"max({text(rule[1])}, {text(rule[2])})"
    return f"({text(rule[1])} {rule[0]} {text(rule[2])})"


def leaves(rule: Rule) -> frozenset[str]:
    """The names that stand in ``rule``."""
    if isinstance(rule, str):
        return frozenset({rule})
    return frozenset() if isinstance(rule, int) else leaves(rule[1]) | leaves(rule[2])


def operators(rule: Rule) -> frozenset[str]:
    """The operators in ``rule``."""
    return frozenset() if isinstance(rule, str | int) else operators(rule[1]) | operators(rule[2]) | {str(rule[0])}


@lru_cache(maxsize=64)
def shape(written: str) -> Rule:
    """The tree of a shape; it is read, never evaluated."""
    return _read(ast.parse(written, mode="eval").body)


def _read(node: ast.expr) -> Rule:
    if isinstance(node, ast.BinOp):
        return [_READ[type(node.op)], _read(node.left), _read(node.right)]
    if isinstance(node, ast.Call):
        return ["max", *map(_read, node.args)]
    assert isinstance(node, ast.Name), ast.dump(node)
    return node.id


def filled(rule: Rule, slots: Mapping[str, Rule]) -> Rule:
    """``rule`` with what ``slots`` says in the place of its names."""
    if isinstance(rule, str):
        return slots[rule]
    return rule if isinstance(rule, int) else [rule[0], filled(rule[1], slots), filled(rule[2], slots)]


def fingerprint(rule: Rule) -> tuple[int, ...]:
    """Equal for rules that are the same function."""
    return tuple(at(rule, point) for point in _POINTS)


def _whole(rule: Rule) -> Rule:
    """``rule`` without taking remainders."""
    if isinstance(rule, str | int):
        return rule
    return _whole(rule[1]) if rule[0] == "%" else [rule[0], _whole(rule[1]), _whole(rule[2])]


def plain_values(numbers: Sequence[int]) -> set[int]:
    """What somebody might say who knows the test numbers alone."""
    pairs = [(one, other) for one, other in combinations(numbers, 2)]
    return {*numbers, sum(numbers), *(v for p, q in pairs for v in (p + q, p - q, q - p, p * q))}


def _test_numbers(rule: Rule, rng: random.Random) -> list[int]:
    """Numbers for which the remainder matters and that do not show the value."""
    while True:
        numbers = [rng.randint(*TESTED) for _ in VARIABLES]
        result = at(rule, numbers)
        if len(set(numbers)) > 2 and result != at(_whole(rule), numbers) and result not in plain_values(numbers):
            return numbers


def _rule(written: str, rng: random.Random) -> Rule:
    places = dict(zip("xyzw", rng.sample(VARIABLES, 4), strict=True))
    return filled(shape(written), {**places, "k": rng.choice(SMALL), "n": rng.choice(SMALL), "m": rng.choice(PRIMES)})


@lru_cache(maxsize=1)
def _splits() -> dict[Split, list[tuple[Level, str, Rule, list[int]]]]:
    """As many rules as all splits need, no two the same function; levels and shapes in turn."""
    rng, seen = random.Random("function/rules"), set[tuple[int, ...]]()
    made: dict[Split, list[tuple[Level, str, Rule, list[int]]]] = {split: [] for split in SIZES}
    for split, size in SIZES.items():
        while len(made[split]) < size:
            turn, place = divmod(len(made[split]), len(LEVELS))
            level = LEVELS[place]
            written = SHAPES[split][level][turn % len(SHAPES[split][level])]
            rule = _rule(written, rng)
            if (mark := fingerprint(rule)) not in seen:
                seen.add(mark)
                made[split].append((level, written, rule, _test_numbers(rule, rng)))
    return {split: dealt(rules, {split: SIZES[split]}, f"function/{split}")[split] for split, rules in made.items()}


def generate_tasks(split: Split) -> Iterator[Task]:
    """The tasks of a split."""
    for number, (level, written, rule, numbers) in enumerate(_splits()[split]):
        data = {"kind": written, "difficulty": level, "rule": rule, "test": numbers}
        yield Task(f"gyms/function/{split}/{number:03d}", "gyms/function", split, data)
