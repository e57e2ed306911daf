"""An agent that follows a question's chain of relations from page to page.

What it knows is how the question is built (``start`` and ``chain``), as a reader of it does; every fact it reads.
"""

from __future__ import annotations

import random
from collections.abc import Generator

from environments.qa.episode import LOOKUP, OPEN
from environments.qa.pages import read
from mua.environment.protocol import Move, Task


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, str | None]:
    """Gives what stands at the end of the chain. ``loose`` is how often it first looks the whole question up."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    if rng.random() < loose:
        yield LOOKUP.name, {"query": task.data["question"]}
    known: str = task.data["start"]
    for relation in task.data["chain"]:
        listed = yield LOOKUP.name, {"query": known}
        if f". {known}: " not in listed:
            return None
        if (value := read((yield OPEN.name, {"title": known}), relation)) is None:
            return None
        known = value
    return known
