"""The tool servers of one domain in one run, and an environment's handle with their tools beside its own.

::

    ToolServers.start()      first session with each ─► lists of tools, their names checked against each other
    HandleWithServers.run()  reset: one session with each ─► Lease; a call goes where its tool belongs
    ToolServers.close()      nothing of any server is left

A call of a server's tool: ``manager.py`` (deadline, faults) ─► here ─► ``tool_session.py`` ─► ``stdio_pipe.py`` or
``http_pipe.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from mua.config.environment import McpServerConfig
from mua.environment.blame import Blame, blame
from mua.environment.executors import EnvironmentHandle
from mua.environment.mcp.health import ServerFaultKind, ToolServerFault
from mua.environment.mcp.session_pool import SessionPool
from mua.environment.mcp.tool_session import ServerTool, Streams, ToolSession
from mua.environment.protocol import ToolResult
from mua.environment.requests import CallOutcome, CallRequest, Request, ResetRequest, ToolLists
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, MuaError

if TYPE_CHECKING:
    import httpx2

log = logging.getLogger(__name__)


class ToolServers:
    """The servers of ``environment.mcp`` that a domain gets. Belongs to one event loop."""

    def __init__(self, configs: Iterable[McpServerConfig]) -> None:
        """Raises :class:`ConfigError` for a program or folder that is not there."""
        self.pools: dict[str, SessionPool] = {}
        self._connections: list[httpx2.AsyncHTTPTransport] = []
        self._starting = asyncio.Lock()
        self._started = False
        for config in configs:
            streams: Streams
            if config.command:
                from mua.environment.mcp.stdio_pipe import check_command, stdio_streams

                check_command(config, f"environment.mcp, server {config.name!r}")
                streams = stdio_streams
            else:
                from mua.environment.mcp.http_pipe import connections, http_streams

                self._connections.append(connections(config))
                streams = partial(http_streams, shared=self._connections[-1])
            self.pools[config.name] = SessionPool(config, partial(ToolSession, config, streams))

    async def start(self) -> None:
        """Open a first session with each server, once.

        Raises :class:`ConfigError` for what has to be changed in the configuration, and
        :class:`mua.environment.mcp.health.ServerNotStarted` for a server that cannot be had.
        """
        async with self._starting:
            if self._started:
                return
            found = await asyncio.gather(*(pool.start() for pool in self.pools.values()), return_exceptions=True)
            for error in found:
                if isinstance(error, BaseException):
                    raise error
            check_names(self.tools())
            self._started = True

    def tools(self) -> Mapping[str, Mapping[str, ServerTool]]:
        """The tools of each server, as its first session listed them."""
        return {name: pool.first_tools for name, pool in self.pools.items()}

    async def open(self) -> Lease:
        """A session with each server, for one rollout; all or none. Raises as :meth:`SessionPool.take`."""
        await self.start()
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


class Lease:
    """One rollout's sessions."""

    def __init__(self, pools: Mapping[str, SessionPool], sessions: dict[str, ToolSession]) -> None:
        self.tools = {name: dict(session.tools) for name, session in sessions.items()}
        """Of each server, by the policy's name."""
        self.owner = {name: server for server, tools in self.tools.items() for name in tools}
        """The server of each tool."""
        self._pools = pools
        self._sessions = sessions
        self._dirty: set[str] = set()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Call a tool; one that is safe to repeat is tried again. Raises :class:`ToolServerFault`."""
        server = self.owner[name]
        tool, pool = self.tools[server][name], self._pools[server]
        tries, forgotten = pool.config.retries if tool.safe else 0, 1
        while True:
            self._dirty.add(server)
            try:
                result = await self._sessions[server].call(tool, arguments)
            except ToolServerFault as fault:
                not_done = fault.kind is ServerFaultKind.FORGOTTEN
                left, forgotten, tries = (forgotten, 0, tries) if not_done else (tries, forgotten, tries - 1)
                if left < 1 or not await self._again(server, fault):
                    found = blame("tool_server", [fault.kind.value])
                    fault.by_policy |= found is Blame.CONTROL and await self._opens_as_before(server)
                    raise
                log.info("%s; tried again", fault)
            else:
                self._dirty.discard(server)
                return result

    async def _opens_as_before(self, server: str) -> bool:
        """Whether another session opens with the same tools, so that it is the calls of this one that ended it."""
        pool = self._pools[server]
        try:
            async with asyncio.timeout(pool.config.start_seconds):
                other = await pool.take()
        except (MuaError, TimeoutError):
            return False
        pool.give_back(other, clean=True)
        return other.tools == self.tools[server]

    def close(self) -> None:
        """Give every session back; what has to be closed is closed behind."""
        sessions, self._sessions = self._sessions, {}
        for name, session in sessions.items():
            self._pools[name].give_back(session, clean=name not in self._dirty)

    async def _again(self, server: str, fault: ToolServerFault) -> bool:
        """Whether another try makes sense: in the same session, or in another where no state is lost with this one."""
        if fault.kind in (ServerFaultKind.TOOLS_CHANGED, ServerFaultKind.REFUSED, ServerFaultKind.TOLD):
            return False
        pool, session = self._pools[server], self._sessions[server]
        if session.usable:
            return True
        if not (pool.config.reuse or pool.config.isolation == "shared"):
            return False
        pool.give_back(session, clean=False)
        del self._sessions[server]
        self._sessions[server] = other = await pool.take()
        return other.tools == self.tools[server]


class HandleWithServers:
    """An environment's handle with tools of servers beside its own; see :class:`EnvironmentHandle`.

    The domain's tools come first, then those of the servers in their order; the verdict stays the domain's.
    """

    def __init__(self, inner: EnvironmentHandle, servers: ToolServers) -> None:
        self._inner = inner
        self._servers = servers
        self._lease: Lease | None = None

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        try:
            if isinstance(request, ResetRequest) and self._lease is None:
                self._lease = await self._servers.open()
            lease = self._lease
            if (
                lease is not None
                and isinstance(request, CallRequest)
                and not request.by_user
                and request.tool in lease.owner
            ):
                return await lease.call(request.tool, request.arguments), None
        except MuaError as error:
            return None, error
        answer, raised = await self._inner.run(request, seconds)
        if raised is None and lease is not None and isinstance(answer, ToolLists):
            try:
                check_names(lease.tools, answer.agent)
            except ConfigError as error:
                return None, error
            theirs = [tool.schema for tools in lease.tools.values() for tool in tools.values()]
            answer = answer._replace(agent=(*answer.agent, *theirs))
        return answer, raised

    async def close(self, seconds: float) -> BaseException | None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None
        return await self._inner.close(seconds)


def check_names(lists: Mapping[str, Mapping[str, ServerTool]], own: Sequence[ToolSchema] = ()) -> None:
    """Raises :class:`ConfigError` for a name that occurs twice; ``own`` are the domain's tools."""
    owners = {schema.name: "the domain" for schema in own}
    for server, tools in lists.items():
        for name, tool in tools.items():
            if name in owners:
                raise ConfigError(
                    f"environment: {owners[name]} and the server {server!r} both have a tool {name!r}; in "
                    f"environment.mcp set prefix or rename (rename: {{{tool.own_name}: ...}}) of {server!r}, or block "
                    "it there"
                )
            owners[name] = f"the server {server!r}"
