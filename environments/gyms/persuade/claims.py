"""Claims by seed: a position with its holder's own argument, where the holder lives, and what would change their mind.

Hidden from the policy are the holder's concerns: themes, each with a weight; the weights add up to the six steps from
strongly agree to strongly disagree. Splits share neither topics nor the themes that somebody cares about.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from typing import get_args

from environments.gyms.persuade.notes import SETTINGS
from environments.gyms.persuade.topics import Side, Topic, themes, topics
from mua.environment.protocol import Split, Task
from mua.types import Json

NAME = "gyms/persuade"
SIZES: dict[Split, int] = {"train": 378, "validation": 42, "test": 42}
_TOPICS: dict[Split, int] = {"train": 32, "validation": 4, "test": 4}
LEVELS = 6
WEIGHTS: Mapping[str, Sequence[Sequence[int]]] = {
    "easy": ((3, 3), (4, 2)),
    "medium": ((2, 2, 2), (3, 2, 1)),
    "hard": ((2, 2, 1, 1), (3, 1, 1, 1)),
}
"""Weights of the concerns by difficulty; the more concerns, the longer the way."""


def generate(split: Split) -> Iterator[Task]:
    """The claims of a split."""
    for number, data in enumerate(_dealt()[split]):
        yield Task(f"{NAME}/{split}/{number}", NAME, split, data)


@lru_cache(maxsize=1)
def _dealt() -> dict[Split, list[Json]]:
    rng = random.Random("persuade claims")
    names = list(topics())
    rng.shuffle(names)
    dealt: dict[Split, list[Json]] = {}
    for split, size in SIZES.items():
        chosen, names = names[: _TOPICS[split]], names[_TOPICS[split] :]
        found = [(topics()[name], side, own) for name in chosen for side in get_args(Side) for own in _PAIRS]
        rng.shuffle(found)
        dealt[split] = [_claim(rng, split, *one, list(WEIGHTS)[number % 3]) for number, one in enumerate(found[:size])]
    return dealt


_PAIRS = tuple(combinations(range(4), 2))


def _claim(rng: random.Random, split: Split, topic: Topic, side: Side, own: tuple[int, int], difficulty: str) -> Json:
    weights = rng.choice(WEIGHTS[difficulty])
    cared_for = [name for name, theme in themes().items() if theme.split == split]
    concerns = [
        {"theme": name, "weight": weight}
        for name, weight in zip(rng.sample(cared_for, len(weights)), weights, strict=True)
    ]
    return {
        "kind": topic.name, "difficulty": difficulty, "side": side, "claim": topic.positions[side],
        "argument": " ".join(topic.reasons[side][reason] for reason in own), "setting": rng.choice(SETTINGS),
        "concerns": concerns,
    }  # fmt: skip
