"""An agent that knows the schemas: it recognises the story, asks about every point of it, and then tells it."""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping

from environments.gyms._shared import act
from environments.gyms._shared.questions import NEGATED
from environments.gyms.turtle.stories import schemas
from mua.environment.protocol import Move, Task
from mua.types import Json

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
