"""Conversations of the scripted agent with the scripted customer, as data for supervised training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice

from environments.help_desk import DOMAIN
from environments.help_desk.tasks import FIRST_SEED, MIXTURE, generate
from environments.kit.demonstrate import demonstrate
from mua.environment.protocol import Task
from mua.types import Json

_FIRST_SEED = FIRST_SEED["train"] + 100_000
"""Demonstrations use shops of their own, which no split contains."""
_POOL = 400
"""Tasks of a kind that conversations of each rule are chosen from."""


def demonstrations(count: int, seed: int, system: str, personas: Sequence[str] = ()) -> Iterator[list[Json]]:
    """``count`` conversations in OpenAI form, in the mixture of the splits; the same for the same arguments.

    ``personas`` chooses the customers, as ``user.personas`` does in a run.
    """
    for index in range(count):
        yield _conversation(_task(MIXTURE[index % len(MIXTURE)], seed, index), index, system, personas)


def of_each_rule(
    counts: Mapping[str, int], seed: int, system: str, personas: Sequence[str] = ()
) -> Iterator[list[Json]]:
    """``counts`` of each kind of task, and of each kind as many for every wish and status that it has.

    Few conversations drawn like the splits leave most rules of the shop unsaid, which no reward can make up for: what a
    policy never does is never rewarded.
    """
    for kind, count in counts.items():
        found = dict[tuple[str, str], list[int]]()
        for index in range(_POOL):
            found.setdefault(_rule(_task(kind, seed, index)), []).append(index)
        rules = cycle([iter(found[rule]) for rule in sorted(found)])
        for index in (next(rule) for rule in islice(rules, count)):
            yield _conversation(_task(kind, seed, index), index, system, personas)


def _task(kind: str, seed: int, index: int) -> Task:
    return generate("train", _FIRST_SEED + seed * 1_000_000 + index, kind)


def _rule(task: Task) -> tuple[str, str]:
    """What is wanted of an order, and its status."""
    number = task.data["known"]["order"]
    return task.data["wish"], next(row[2] for row in task.data["world"]["orders"] if row[0] == number)


def _conversation(task: Task, index: int, system: str, personas: Sequence[str]) -> list[Json]:
    shown = asyncio.run(demonstrate(DOMAIN, task, index, personas=personas))
    return [{"role": "system", "content": system}, *shown.messages]
