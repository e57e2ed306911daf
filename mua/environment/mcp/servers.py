"""All tool servers of one domain in one run, and what one rollout has of them.

::

    ToolServers.start()   first session with each ─► lists of tools, checked against each other
    ToolServers.lease()   one session with each ───► Lease: tools, call(), release()
    ToolServers.close()   nothing of any server is left

:class:`HandleWithTools` puts a lease beside a domain's environment, wherever that runs: its tools come first, then the
servers' in the order of the configuration; a call goes where its tool belongs; the verdict stays the domain's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from mua.config.mcp import McpServerConfig
from mua.environment.executors import EnvironmentHandle
from mua.environment.mcp.server_faults import ServerFaultKind, ToolServerFault
from mua.environment.mcp.session_pool import SessionPool
from mua.environment.mcp.tool_list import ServerTool, merged
from mua.environment.mcp.tool_session import Streams, ToolSession
from mua.environment.protocol import ToolResult
from mua.environment.requests import CallRequest, Request, ResetRequest, ToolLists
from mua.environment.threads import CallOutcome
from mua.errors import ConfigError, MuaError
from mua.types import Json, ToolSchema

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
        self._starting = asyncio.Lock()
        self._started = False

    async def start(self) -> None:
        """Open a first session with each server.

        Raises :class:`ConfigError` for what has to be changed in the configuration, and
        :class:`mua.environment.mcp.server_faults.ServerNotStarted` for a server that cannot be had.
        """
        async with self._starting:
            if self._started:
                return
            found = await asyncio.gather(*(pool.start() for pool in self.pools.values()), return_exceptions=True)
            for error in found:
                if isinstance(error, BaseException):
                    raise error
            merged(self.tools())
            self._started = True

    def tools(self) -> Mapping[str, Mapping[str, ServerTool]]:
        """The tools of each server, as its first session listed them."""
        return {name: pool.first_tools for name, pool in self.pools.items()}

    async def lease(self) -> Lease:
        """A session with each server, for one rollout. Raises as :meth:`SessionPool.take`."""
        await self.start()
        taking = {name: asyncio.ensure_future(pool.take()) for name, pool in self.pools.items()}
        try:
            await asyncio.gather(*taking.values())
        except BaseException:
            for task in taking.values():
                task.cancel()
            await asyncio.gather(*taking.values(), return_exceptions=True)
            for name, task in taking.items():
                if not task.cancelled() and task.exception() is None:
                    self.pools[name].give_back(task.result(), clean=True)
            raise
        return Lease(self.pools, {name: task.result() for name, task in taking.items()})

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
    """One rollout's sessions."""

    def __init__(self, pools: Mapping[str, SessionPool], sessions: dict[str, ToolSession]) -> None:
        """Raises :class:`ConfigError` where two servers have a tool of one name."""
        self._pools = pools
        self._sessions = sessions
        self._tools = {name: dict(session.tools) for name, session in sessions.items()}
        self._owner = merged(self._tools)
        self._dirty: set[str] = set()

    def tools(self, own: Iterable[ToolSchema] = ()) -> tuple[ToolSchema, ...]:
        """The servers' tools. Raises :class:`ConfigError` where one is called like one of the domain's ``own``."""
        merged(self._tools, own)
        return tuple(tool.schema for tools in self._tools.values() for tool in tools.values())

    def __contains__(self, name: str) -> bool:
        return name in self._owner

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

    def release(self) -> None:
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


class HandleWithTools:
    """An environment's handle with a lease beside it; see :class:`mua.environment.executors.EnvironmentHandle`."""

    closes_at_once = False

    def __init__(self, inner: EnvironmentHandle, servers: ToolServers) -> None:
        self._inner = inner
        self._servers = servers
        self._lease: Lease | None = None

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        try:
            if isinstance(request, ResetRequest) and self._lease is None:
                self._lease = await self._servers.lease()
            lease = self._lease
            if lease is not None and isinstance(request, CallRequest) and not request.by_user and request.tool in lease:
                return await lease.call(request.tool, request.arguments), None
        except MuaError as error:
            return None, error
        answer, raised = await self._inner.run(request, seconds)
        if raised is None and lease is not None and isinstance(answer, ToolLists):
            try:
                answer = answer._replace(agent=(*answer.agent, *lease.tools(answer.agent)))
            except ConfigError as error:
                return None, error
        return answer, raised

    async def close(self, seconds: float) -> BaseException | None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
        return await self._inner.close(seconds)
