"""An agent that knows what matters for each kind of task and asks for it, one thing at a time.

It recognises the kind by the request and asks for everything that matters there and that the request does not say, the
most important first.
"""

from __future__ import annotations

import random
from collections.abc import Generator

from environments.gyms._shared import act
from environments.gyms.intention.schemas import ASK, Detail, kinds
from mua.environment.protocol import Move, Task

VAGUE = ("Can you tell me more?", "Anything else?", "What do you want exactly?")


def moves(task: Task, seed: int, loose: float) -> Generator[Move, str, None]:
    """``loose`` is how often it asks something vague, or two things at once."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    left_open = [d for d in kinds()[task.data["kind"]].details if not _says(task.data["request"], d)]
    details = sorted(left_open, key=lambda d: (-d.importance, rng.random()))
    while details:
        detail = details.pop(0)
        question = _question(detail, rng)
        if rng.random() < loose:
            if details and rng.random() < 0.5:
                question += f" And {details.pop(0).topic}?"
            else:
                question = rng.choice(VAGUE)
                details.append(detail)
        yield act("action", question)


def _says(request: str, detail: Detail) -> bool:
    return f"{detail.topic}: ".lower() in request.lower()


def _question(detail: Detail, rng: random.Random) -> str:
    return detail.inquiry if rng.random() < 0.7 else rng.choice(ASK).format(detail.topic)
