"""An agent that argues with reasons and listens: what the holder lets shine through, it takes up next.

It knows the debate (what can be said on either side, as a person who has read about it) and not the holder's concerns.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence

from environments.gyms._shared import act
from environments.gyms.persuade.topics import OTHER, Reason, topics
from mua.environment.protocol import Move, Task

_OPENERS = ("Consider this: {}", "There is another side to it. {}", "Let me put it this way. {}", "{}")
_REMARKS = ("You are wrong.", "Please change your mind.", "I disagree with you.")


def moves(task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """``loose`` is how often it makes an empty remark before an argument."""
    rng = random.Random(f"expert/{task.id}/{seed}")
    left = list(topics()[task.data["kind"]].reasons[OTHER[task.data["side"]]])
    rng.shuffle(left)
    answer = ""
    while left:
        if rng.random() < loose:
            answer = yield act("action", rng.choice(_REMARKS))
        reason = _fitting(left, answer)
        left.remove(reason)
        answer = yield act("action", argument(reason, rng))


def argument(reason: Reason, rng: random.Random) -> str:
    """A reason in a sentence or two."""
    return rng.choice(_OPENERS).format(reason.sentence)


def _fitting(left: Sequence[Reason], answer: str) -> Reason:
    """A reason for what the holder has hinted at, else any."""
    hinted = [reason for reason in left if any(hint in answer for hint in reason.theme.hints)]
    return (hinted or list(left))[0]
