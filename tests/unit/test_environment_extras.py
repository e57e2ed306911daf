"""Extra tools beside a domain: several sources at once, names that meet, and sessions closed whatever happens.

Not here: what the sources do themselves (``test_mcp_servers.py``, ``test_sandbox_tools.py``).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp_support import environment, some_task

from mua.environment.executors import InlineExecutor
from mua.environment.extras import Extras, ExtraSession, ExtraTool, ExtraToolFault, HandleWithTools
from mua.environment.manager import EnvironmentInstance
from mua.environment.protocol import Task, ToolResult
from mua.environment.registry import get_domain
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault


class Counter:
    """A source whose tool counts, and which notes what becomes of its sessions."""

    def __init__(self, *names: str, opens: Any = None, closes: Any = None) -> None:
        self.offered = [ExtraTool(ToolSchema(name, "", {"type": "object"}), "a counter", "rename it") for name in names]
        self.alive, self.opens, self.closes = 0, opens, closes

    async def start(self) -> list[ExtraTool]:
        return self.offered

    async def open(self, task: Task, seed: int) -> ExtraSession:
        if self.opens is not None:
            await self.opens()
        self.alive += 1
        return Counting(self)

    async def close(self) -> None:
        assert not self.alive


class Counting:
    def __init__(self, source: Counter) -> None:
        self.tools = source.offered
        self._source, self._calls = source, 0

    async def call(self, name: str, arguments: Json) -> ToolResult:
        self._calls += 1
        if arguments.get("fault"):
            raise ExtraToolFault("the counter is broken")
        return ToolResult(arguments.get("text", f"{name} {self._calls}"))

    async def close(self) -> None:
        self._source.alive -= 1
        if self._source.closes is not None:
            await self._source.closes()


def instance(*sources: Counter) -> EnvironmentInstance:
    domain, task = get_domain("help_desk"), some_task()
    handle = HandleWithTools(InlineExecutor(domain).handle(task), Extras(sources))
    return EnvironmentInstance(domain.name, task, environment(reset_seconds=0.3), handle)


def test_each_call_goes_where_its_tool_belongs() -> None:
    one, two = Counter("a", "b"), Counter("c")

    async def run() -> None:
        rollout = instance(one, two)
        await rollout.reset(1)
        assert [tool.name for tool in rollout.tools()][-3:] == ["a", "b", "c"]
        texts = [(await rollout.call(name, {})).text for name in ("a", "c", "b")]
        assert texts == ["a 1", "c 1", "b 2"]
        assert (await rollout.call("get_order", {"order_id": "#none"})).error
        with pytest.raises(ExtraToolFault, match=r"^the counter is broken$"):
            await rollout.call("a", {"fault": True})
        with pytest.raises(EnvironmentFault, match="whose text is int"):
            await rollout.call("a", {"text": 3})
        assert (one.alive, two.alive) == (1, 1)
        assert await rollout.close() is None
        assert (one.alive, two.alive) == (0, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ((["a"], ["b", "a"]), "a counter and a counter both have a tool 'a'; rename it"),
        ((["get_order"],), "the domain and a counter both have a tool 'get_order'; rename it"),
    ],
)
def test_a_name_that_occurs_twice_is_one_error(sources: tuple[list[str], ...], told: str) -> None:
    counters = [Counter(*names) for names in sources]

    async def run() -> None:
        rollout = instance(*counters)
        with pytest.raises(ConfigError, match=told):
            await rollout.reset(1)
        await rollout.close()

    asyncio.run(run())
    assert not any(counter.alive for counter in counters)


def test_nothing_stays_open_when_another_source_fails_hangs_or_the_rollout_is_cancelled() -> None:
    async def fail() -> None:
        raise ExtraToolFault("not today")

    async def hang() -> None:
        await asyncio.sleep(60)

    async def run() -> None:
        good = Counter("a")
        rollout = instance(good, Counter("b", opens=fail))
        with pytest.raises(ExtraToolFault, match="not today"):
            await rollout.reset(1)
        await rollout.close()
        assert good.alive == 0
        rollout = instance(good, Counter("b", opens=hang))
        opening = asyncio.create_task(rollout.reset(1))
        await asyncio.sleep(0.02)
        assert good.alive == 1
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await rollout.close()
        assert good.alive == 0
        rollout = instance(good, Counter("b", closes=hang), Counter("c", closes=fail))
        await rollout.reset(1)
        assert "TimeoutError" in str(await rollout.close())
        assert good.alive == 0

    asyncio.run(run())
