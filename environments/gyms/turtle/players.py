"""Policies that find nothing out: they recite training stories, guess, list words, or ask what they always ask."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import batched
from typing import TypeAlias

from environments.gyms._shared import act
from environments.gyms._shared.oracles import NEGATED
from environments.gyms.turtle.stories import schemas, story_of
from environments.kit.canned import Glance, Player, end_at_once
from mua.environment.protocol import Move, Task
from mua.types import Json

# An agent that knows the schemas: it recognises the story, asks about every point of it, and then tells it.

ASK = ("Does it have to do with {}?", "Is the reason to be found in {}?", "Did {} play a part?")


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it tries an incomplete explanation first, or leaves the general questions out."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    schema = schemas()[task.data["kind"]]
    if rng.random() >= loose:
        yield from asking(schema, task.data["shown"])
    values: dict[str, str] = dict(task.data["shown"])
    if rng.random() < loose:
        yield act("answer", schema["criteria"][0][1].format(**values | dict.fromkeys(schema["hidden"], "something")))
    for slot, candidates in schema["hidden"].items():
        values[slot] = yield from _find(candidates, rng)
    yield act("answer", " ".join(statement.format(**values) for _, statement, _ in schema["criteria"]))


def asking(schema: Json, shown: Mapping[str, str]) -> Iterator[Move]:
    """A question about each point that has no hidden slot, by the first word of each of its groups of keywords."""
    for _, _, keys in schema["criteria"]:
        if any(f"{{{slot}}}" in keys for slot in schema["hidden"]):
            continue
        words = [next(w for w in group.strip().split("|") if not NEGATED.search(w)) for group in keys.split("&")]
        yield act("action", ASK[0].format(" and ".join(words).replace("*", "").format(**shown)))


def _find(candidates: list[str], rng: random.Random) -> Generator[Move, str, str]:
    """The value that the other side says Yes to."""
    names = [value.split("|")[0] for value in candidates]
    rng.shuffle(names)
    for name in names:
        if (yield act("action", rng.choice(ASK).format(name))).startswith("Yes"):
            return name
    return names[-1]


Play: TypeAlias = Generator[Move, str, None]
QUESTIONS, ANSWERS, WORDS = 20, 5, 60
_WORD = re.compile(r"[a-z][a-z'-]{3,}")


def _answers(texts: Sequence[str]) -> Play:
    for text in texts[:ANSWERS]:
        yield act("answer", " ".join(text.split()[:WORDS]))


def _asking(ideas: Callable[[Glance], Sequence[str]]) -> Player:
    """Asks about each idea, and answers with those that got a Yes, each in a sentence and all in one."""

    def play(glance: Glance) -> Play:
        found = []
        for idea in ideas(glance)[:QUESTIONS]:
            if (yield act("action", f"Does it have to do with {idea}?")).startswith("Yes"):
                found.append(idea)
        told = [f"It has to do with {idea}." for idea in found]
        yield from _answers([" ".join(told), f"It is about {' and '.join(found)}.", *told])

    return play


# What can be learned by heart.


def _nearest(glance: Glance) -> list[Task]:
    """Training tasks of the schemas whose stories share most words with this one, one of each."""
    here = set(_WORD.findall(glance.opening.lower()))
    by_schema = {task.data["kind"]: task for task in glance.training}
    return sorted(by_schema.values(), key=lambda task: -len(here & set(_WORD.findall(task.data["surface"].lower()))))


def _asks_and_recites(glance: Glance) -> Play:
    """Of training tasks of the nearest schema, then of the nearest ones of others."""
    nearest = _nearest(glance)
    for task in nearest[:4]:
        for point in story_of(task).criteria:
            yield act("action", f"Is it true that {point.statement.rstrip('.').lower()}?")
    alike = [task for task in glance.training if task.data["kind"] == nearest[0].data["kind"]][: ANSWERS - 2]
    told = [*alike, *nearest[1:3]]
    yield from _answers([" ".join(point.statement for point in story_of(task).criteria) for task in told])


def _frequent(training: Sequence[Task]) -> list[str]:
    """Keywords of training points, those first that stand in most schemas."""
    return _keywords(tuple(sorted({task.data["kind"] for task in training})))


@lru_cache(maxsize=4)
def _keywords(names: Sequence[str]) -> list[str]:
    found: Counter[str] = Counter()
    for name in names:
        keys = " ".join([*(keys for _, _, keys in schemas()[name]["criteria"]), *schemas()[name]["facts"]])
        found.update(sorted(set(re.findall(r"[a-z]{3,}", re.sub(r"\{\w+\}", "", keys)))))
    return [word for word, _ in found.most_common()]


def _values(glance: Glance) -> list[str]:
    """Values of hidden slots, drawn from all training stories."""
    named = {value.split("|")[0] for task in glance.training for value in task.data["hidden"].values()}
    return glance.rng.sample(sorted(named), min(len(named), QUESTIONS))


def _packed(glance: Glance) -> list[str]:
    """Ten words a question."""
    return [" ".join(words) for words in batched(_frequent(glance.training), 10)]


PLAYERS: Mapping[str, Player] = {
    "ends at once": end_at_once,
    "the nearest training story, asked first": _asks_and_recites,
    "training words, asked one by one": _asking(lambda glance: _frequent(glance.training)),
    "values of training stories, asked one by one": _asking(_values),
    "salads as questions": _asking(_packed),
}
"""Policies that deserve nothing, by name."""
