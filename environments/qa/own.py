"""Questions of one to four hops over a made-up world, dealt so that no answer is right for many.

``python -m environments.qa.own`` pins what is made now in ``manifest.json``; a silent change is an error.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from environments.qa.pages import page_of
from environments.qa.world import RELATIONS, SPLITS, Entity, world
from mua.environment.protocol import Split, Task
from mua.environment.task_manifest import check_manifest, pin_manifest, tasks_digest
from mua.types import Json

NAME = "qa"
SIZES: dict[Split, int] = {"train": 800, "validation": 128, "test": 128}
MIX = (1, 2, 2, 2, 3, 3, 3, 4, 4, 4)
"""Hops of ten questions."""
_DIFFICULTY = {1: "easy", 2: "easy", 3: "medium", 4: "hard"}
_MANIFEST = Path(__file__).with_name("manifest.json")
_COMMAND = "python -m environments.qa.own"
_ASKS = {"person": "Who is {}?"}
"""How the end of a chain is asked for; other kinds are named."""


@lru_cache(maxsize=len(SPLITS))
def own_tasks(split: Split) -> tuple[Task, ...]:
    """The questions of a split; :class:`mua.errors.MuaError` when they are not the pinned ones."""
    tasks = tuple(_tasks(split))
    check_manifest(_MANIFEST, {split: tasks_digest(tasks)}, _COMMAND)
    return tasks


def _tasks(split: Split) -> Iterator[Task]:
    rng, seen, given = random.Random(f"qa questions/{split}"), set[str](), Counter[str]()
    entities = list(world(split).values())
    for number in range(SIZES[split]):
        hops = MIX[number % len(MIX)]
        ways: list[Json] = []
        while len(ways) < 3:
            data = _question(rng.choice(entities), split, hops, rng)
            if data is not None and data["question"] not in seen:
                ways.append(data)
        # Of three questions the one whose answer was given least often.
        chosen = min(ways, key=lambda data: given[data["reference"]])
        given[chosen["reference"]] += 1
        seen.add(chosen["question"])
        yield Task(f"{NAME}/{split}/{number}", NAME, split, chosen)


def _question(start: Entity, split: Split, hops: int, rng: random.Random) -> Json | None:
    """A question of ``hops`` relations from ``start``; None where the walk comes back, ends early, or where the answer
    stands on a page before the last."""
    known, entity = world(split), start
    named, passed, chain = start.name, [start.name], []
    for hop in range(hops):
        last = hop == hops - 1
        relations = [name for name, of in RELATIONS[entity.kind].items() if last or of.target in RELATIONS]
        name = rng.choice(relations)
        relation, value = RELATIONS[entity.kind][name], entity.facts[name]
        chain.append(name)
        if value in passed:
            return None
        if last:
            before = [page_text(one, split) for one in passed[:-1]]
            if any(value in text for text in before):
                return None
            asks = relation.named.format(named) if relation.target not in RELATIONS else ""
            asked = asks or _ASKS.get(relation.target, "Name {}.").format(relation.named.format(named))
            about: Json = {"kind": f"{hops} hops", "difficulty": _DIFFICULTY[hops], "question": asked}
            return about | {"reference": value, "start": start.name, "chain": chain, "form": relation.target}
        named, entity = relation.named.format(named), known[value]
        passed.append(value)
    return None


@lru_cache(maxsize=2048)
def page_text(name: str, split: Split) -> str:
    """The text about an entity."""
    return page_of(world(split)[name], split).text


def pin() -> None:
    """Write the manifest of what is made now."""
    made = {split: tuple(_tasks(split)) for split in SPLITS}
    entries: dict[Split, Json] = {
        split: {"tasks": len(tasks), "sha256": tasks_digest(tasks)} for split, tasks in made.items()
    }
    pin_manifest(_MANIFEST, entries)


if __name__ == "__main__":
    pin()
