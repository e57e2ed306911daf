"""The help desk with tools and customers that take their time, as services and people do; :mod:`tools.bench.timeline`.

Seconds are drawn from log-normal distributions by the task and the seed, so that every run waits for the same.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace

from environments.help_desk import HelpDeskDomain
from environments.help_desk.tools import HelpDesk
from mua.environment.protocol import Environment, Isolation, Split, Task, ToolResult
from mua.environment.user import User, UserReply
from mua.types import Json
from mua.utils.seeds import derived_seed

TOOL_SECONDS, USER_SECONDS = 0.1, 0.4
"""Medians."""
SPREAD = 0.8
"""Standard deviation of the logarithm; the mean is 1.38 times the median."""


def _seconds(median: float, *seed: object) -> float:
    return median * random.Random(derived_seed(*map(str, seed))).lognormvariate(0.0, SPREAD)


class SlowDesk(HelpDesk):
    """Implements :class:`mua.environment.protocol.Environment`."""

    def reset(self, task: Task, seed: int) -> None:
        super().reset(task, seed)
        self._seed, self._calls = f"{task.id}/{seed}", 0

    def call(self, name: str, arguments: Json) -> ToolResult:
        self._calls += 1
        time.sleep(_seconds(TOOL_SECONDS, "tool", self._seed, self._calls))
        return super().call(name, arguments)


class SlowCustomer:
    """Implements :class:`mua.environment.user.User`."""

    def __init__(self, inner: User, seed: str) -> None:
        self._inner, self._seed, self._said = inner, seed, 0

    async def open(self) -> UserReply:
        return await self._inner.open()

    async def reply(self, agent_text: str) -> UserReply:
        self._said += 1
        await asyncio.sleep(_seconds(USER_SECONDS, "user", self._seed, self._said))
        return await self._inner.reply(agent_text)

    async def close(self) -> None:
        await self._inner.close()


class SlowDeskDomain(HelpDeskDomain):
    """Implements what :class:`HelpDeskDomain` does."""

    name = "slow_desk"
    isolation: Isolation = "thread"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, domain=self.name) for task in super().tasks(split)]

    def environment(self) -> Environment:
        return SlowDesk()

    def scripted_user(self, task: Task, seed: int, personas: Sequence[str] = ()) -> User:
        return SlowCustomer(super().scripted_user(task, seed, personas), f"{task.id}/{seed}")


DOMAIN = SlowDeskDomain()
