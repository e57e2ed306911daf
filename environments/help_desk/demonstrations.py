"""Conversations of the scripted agent with the scripted customer, as data for supervised training."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from environments.help_desk.expert import Expert
from environments.help_desk.tasks import FIRST_SEED, MIXTURE, generate
from environments.help_desk.tools import HelpDesk
from environments.help_desk.user import customer
from mua.environment.demonstrate import played
from mua.types import Json

_FIRST_SEED = FIRST_SEED["train"] + 100_000
"""Demonstrations use shops of their own, which no split contains."""


def demonstrations(count: int, seed: int, system: str, personas: Sequence[str] = ()) -> Iterator[list[Json]]:
    """``count`` conversations in OpenAI form, in the mixture of the splits; the same for the same arguments.

    ``personas`` chooses the customers, as ``user.personas`` does in a run.
    """
    for index in range(count):
        task = generate("train", _FIRST_SEED + seed * 1_000_000 + index, MIXTURE[index % len(MIXTURE)])
        desk = HelpDesk()
        desk.reset(task, index)
        shown = asyncio.run(played(desk, customer(task, index, personas), Expert(task, index).moves()))
        desk.close()
        yield [{"role": "system", "content": system}, *shown.messages]
