"""Who talks with the policy in a gym: opens with the task, then points to the tool until its patience ends."""

from __future__ import annotations

import random
from collections.abc import Sequence

from mua.environment.user import STOP_SIGNAL, UserReply

PATIENCE = 2
"""Plain texts that are answered with a nudge; the next one ends the episode."""
NUDGES = (
    "Please use the tool interact; I can not act on plain text.",
    "That has to go through the tool interact.",
    "Nothing happens unless you call interact.",
)
GIVING_UP = ("Let us stop here.", "This leads nowhere, bye.", "I have to go now.")


class OpeningUser:
    """Implements :class:`mua.environment.user.User`; never raises. The other side of the game sits in the tool."""

    def __init__(self, seed: str, openings: Sequence[str]) -> None:
        """``seed`` is any text; it picks one of ``openings`` and the wording of the nudges."""
        self._rng = random.Random(seed)
        self._openings = list(openings)
        self._patience = PATIENCE

    async def open(self) -> UserReply:
        return UserReply(self._rng.choice(self._openings))

    async def reply(self, agent_text: str) -> UserReply:
        self._patience -= 1
        if self._patience < 0:
            return UserReply(f"{self._rng.choice(GIVING_UP)} {STOP_SIGNAL}", stop=True)
        return UserReply(self._rng.choice(NUDGES))

    async def close(self) -> None:
        return None
