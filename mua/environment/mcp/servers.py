"""All tool servers of one domain in one run, and what one rollout has of them.

::

    ToolServers.start()   first session with each ─► lists of tools
    ToolServers.open()    one session with each ───► Lease: tools, call(), close()
    ToolServers.close()   nothing of any server is left
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from mua.config.environment import McpServerConfig
from mua.environment.extras import ExtraTool
from mua.environment.mcp.server_faults import ServerFaultKind, ToolServerFault
from mua.environment.mcp.session_pool import SessionPool
from mua.environment.mcp.tool_list import ServerTool
from mua.environment.mcp.tool_session import Streams, ToolSession
from mua.environment.protocol import Task, ToolResult
from mua.types import Json

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)


class ToolServers:
    """The servers of ``environment.mcp`` that a domain gets. Belongs to one event loop."""

    def __init__(self, configs: Iterable[McpServerConfig]) -> None:
        """Raises :class:`ConfigError` for a program or folder that is not there."""
        self.pools: dict[str, SessionPool] = {}
        self._connections: list[httpx2.AsyncHTTPTransport] = []
        for config in configs:
            self.pools[config.name] = SessionPool(config, partial(ToolSession, config, self._transport(config)))

    async def start(self) -> list[ExtraTool]:
        """Open a first session with each server; the tools that these list.

        Raises :class:`ConfigError` for what has to be changed in the configuration, and
        :class:`mua.environment.mcp.server_faults.ServerNotStarted` for a server that cannot be had.
        """
        found = await asyncio.gather(*(pool.start() for pool in self.pools.values()), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        return _offered(self.tools())

    def tools(self) -> Mapping[str, Mapping[str, ServerTool]]:
        """The tools of each server, as its first session listed them."""
        return {name: pool.first_tools for name, pool in self.pools.items()}

    async def open(self, task: Task, seed: int) -> Lease:
        """A session with each server, for one rollout. Raises as :meth:`SessionPool.take`."""
        taking = {name: asyncio.ensure_future(pool.take()) for name, pool in self.pools.items()}
        try:
            await asyncio.gather(*taking.values())
        except BaseException:
            for taken in taking.values():
                taken.cancel()
            await asyncio.gather(*taking.values(), return_exceptions=True)
            for name, taken in taking.items():
                if not taken.cancelled() and taken.exception() is None:
                    self.pools[name].give_back(taken.result(), clean=True)
            raise
        return Lease(self.pools, {name: taken.result() for name, taken in taking.items()})

    async def close(self) -> None:
        """Close every session; on return nothing of any server is left."""
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        for shared in self._connections:
            await shared.aclose()

    def _transport(self, config: McpServerConfig) -> Streams:
        if config.command:
            from mua.environment.mcp.stdio_pipe import check_command, stdio_streams

            check_command(config, f"environment.mcp, server {config.name!r}")
            return stdio_streams
        from mua.environment.mcp.http_pipe import connections, http_streams

        shared = connections(config)
        self._connections.append(shared)
        return lambda config, health: http_streams(config, health, shared)


class Lease:
    """One rollout's sessions; see :class:`mua.environment.extras.ExtraSession`."""

    def __init__(self, pools: Mapping[str, SessionPool], sessions: dict[str, ToolSession]) -> None:
        self._pools = pools
        self._sessions = sessions
        self._tools = {name: dict(session.tools) for name, session in sessions.items()}
        self._owner = {name: server for server, tools in self._tools.items() for name in tools}
        self.tools = _offered(self._tools)
        self._dirty: set[str] = set()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Call a tool; one that is safe to repeat is tried again. Raises :class:`ToolServerFault`."""
        server = self._owner[name]
        tool, pool = self._tools[server][name], self._pools[server]
        tries = 1 + (pool.config.retries if tool.safe else 0)
        while True:
            tries -= 1
            self._dirty.add(server)
            try:
                result = await self._sessions[server].call(tool, arguments)
            except ToolServerFault as fault:
                if not tries or not await self._again(server, fault):
                    raise
                log.info("%s; tried again", fault)
            else:
                self._dirty.discard(server)
                return result

    async def close(self) -> None:
        """Give every session back; what has to be closed is closed behind."""
        sessions, self._sessions = self._sessions, {}
        for name, session in sessions.items():
            self._pools[name].give_back(session, clean=name not in self._dirty)

    async def _again(self, server: str, fault: ToolServerFault) -> bool:
        """Whether another try makes sense: in the same session, or in another where no state is lost with this one."""
        if fault.kind in (ServerFaultKind.TOOLS_CHANGED, ServerFaultKind.REFUSED):
            return False
        pool, session = self._pools[server], self._sessions[server]
        if session.usable:
            return True
        if not (pool.config.reuse or pool.config.isolation == "shared"):
            return False
        pool.give_back(session, clean=False)
        del self._sessions[server]
        self._sessions[server] = other = await pool.take()
        return other.tools == self._tools[server]


def _offered(lists: Mapping[str, Mapping[str, ServerTool]]) -> list[ExtraTool]:
    fix = "in environment.mcp set prefix or rename (rename: {{{own}: ...}}) of {server!r}, or block it there"
    return [
        ExtraTool(tool.schema, f"the server {server!r}", fix.format(own=tool.own_name, server=server))
        for server, tools in lists.items()
        for tool in tools.values()
    ]
