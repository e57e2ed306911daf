"""Conversations of the scripted agent with the scripted customer, as data for supervised training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from environments.help_desk import DOMAIN
from environments.help_desk.tasks import FIRST_SEED, KINDS, generate
from mua.environment.demonstrate import demonstrate
from mua.types import Json

GRANTED = ("track", "cancel", "redirect", "return")
_FIRST_SEED = FIRST_SEED["train"] + 100_000
"""Demonstrations use shops of their own, which no split contains."""


def demonstrations(count: int, loose: float, seed: int, system: str) -> Iterator[list[Json]]:
    """``count`` conversations in OpenAI form, all kinds of tasks in turn; the same for the same arguments.

    Wishes that are granted come twice as often as refused ones: they are longer, and fewer kinds.
    ``loose`` is how often the agent tells a fact in words of its own.
    """
    kinds = [*KINDS, *GRANTED]
    for index in range(count):
        task = generate("train", _FIRST_SEED + seed * 1_000_000 + index, kinds[index % len(kinds)])
        messages = asyncio.run(demonstrate(DOMAIN, task, index, loose)).messages
        yield [{"role": "system", "content": system}, *messages]
