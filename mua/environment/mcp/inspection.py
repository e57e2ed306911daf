"""Each tool server tried once before a run: does it open, which tools has it, do their names go together.

Behind ``mua env servers`` and ``mua doctor preflight``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import get_args

from mua.config.environment import McpServerConfig
from mua.config.schema import ExperimentConfig
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentManager
from mua.environment.mcp.servers import ToolServers
from mua.environment.protocol import Split
from mua.environment.selection import Selection
from mua.types import Json
from mua.utils.errors import MuaError
from mua.utils.masking import mask_secrets

_DESCRIPTION = 60


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What one server is found to be. A fault that is no single server's has the name of its domain."""

    name: str
    where: str = ""
    """Its command or address."""
    isolation: str = ""
    seconds: float = 0.0
    """Until its first session was open."""
    tools: list[Json] = field(default_factory=list)
    """As the policy gets them: ``name``, ``description``, ``parameters``, ``own_name``, ``safe``."""
    fault: str | None = None


def inspected(config: ExperimentConfig) -> list[ServerReport]:
    """One report for each server of ``config``, then one for each domain whose tools have a server's names."""

    async def inspect() -> list[ServerReport]:
        found = list(await asyncio.gather(*(_report(server) for server in config.environment.mcp)))
        if not any(one.fault for one in found):
            found += [ServerReport(name, fault=fault) for name, fault in (await domain_faults(config)).items()]
        return found

    return asyncio.run(inspect())


def server_table(found: Sequence[ServerReport]) -> str:
    """The reports for a person."""
    lines = []
    for one in found:
        state = one.fault or f"{len(one.tools)} tools, open after {one.seconds:.1f} s, isolation {one.isolation}"
        lines.append(f"{one.name}  {one.where}\n  {state}" if one.where else f"{one.name}\n  {one.fault}")
        wide = max((len(tool["name"]) for tool in one.tools), default=0)
        for tool in one.tools:
            said = " ".join(tool["description"].split())
            said = said if len(said) <= _DESCRIPTION else f"{said[:_DESCRIPTION]}..."
            lines.append(f"  {tool['name']:{wide}}  {'safe' if tool['safe'] else '    '}  {said}".rstrip())
    return "\n".join(lines) or "environment.mcp names no server"


async def _report(server: McpServerConfig) -> ServerReport:
    where = mask_secrets(server.url or " ".join((server.command, *server.args)))
    report = ServerReport(server.name, where, server.isolation)
    try:
        servers = ToolServers([server.model_copy(update={"ready": 0})])
    except MuaError as error:
        return replace(report, fault=str(error))
    began = monotonic()
    try:
        await servers.start()
        seconds = monotonic() - began
    except MuaError as error:
        return replace(report, fault=str(error))
    finally:
        await servers.close()
    tools = servers.tools()[server.name].values()
    told = [asdict(tool.schema) | {"own_name": tool.own_name, "safe": tool.safe} for tool in tools]
    return replace(report, seconds=seconds, tools=told)


async def domain_faults(config: ExperimentConfig) -> dict[str, str]:
    """What is wrong with each domain that cannot be opened, on its first task."""
    faults = {}
    services = Services.from_config(config.user, config.judge)
    for name, domain in Selection.from_config(config.environment, services).domains.items():
        task = next((task for split in get_args(Split) for task in domain.tasks(split)[:1]), None)
        manager = EnvironmentManager(domain, config.environment)
        try:
            if task is not None:
                async with manager.instance(task, 0):
                    pass
        except MuaError as error:
            faults[name] = str(error)
        finally:
            await manager.close()
    await services.close()
    return faults
