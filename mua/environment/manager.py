"""Leases of fresh environments: one per episode, off the event loop, under deadlines, always given back.

::

    lease() ── waits for a slot ──► build + reset (thread) ──► episode calls tools (thread, one at a time)
                    ▲                                                    │ ends, raises, hangs or is cancelled
                    └────────────── slot freed ◄── close (thread) ◄──────┘

Closing runs in a task of its own that no cancellation of the episode reaches. A call that hangs is abandoned
with its thread (counted in ``leaked_threads``); the environment is closed all the same, from another thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, TypeVar

from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Domain, Environment, Evaluation, Task, ToolResult, ToolSchema, Transcript
from mua.environment.threads import BlockingPool, HungCall, Job
from mua.errors import EnvironmentFault, MuaError
from mua.types import Json

T = TypeVar("T")
_Limit = Literal["call_seconds", "reset_seconds"]
log = logging.getLogger(__name__)

THREADS = 32
"""Environment calls in execution at once. Tools are short and share one interpreter lock: more threads would
only make the event loop wait longer for its turn."""
MAX_LEAKED_THREADS = 64


class TooManyHungCalls(MuaError):
    """So many calls hang that the domain must be broken. Not an episode's fault to be retried: it ends the run."""


class LeasedEnvironment:
    """One environment, reset for one task, for one episode. Calls are queued, never overlapping."""

    def __init__(self, domain: Domain, task: Task, config: EnvironmentConfig, pool: BlockingPool) -> None:
        self.task = task
        self._domain_name = domain.name
        self._config = config
        self._pool = pool
        self._holder = _Holder(domain)
        self._tools: tuple[ToolSchema, ...] = ()
        self._turn = asyncio.Lock()
        self._job: Job | None = None
        self._unusable: str | None = None

    def tools(self) -> tuple[ToolSchema, ...]:
        """The tools of this task, as they were right after the reset."""
        return self._tools

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one tool under ``environment.call_seconds``.

        Raises :class:`mua.errors.EnvironmentFault` when the tool raises, hangs or gives anything but a
        :class:`ToolResult`. After a hang or a cancelled call the environment is unusable.
        """
        return await self._run(f"tool {name!r}", "call_seconds", ToolResult, lambda e: e.call(name, arguments))

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        """Judge the episode under ``environment.reset_seconds``; raises like :meth:`call`."""
        return await self._run("evaluate()", "reset_seconds", Evaluation, lambda e: e.evaluate(transcript))

    async def reset(self, seed: int) -> None:
        """Build the environment and reset it; called once, by the manager, before the lease is handed out."""

        def build(environment: Environment) -> tuple[ToolSchema, ...]:
            environment.reset(self.task, seed)
            return tuple(environment.tools())

        self._tools = await self._run("reset()", "reset_seconds", tuple, build)

    async def close(self) -> str | None:
        """Close, once the call under way has ended or run out of time. Gives what went wrong, if anything did."""
        self._unusable = "its lease has ended"
        if self._job is not None and not self._job.abandoned:
            with suppress(HungCall):
                await self._pool.wait(self._job)
        job = await self._pool.start(self._config.reset_seconds, self._holder.close)
        try:
            _, error = await self._pool.wait(job)
        except HungCall:
            return self._hung("close()", "reset_seconds")
        return None if error is None else self._raised("close()", error)

    async def _run(self, what: str, limit: _Limit, expected: type[T], function: Callable[[Environment], T]) -> T:
        async with self._turn:
            if self._unusable is not None:
                raise EnvironmentFault(f"{self._named(what)} cannot run: {self._unusable}")
            holder = self._holder
            self._job = await self._pool.start(getattr(self._config, limit), lambda: function(holder.get()))
            try:
                value, error = await self._pool.wait(self._job)
            except HungCall:
                self._unusable = f"{what} hangs"
                raise EnvironmentFault(self._hung(what, limit)) from None
            except asyncio.CancelledError:
                self._unusable = f"{what} was cancelled while it ran"
                raise
        if error is not None:
            raise EnvironmentFault(self._raised(what, error)) from error
        if not isinstance(value, expected):
            raise EnvironmentFault(f"{self._named(what)} gave {type(value).__name__} instead of {expected.__name__}")
        return value

    def _named(self, what: str) -> str:
        return f"environment {self._domain_name!r}, task {self.task.id!r}: {what}"

    def _raised(self, what: str, error: BaseException) -> str:
        return f"{self._named(what)} raised {type(error).__name__}: {error}"

    def _hung(self, what: str, limit: _Limit) -> str:
        seconds: float = getattr(self._config, limit)
        return (
            f"{self._named(what)} did not return within {seconds:g} s (environment.{limit}); its thread is abandoned "
            f"({self._pool.abandoned} hang now)"
        )


class EnvironmentManager:
    """Hands out leases, at most ``environment.max_leases`` at once. Belongs to one event loop."""

    def __init__(self, domain: Domain, config: EnvironmentConfig) -> None:
        self._domain = domain
        self._config = config
        self._pool = BlockingPool(THREADS)
        self._slots = asyncio.Semaphore(config.max_leases)
        self._alive = 0
        self._closing: set[asyncio.Task[str | None]] = set()

    @property
    def leases(self) -> int:
        """Environments alive now, those being closed included."""
        return self._alive

    @property
    def leaked_threads(self) -> int:
        """Threads whose call hangs past its deadline."""
        return self._pool.abandoned

    @asynccontextmanager
    async def lease(self, task: Task, seed: int) -> AsyncIterator[LeasedEnvironment]:
        """A fresh environment, reset for ``task``; waits while ``max_leases`` are alive.

        That wait has no deadline of its own: it is the caller's queue, under the caller's deadline. Raises
        :class:`mua.errors.EnvironmentFault` when building, resetting or closing raises or hangs, and
        :class:`TooManyHungCalls` when ``MAX_LEAKED_THREADS`` calls hang already.
        """
        await self._slots.acquire()
        try:
            self._refuse_if_too_many_hang(task)
        except TooManyHungCalls:
            self._slots.release()
            raise
        self._alive += 1
        leased = LeasedEnvironment(self._domain, task, self._config, self._pool)
        try:
            await leased.reset(seed)
            yield leased
        except BaseException:
            # The episode's own exception is the one to be seen; what closing adds to it goes to the log.
            if fault := await self._give_back(leased):
                log.warning(fault)
            raise
        if fault := await self._give_back(leased):
            raise EnvironmentFault(fault)

    async def close(self) -> None:
        """Wait for environments still being closed (under their deadlines) and let idle threads go."""
        if self._closing:
            await asyncio.wait(self._closing)
        self._pool.close()

    async def _give_back(self, leased: LeasedEnvironment) -> str | None:
        task = asyncio.create_task(self._close(leased), name=f"close environment of {leased.task.id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return await asyncio.shield(task)

    async def _close(self, leased: LeasedEnvironment) -> str | None:
        try:
            return await leased.close()
        finally:
            self._alive -= 1
            self._slots.release()

    def _refuse_if_too_many_hang(self, task: Task) -> None:
        if self.leaked_threads >= MAX_LEAKED_THREADS:
            raise TooManyHungCalls(
                f"environment {self._domain.name!r}: {self.leaked_threads} calls hang in abandoned threads, so task "
                f"{task.id!r} is not started. Give the tools deadlines of their own, or raise "
                "environment.call_seconds and reset_seconds if they are only slow"
            )


class _Holder:
    """Owns the environment across threads, so that it is closed exactly once.

    When building hangs past its deadline, the lease ends before there is anything to close; whatever the build
    gives later is then closed right where it was built.
    """

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._lock = threading.Lock()
        self._environment: Environment | None = None
        self._ended = False

    def get(self) -> Environment:
        """The environment, built on first use. Runs in a worker thread; calls of one lease never overlap."""
        if self._environment is None:
            self._keep(self._domain.environment())
        environment = self._environment
        if environment is None:
            raise RuntimeError("the lease ended while its environment was being built")
        return environment

    def close(self) -> None:
        with self._lock:
            environment, self._environment, self._ended = self._environment, None, True
        if environment is not None:
            environment.close()

    def _keep(self, environment: Environment) -> None:
        with self._lock:
            if not self._ended:
                self._environment = environment
                return
        environment.close()
