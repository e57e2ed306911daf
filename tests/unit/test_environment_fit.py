"""Arguments fitted to schemas, and coroutine methods and lives of domains, in every place that environments run in.

Not covered: services that a domain would really talk to.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from environments.kit.demonstrate import replay_gold
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain, DomainNotStarted
from mua.environment.manager import EnvironmentManager
from mua.environment.protocol import Evaluation, Move, Task, ToolResult, Transcript, UserMove
from mua.environment.registry import get_domain
from mua.environment.tool_arguments import fitted
from mua.types import Json, ToolSchema
from mua.utils.errors import EnvironmentFault

# ---- whole floats


@pytest.mark.parametrize(
    ("schema", "given", "wanted"),
    [
        ({"type": "integer"}, 2.0, 2),
        ({"type": "number"}, 2.0, 2.0),
        ({"type": ["integer", "null"]}, 2.0, 2),
        ({"type": ["integer", "number"]}, 2.0, 2.0),
        ({}, 2.0, 2.0),
        ({"type": "integer"}, 2.5, 2.5),
        ({"type": "integer"}, 1e300, 1e300),
        ({"type": "integer"}, True, True),
        ({"enum": [1, 2]}, 2.0, 2),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, 2.0, 2),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, 2.0, 2.0),
        ({"$ref": "#/$defs/n"}, 2.0, 2),
        ({"type": "array", "items": {"type": "integer"}}, [1.0, 2.0], [1, 2]),
        (
            {"type": "array", "prefixItems": [{}, {"type": "integer"}], "items": {"type": "integer"}},
            [1.0] * 3,
            [1.0, 1, 1],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"b": 1.0}, {"b": 1}),
        (
            {"type": "object", "patternProperties": {"^n": {"type": "integer"}}},
            {"n": 1.0, "m": 1.0},
            {"n": 1, "m": 1.0},
        ),
        ({"type": "array", "items": {"properties": {"n": {"allOf": [{"type": "integer"}]}}}}, [{"n": 3.0}], [{"n": 3}]),
        ({"$ref": "#/properties/v"}, 2.0, 2.0),
    ],
)
def test_whole_floats_are_integers_where_the_schema_says_so(schema: Json, given: Any, wanted: Any) -> None:
    parameters = {"type": "object", "properties": {"v": schema}, "$defs": {"n": {"type": "integer"}}}
    found = fitted(ToolSchema("t", "", parameters), {"v": given})
    assert json.dumps(found) == json.dumps({"v": wanted})


def as_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_floats(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class Floating:
    """A domain whose gold moves have every integer turned into a float."""

    def __init__(self, inner: Domain) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def gold(self, task: Task) -> list[Move]:
        moves = []
        for move in self._inner.gold(task):
            if isinstance(move, UserMove):
                move = UserMove(move.name, as_floats(move.arguments))
            elif not isinstance(move, str):
                move = (move[0], as_floats(move[1]))
            moves.append(move)
        return moves


@pytest.mark.parametrize("name", ["airline", "telecom", "retail", "help_desk"])
async def test_gold_moves_in_floats_earn_what_gold_moves_earn(name: str) -> None:
    domain = get_domain(name)
    floating, changed = Floating(domain), 0
    for task in domain.tasks("test"):
        if list(floating.gold(task)) and json.dumps(floating.gold(task)) != json.dumps(list(domain.gold(task))):
            changed += 1
            found = await replay_gold(floating, task)  # type: ignore[arg-type]
            assert found.evaluation.success, task.id
    assert changed > 10 or name in ("retail", "help_desk")


# ---- coroutine methods and lives


class Slow:
    """Every method that may be a coroutine function is one."""

    def __init__(self, domain: Remote) -> None:
        self._domain = domain

    async def reset(self, task: Task, seed: int) -> None:
        await asyncio.sleep(self._domain.seconds.get("reset", 0))
        self._domain.log.append("reset")

    def tools(self) -> list[ToolSchema]:
        counted = {"type": "object", "properties": {"n": {"type": "integer"}}}
        return [ToolSchema("look", "Look.", counted)]

    def user_tools(self) -> list[ToolSchema]:
        return self.tools()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        await asyncio.sleep(0)
        return ToolResult(json.dumps(arguments))

    async def user_call(self, name: str, arguments: Json) -> ToolResult:
        return await self.call(name, arguments)

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        await asyncio.sleep(0)
        return Evaluation(1, True)  # type: ignore[arg-type]

    async def close(self) -> None:
        await asyncio.sleep(self._domain.seconds.get("close", 0))
        self._domain.log.append("close")


class Remote:
    """A domain with a client of its own."""

    name = "remote"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.seconds: dict[str, float] = {}
        self.error: Exception | None = None

    def environment(self) -> Slow:
        return Slow(self)

    async def start(self) -> None:
        await asyncio.sleep(self.seconds.get("start", 0))
        self.log.append("start")
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        await asyncio.sleep(self.seconds.get("stop", 0))
        self.log.append("stop")


TASK = Task("a", "remote", "train", {})


@pytest.fixture(params=["inline", "thread"])
def isolation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def manager_of(domain: Remote, isolation: str, **settings: Any) -> EnvironmentManager:
    return EnvironmentManager(domain, EnvironmentConfig(name="remote", isolation=isolation, **settings))  # type: ignore[arg-type]


async def test_coroutine_methods_are_awaited_and_a_domain_starts_and_stops_once(isolation: str) -> None:
    domain = Remote()
    manager = manager_of(domain, isolation)

    async def episode() -> None:
        async with manager.instance(TASK, 0) as instance:
            assert json.loads((await instance.call("look", {"n": 2.0})).text) == {"n": 2}
            assert "2.0" not in (await instance.call("look", {"n": 2.0})).text
            assert "2.0" not in (await instance.user_tools.call("look", {"n": 2.0})).text
            verdict = await instance.evaluate(Transcript([]))
            assert type(verdict.reward) is float

    await asyncio.gather(episode(), episode(), episode())
    await manager.close()
    assert domain.log[0] == "start"
    assert domain.log[-1] == "stop"
    assert sorted(domain.log) == ["close"] * 3 + ["reset"] * 3 + ["start", "stop"]


@pytest.mark.parametrize("what", ["reset", "close"])
async def test_a_coroutine_that_hangs_is_a_fault_with_its_name(isolation: str, what: str) -> None:
    domain = Remote()
    domain.seconds[what] = 3600
    manager = manager_of(domain, isolation, reset_seconds=0.2)
    with pytest.raises(EnvironmentFault, match=rf"{what}\(\) did not return within 0.2 s"):
        async with manager.instance(TASK, 0):
            pass
    assert manager.instances == 0
    await manager.close()
    assert domain.log[-1] == "stop"


async def test_a_domain_that_does_not_start_ends_the_run(isolation: str) -> None:
    for error, seconds in ((OSError("no route"), 0), (None, 3600)):
        domain = Remote()
        domain.error, domain.seconds["start"] = error, seconds
        manager = manager_of(domain, isolation, reset_seconds=0.2)
        for _ in range(2):
            with pytest.raises(DomainNotStarted, match=r"'remote': its start\(\)") as caught:
                async with manager.instance(TASK, 0):
                    raise AssertionError("unreachable")
            assert caught.value.passing
        await manager.close()
        assert "reset" not in domain.log


async def test_a_stop_that_hangs_or_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    domain = Remote()
    domain.seconds["stop"] = 3600
    manager = manager_of(domain, "inline", reset_seconds=0.1)
    async with manager.instance(TASK, 0):
        pass
    await manager.close()
    assert "its stop() did not return within 0.1 s" in caplog.text


async def test_coroutine_tools_are_refused_with_a_name() -> None:
    class Late(Slow):
        async def tools(self) -> list[ToolSchema]:  # type: ignore[override]
            return []

    domain = Remote()
    domain.environment = lambda: Late(domain)  # type: ignore[method-assign]
    manager = manager_of(domain, "inline")
    with pytest.raises(EnvironmentFault, match=r"coroutine tools\(\), which answers at once"):
        async with manager.instance(TASK, 0):
            pass
    await manager.close()
