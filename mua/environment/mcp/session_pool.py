"""Sessions with one server: opened before they are needed, never given to two rollouts at once, always closed.

::

    take() ── a ready one that answers ────────────────────► rollout ── give_back() ──┬─ reuse: ready again
        └──── none ready: waits for one that opens                                    └─ else closed
    behind: as many are kept ready as lately were taken while one opened, at most ``ready``

A shared session is the same for all: the first take opens it, and when it is lost the next take opens another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any

from mua.config.environment import McpServerConfig
from mua.environment.mcp.health import ServerFaultKind, ServerNotStarted, ToolServerFault
from mua.environment.mcp.tool_session import CLOSE_SECONDS, ServerTool, ToolSession
from mua.utils.cores import given_cores
from mua.utils.errors import ConfigError

log = logging.getLogger(__name__)

REMEMBERED_SECONDS = 600.0
"""How long a burst of takes decides how many are kept ready."""
_FIRST_PAUSE_S = 0.2


class SessionPool:
    """The sessions with one server. Belongs to one event loop."""

    def __init__(self, config: McpServerConfig, make: Callable[[], ToolSession]) -> None:
        self.config = config
        self.first_tools: dict[str, ServerTool] = {}
        """Those of the first session."""
        self.alive = 0
        """Sessions that are open, opening or closing."""
        self._make = make
        self._ready: deque[ToolSession] = deque()
        self._waiting: deque[asyncio.Future[ToolSession]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._opening = 0
        self._starts = asyncio.Semaphore(max(2, len(given_cores())))
        self._taken: deque[float] = deque()
        self._burst, self._burst_at = 1, monotonic()
        self._open_seconds = 1.0
        self._opened_once = False
        self._closed = False
        self._warned = False

    async def start(self) -> None:
        """Open the first session, so that whatever is wrong with the server is found before the first episode.

        Raises :class:`ConfigError` and :class:`ServerNotStarted`.
        """
        if not self._opened_once:
            session = await self._take_one()
            self._put(session)

    async def take(self) -> ToolSession:
        """A session for one rollout; waits while ``max_sessions`` are open, under the caller's deadline.

        Raises :class:`ToolServerFault`, and as :meth:`start` as long as none has ever opened.
        """
        now = monotonic()
        self._taken.append(now)
        while self._taken[0] < now - max(self._open_seconds, 1.0):
            self._taken.popleft()
        if len(self._taken) >= self._burst or now - self._burst_at > REMEMBERED_SECONDS:
            self._burst, self._burst_at = len(self._taken), now
        session = await self._take_one()
        if self.config.isolation == "shared":
            self._put(session)
        self._fill()
        return session

    def give_back(self, session: ToolSession, *, clean: bool) -> None:
        """A rollout has left it; ``clean``: no call of it failed or was cancelled."""
        if self.config.isolation == "shared":
            return
        if self.config.reuse and clean and session.usable and not self._closed:

            async def renew() -> None:
                if await session.refreshed():
                    self._put(session)
                else:
                    self._retire(session)

            self._spawn(renew())
        else:
            self._retire(session)

    async def close(self) -> None:
        """Close every session that is ready or opening; those that rollouts hold were given back before."""
        self._closed = True
        while self._ready:
            self._retire(self._ready.popleft())
        deadline = monotonic() + self.config.start_seconds + 3 * CLOSE_SECONDS
        while self._tasks and (left := deadline - monotonic()) > 0:  # one that opens is closed by another
            await asyncio.wait(self._tasks, timeout=left)
        for task in self._tasks:
            task.cancel()

    # ---- inside

    async def _take_one(self) -> ToolSession:
        while self._ready:  # a server that restarted knows none of them
            session = self._ready[0] if self.config.isolation == "shared" else self._ready.popleft()
            try:
                answers = await session.answers()
            except asyncio.CancelledError:
                self._put(session)
                raise
            if answers:
                return session
            if session in self._ready:
                self._ready.remove(session)
            self._retire(session)
        waiter: asyncio.Future[ToolSession] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._fill()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._put(waiter.result())
            raise
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)

    def _fill(self) -> None:
        """Open what is wanted and may be opened."""
        if self.config.isolation == "shared":
            wanted = 1 if self._waiting else 0
        else:
            spare = min(self.config.ready, self._burst) - len(self._ready) if self._opened_once else 0
            wanted = len(self._waiting) + max(0, spare)
        while not self._closed and self._opening < wanted and self.alive < self.config.max_sessions:
            self._opening += 1
            self.alive += 1
            self._spawn(self._open())

    async def _open(self) -> None:
        """Open one, with its retries, for whoever waits first; failing that it fails that one alone."""
        error: BaseException | None = None
        try:
            for attempt in range(self.config.retries + 1):
                if attempt:
                    await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))
                async with self._starts:
                    began, session = monotonic(), self._make()
                    try:
                        await session.open()
                    except ToolServerFault as fault:
                        error = fault
                    except ConfigError as mistake:
                        error = mistake
                        break
                    else:
                        self._open_seconds = 0.7 * self._open_seconds + 0.3 * (monotonic() - began)
                        if not self._opened_once:
                            self._opened_once, self.first_tools = True, session.tools
                        elif session.tools != self.first_tools and not self._warned:
                            self._warned = True
                            log.warning(
                                "tool server %r: its tools are others than when the run began", self.config.name
                            )
                        self._put(session)
                        return
        finally:
            self._opening -= 1
        self.alive -= 1
        # What an episode meets, or the start of the run as long as nothing has ever opened.
        if isinstance(error, ConfigError) and self._opened_once:
            error = ToolServerFault(str(error), ServerFaultKind.TOOLS_CHANGED)
        elif isinstance(error, ToolServerFault) and not self._opened_once:
            passing = error.passing and error.kind is not ServerFaultKind.REFUSED
            error = ServerNotStarted(str(error), passing=passing)
        assert error is not None
        while self._waiting:
            if not (waiter := self._waiting.popleft()).done():
                waiter.set_exception(error)
                break
        else:
            log.warning("%s", error)
        if self._waiting:
            self._fill()

    def _put(self, session: ToolSession) -> None:
        """To whoever waits; a shared one to all of them and back among the ready."""
        shared = self.config.isolation == "shared"
        if self._closed or not session.usable:
            self._retire(session)
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(session)
                if not shared:
                    return
        if not (shared and session in self._ready):
            self._ready.append(session)

    def _retire(self, session: ToolSession) -> None:
        async def end() -> None:
            try:
                await session.close()
            finally:
                self.alive -= 1
                if self._waiting:
                    self._fill()

        if not session.retired:  # a shared one is seen lost by several
            session.retired = True
            self._spawn(end())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=f"sessions with {self.config.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
