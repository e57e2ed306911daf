"""Managers of the help desk whose policy gets the tools of a server too, for tests of tool servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from mua.config.schema import EnvironmentConfig
from mua.environment.manager import EnvironmentInstance, EnvironmentManager
from mua.environment.protocol import Task
from mua.environment.registry import get_domain
from mua.types import Json

Result = TypeVar("Result")
SERVER = Path(__file__).with_name("misbehaving_mcp.py")


def server(*arguments: str, **settings: Any) -> Json:
    """The section of the server that misbehaves on order."""
    line = ["-I", "-S", str(SERVER), *arguments]
    return {"name": "desk", "command": sys.executable, "args": line, "ready": 0, "retries": 0} | settings


def own_server(kind: str, settings: Json | None = None, **section: Any) -> Json:
    """The section of ``environments.servers.<kind>`` with these settings of its own."""
    line = [f"{key}={json.dumps(value)}" for key, value in (settings or {}).items()]
    given: Json = {"name": kind, "command": sys.executable, "args": ["-m", f"environments.servers.{kind}", *line],
                   "env": {"PYTHONPATH": str(Path(__file__).parents[1])}, "ready": 0, "retries": 0}  # fmt: skip
    return given | {"isolation": "shared" if kind == "web" else "session"} | section


def listing(*names: str, schema: Any = None) -> tuple[str, str]:
    """Arguments with which it lists these tools."""
    tools = [{"name": name, "inputSchema": schema or {"type": "object"}} for name in names]
    return "--tools", json.dumps(tools)


def environment(*servers: Json, **settings: Any) -> EnvironmentConfig:
    """The section ``environment`` of a help desk with these servers."""
    return EnvironmentConfig.model_validate({"name": "help_desk", "mcp": list(servers)} | settings)


@asynccontextmanager
async def managed(config: EnvironmentConfig) -> AsyncIterator[EnvironmentManager]:
    """A manager, closed at the end."""
    manager = EnvironmentManager(get_domain("help_desk"), config)
    try:
        yield manager
    finally:
        await manager.close()


def some_task() -> Task:
    return get_domain("help_desk").tasks("test")[0]


def play(config: EnvironmentConfig, episode: Callable[[EnvironmentInstance], Awaitable[Result]]) -> Result:
    """What ``episode`` gives in an instance of its own."""

    async def run() -> Result:
        async with managed(config) as manager, manager.instance(some_task(), 1) as instance:
            return await episode(instance)

    return asyncio.run(run())


async def gone(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends within ``seconds``; a zombie has ended."""
    for _ in range(int(seconds / 0.02)):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        await asyncio.sleep(0.02)
    return False
