"""Questions of two to four hops over the world, dealt to splits.

A question names one entity and asks for the end of a chain of relations from it. No document on the way but the last
holds the answer. The splits follow different relations.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from environments.gyms.search.documents import corpus
from environments.gyms.search.relations import Relation, relations
from environments.gyms.search.world import Entity, aliases, world
from mua.environment.protocol import Split, Task
from mua.types import Json

NAME = "gyms/search"
SIZES: dict[Split, dict[str, int]] = {
    "train": {},
    "validation": {"easy": 25, "medium": 25, "hard": 10},
    "test": {"easy": 80, "medium": 80, "hard": 20},
}
"""Questions by difficulty; the gym is held out."""
HOPS = {"easy": 2, "medium": 3, "hard": 4}
_SEED = "search questions"


def generate(split: Split) -> Iterator[Task]:
    """The questions of a split."""
    return iter(_questions().get(split, ()))


@lru_cache(maxsize=1)
def _questions() -> dict[Split, list[Task]]:
    """All splits at once: no question, and no first entity, occurs twice."""
    rng = random.Random(_SEED)
    starts = [entity for entity in world().values() if entity.kind in ("work", "event", "company", "school")]
    rng.shuffle(starts)
    left = iter(starts)
    found: dict[Split, list[Task]] = {}
    for split, sizes in SIZES.items():
        wanted = [difficulty for difficulty, count in sizes.items() for _ in range(count)]
        found[split] = [_task(split, number, difficulty, left, rng) for number, difficulty in enumerate(wanted)]
    return found


def _task(split: Split, number: int, difficulty: str, starts: Iterator[Entity], rng: random.Random) -> Task:
    while (data := _question(next(starts), split, difficulty, rng)) is None:
        pass
    return Task(f"{NAME}/{split}/{number}", NAME, split, data)


def _question(start: Entity, split: Split, difficulty: str, rng: random.Random) -> Json | None:
    """A question from ``start``; None where the chain comes back to what was named, or the answer stands there."""
    chain: list[Relation] = []
    entity, named = start, [start.name]
    for _ in range(HOPS[difficulty] - 1):
        chain.append(rng.choice([one for one in _asked(entity, split) if one.target != "year"]))
        entity = world()[entity.facts[chain[-1].name]]
        named.append(entity.name)
    chain.append(rng.choice(_asked(entity, split)))
    answer = entity.facts[chain[-1].name]
    if len({*named, answer}) <= len(named) or any(_told(answer, name) for name in named[:-1]):
        return None
    return {
        "kind": f"{len(chain)}_hops", "difficulty": difficulty, "question": _worded(start, chain), "answer": answer,
        "aliases": aliases(answer), "start": start.name, "chain": [relation.name for relation in chain],
    }  # fmt: skip


def _asked(entity: Entity, split: Split) -> list[Relation]:
    return [relation for relation in relations()[entity.kind].values() if relation.split == split]


def _told(answer: str, name: str) -> bool:
    return answer.lower() in _texts()[name].lower()


@lru_cache(maxsize=1)
def _texts() -> dict[str, str]:
    return {document.title: document.text for document in corpus()}


def _worded(start: Entity, chain: Sequence[Relation]) -> str:
    phrase = start.name
    for relation in chain[:-1]:
        phrase = relation.noun.format(x=phrase, sort=start.sort)
    return chain[-1].question.format(x=phrase)
