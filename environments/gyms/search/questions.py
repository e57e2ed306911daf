"""Questions of two and three hops over the world, dealt to splits.

A question names one entity and asks for the end of a chain of relations from it. No document about that entity holds
the answer, so that at least two searches, or one very lucky one, are needed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

from environments.gyms.search.documents import corpus
from environments.gyms.search.world import Entity, aliases, world
from mua.environment.protocol import Split, Task
from mua.types import Json

NAME = "gyms/search"
SIZES: dict[Split, dict[str, int]] = {
    "train": {},
    "validation": {"easy": 25, "medium": 25, "hard": 10},
    "test": {"easy": 80, "medium": 80, "hard": 20},
}
"""Questions by difficulty. Easy and medium ones take two hops, hard ones three; the gym is held out."""
_SEED = "search questions"

_PLAIN = {
    ("work", "author"): "the creator of the {sort} {x}",
    ("work", "first_shown"): "the town where the {sort} {x} was first shown",
    ("event", "winner"): "the winner of the {x}",
    ("event", "place"): "the town that the {x} was held in",
    ("event", "sponsor"): "the sponsor of the {x}",
    ("company", "founder"): "the founder of {x}",
    ("company", "seat"): "the town with the head office of {x}",
    ("school", "town"): "the town with the campus of the {x}",
    ("school", "rector"): "the rector of the {x}",
    ("person", "birthplace"): "the town that {x} was born in",
    ("person", "school"): "the university that {x} studied at",
    ("person", "employer"): "the company that {x} was employed by",
    ("town", "mayor"): "the mayor of {x}",
}
_OTHERWISE = {
    ("work", "author"): "whoever made {x}",
    ("work", "first_shown"): "the place of the premiere of {x}",
    ("event", "winner"): "the person who came first at the {x}",
    ("event", "place"): "the host of the {x}",
    ("event", "sponsor"): "the firm whose money made the {x} possible",
    ("company", "founder"): "the person who started {x}",
    ("company", "seat"): "the place from which {x} is run",
    ("school", "town"): "the place where one attends the {x}",
    ("school", "rector"): "the head of the {x}",
    ("person", "birthplace"): "the native town of {x}",
    ("person", "school"): "the alma mater of {x}",
    ("person", "employer"): "the firm that {x} worked for",
    ("town", "mayor"): "the person who governs {x}",
}
_ASKED = {
    # Nothing that has only a few values: three answers would often hit by guessing.
    ("person", "birthplace"): "In which town was {y} born?",
    ("person", "born"): "In which year was {y} born?",
    ("person", "school"): "Which university did {y} study at?",
    ("person", "employer"): "Which company was {y} employed by?",
    ("town", "river"): "Which river does {y} lie on?",
    ("town", "founded"): "In which year was {y} founded?",
    ("town", "mayor"): "Who is the mayor of {y}?",
    ("company", "founder"): "Who founded {y}?",
    ("company", "seat"): "In which town is the head office of {y}?",
    ("company", "founded"): "Since which year does {y} exist?",
    ("school", "town"): "In which town is the campus of {y}?",
    ("school", "founded"): "In which year was {y} founded?",
    ("school", "rector"): "Who is the rector of {y}?",
}


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
    while (data := _question(next(starts), difficulty, rng)) is None:
        pass
    return Task(f"{NAME}/{split}/{number}", NAME, split, data)


def _question(start: Entity, difficulty: str, rng: random.Random) -> Json | None:
    """A question from ``start``; None where the chain comes back to what was named, or the answer stands there."""
    chain: list[str] = []
    entity, named = start, [start.name]
    for _ in range(2 if difficulty == "hard" else 1):
        relation = rng.choice([one for kind, one in _PLAIN if kind == entity.kind])
        chain.append(relation)
        entity = world()[entity.facts[relation]]
        named.append(entity.name)
    chain.append(rng.choice([one for kind, one in _ASKED if kind == entity.kind]))
    answer = entity.facts[chain[-1]]
    if len(set(named)) < len(named) or any(_told(answer, name) for name in named[:-1]):
        return None
    question = _worded(start, chain, _OTHERWISE if difficulty == "medium" else _PLAIN)
    kind = "three_hops" if difficulty == "hard" else "two_hops"
    return {
        "kind": kind, "difficulty": difficulty, "question": question, "answer": answer, "aliases": aliases(answer),
        "start": start.name, "chain": chain,
    }  # fmt: skip


def _told(answer: str, name: str) -> bool:
    return answer.lower() in _texts()[name].lower()


@lru_cache(maxsize=1)
def _texts() -> dict[str, str]:
    return {document.title: document.text for document in corpus()}


def _worded(start: Entity, chain: Sequence[str], nouns: dict[tuple[str, str], str]) -> str:
    phrase, entity = start.name, start
    for relation in chain[:-1]:
        phrase = nouns[entity.kind, relation].format(x=phrase, sort=entity.sort)
        entity = world()[entity.facts[relation]]
    return _ASKED[entity.kind, chain[-1]].format(y=phrase)
