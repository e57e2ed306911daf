"""An agent that knows the schemas: it recognises the story, asks for what varies, and then tells it."""

from __future__ import annotations

import random
from collections.abc import Generator

from environments.gyms._shared import act
from environments.gyms.turtle.stories import schemas
from mua.environment.protocol import Move, Task
from mua.types import Json

ASK = ("Does it have to do with {}?", "Is the reason to be found in {}?", "Did {} play a part?")
WARM_UP = 2
"""Questions about the story itself, asked before those about what varies."""


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it tries an incomplete explanation first, or leaves questions out."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    schema = schemas()[task.data["kind"]]
    if rng.random() >= loose:
        yield from _warm_up(schema, rng)
    values: dict[str, str] = dict(task.data["shown"])
    if rng.random() < loose:
        yield act("answer", schema["criteria"][0][1].format(**values | dict.fromkeys(schema["hidden"], "something")))
    for slot, candidates in schema["hidden"].items():
        values[slot] = yield from _find(candidates, rng)
    yield act("answer", " ".join(statement.format(**values) for _, statement, _ in schema["criteria"]))


def _warm_up(schema: Json, rng: random.Random) -> Generator[Move, str, None]:
    simple = [keys.split("|")[0].rstrip("*") for keys in schema["facts"] if "&" not in keys]
    for word in rng.sample(simple, WARM_UP):
        yield act("action", ASK[0].format(word))


def _find(candidates: list[str], rng: random.Random) -> Generator[Move, str, str]:
    """The value that the other side says Yes to; the last one needs no question."""
    names = [value.split("|")[0] for value in candidates]
    rng.shuffle(names)
    for name in names[:-1]:
        if (yield act("action", rng.choice(ASK).format(name))).startswith("Yes"):
            return name
    return names[-1]
