"""Questions of one to four hops over a made-up world, dealt so that no answer is right for many.

``python -m environments.qa.own`` pins what is made now in ``manifest.json``; a silent change is an error.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from environments.kit.task_manifest import PinnedTasks
from environments.qa.world import RELATIONS, Entity, page_of, world, world_key
from mua.environment.protocol import Split, Task
from mua.types import Json

NAME = "qa"
SIZES: dict[Split, int] = {"train": 800, "validation": 128, "test": 128}
PRACTICE_QUESTIONS = 80
"""Over one practice world."""
MIX = (1, 2, 2, 2, 3, 3, 3, 4, 4, 4)
"""Hops of ten questions."""
_DIFFICULTY = {1: "easy", 2: "easy", 3: "medium", 4: "hard"}
_ASKS = {"person": "Who is {}?"}
"""How the end of a chain is asked for; other kinds are named."""


@lru_cache(maxsize=4)
def other_tasks(split: Split, practice: int, plain: bool) -> tuple[Task, ...]:
    """Those of a split over other worlds, which no manifest pins: with ``practice`` over so many practice worlds, 80
    over each, in place of the training split's; with ``plain`` names of common words."""
    if split != "train" or not practice:
        key = world_key(split, plain=plain)
        return tuple(_named(task, f"plain/{split}/{n}", key) for n, task in enumerate(_tasks(split, key, SIZES[split])))
    keys = {number: world_key(number, plain=plain) for number in range(practice)}
    return tuple(
        _named(task, f"{'plain/' if plain else ''}practice/{number}/{n}", key)
        for number, key in keys.items()
        for n, task in enumerate(_tasks(split, key, PRACTICE_QUESTIONS))
    )


def _named(task: Task, name: str, key: str) -> Task:
    return Task(f"{NAME}/{name}", NAME, task.split, task.data | {"world": key})


def _tasks(split: Split, key: str, count: int) -> Iterator[Task]:
    """``count`` questions over the world ``key``."""
    rng, seen, given = random.Random(f"qa questions/{key}"), set[str](), Counter[str]()
    entities = list(world(key).values())
    for number in range(count):
        hops = MIX[number % len(MIX)]
        ways: list[Json] = []
        while len(ways) < 3:
            data = _question(rng.choice(entities), key, hops, rng)
            if data is not None and data["question"] not in seen:
                ways.append(data)
        # Of three questions the one whose answer was given least often.
        chosen = min(ways, key=lambda data: given[data["reference"]])
        given[chosen["reference"]] += 1
        seen.add(chosen["question"])
        yield Task(f"{NAME}/{split}/{number}", NAME, split, chosen)


def _question(start: Entity, key: str, hops: int, rng: random.Random) -> Json | None:
    """A question of ``hops`` relations from ``start``; None where the walk comes back, ends early, or where the answer
    stands on a page before the last."""
    known, entity = world(key), start
    passed, chain = [start.name], list[str]()
    for hop in range(hops):
        last = hop == hops - 1
        relations = [name for name, of in RELATIONS[entity.kind].items() if last or of.target in RELATIONS]
        name = rng.choice(relations)
        relation, value = RELATIONS[entity.kind][name], entity.facts[name]
        chain.append(name)
        if value in passed:
            return None
        if last:
            before = [page_text(one, key) for one in passed[:-1]]
            if any(value in text for text in before):
                return None
            asked = question(start.name, chain, key)
            about: Json = {"kind": f"{hops} hops", "difficulty": _DIFFICULTY[hops], "question": asked}
            return about | {"reference": value, "start": start.name, "chain": chain, "form": relation.target}
        entity = known[value]
        passed.append(value)
    return None


def question(start: str, chain: Sequence[str], key: str) -> str:
    """What asks for the end of the relations ``chain`` from the entity ``start`` of the world ``key``."""
    known, named, entity = world(key), start, world(key)[start]
    for name in chain[:-1]:
        named, entity = RELATIONS[entity.kind][name].named.format(named), known[entity.facts[name]]
    last = RELATIONS[entity.kind][chain[-1]]
    asks = last.named.format(named)
    return asks if last.target not in RELATIONS else _ASKS.get(last.target, "Name {}.").format(asks)


@lru_cache(maxsize=2048)
def page_text(name: str, key: str) -> str:
    """The text about an entity of the world ``key``."""
    return page_of(world(key)[name], key).text


PINNED = PinnedTasks(
    Path(__file__).with_name("manifest.json"),
    lambda split: _tasks(split, split, SIZES[split]),
    "python -m environments.qa.own",
)


def own_tasks(split: Split) -> tuple[Task, ...]:
    """The questions of a split; MuaError where they differ from the pinned ones."""
    return PINNED.load(split)


if __name__ == "__main__":
    PINNED.pin()
