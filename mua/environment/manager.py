"""Leases of fresh environments: one per episode, under deadlines, always given back.

::

    lease() ── waits for a slot ──► build + reset ──► episode calls tools, one at a time
                    ▲                                           │ ends, raises, hangs or is cancelled
                    └────────────── slot freed ◄── close ◄──────┘

Methods run in threads, or on the event loop itself where the domain says ``inline``: for work of microseconds a thread
costs more than the work. Coroutine methods always run on the loop, under the same deadlines.
Closing runs in a task of its own that no cancellation of the episode reaches. A call that hangs is abandoned
with its thread (counted in ``leaked_threads``); the environment is closed all the same, from another thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import (
    Domain,
    Environment,
    Evaluation,
    Isolation,
    Task,
    ToolResult,
    ToolSchema,
    Transcript,
    UserControlled,
)
from mua.environment.threads import BlockingPool, HungCall, Job, Outcome
from mua.errors import EnvironmentFault, JudgeFault, MuaError, UserFault
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
        self._inline = isolation_of(domain, config) == "inline"
        self._tools: tuple[ToolSchema, ...] = ()
        self.user_tools = LeasedUserTools(self)
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

        def build(environment: Environment) -> tuple[tuple[ToolSchema, ...], tuple[ToolSchema, ...]]:
            environment.reset(self.task, seed)
            users = environment.user_tools() if isinstance(environment, UserControlled) else ()
            return tuple(environment.tools()), tuple(users)

        self._tools, self.user_tools.known = await self._run("reset()", "reset_seconds", tuple, build)

    async def user_call(self, name: str, arguments: Json) -> ToolResult:
        """Run one of the user's tools; raises like :meth:`call`."""

        def act(environment: Environment) -> ToolResult:
            assert isinstance(environment, UserControlled), "only such environments have schemas to call"
            return environment.user_call(name, arguments)

        return await self._run(f"user tool {name!r}", "call_seconds", ToolResult, act)

    async def close(self) -> str | None:
        """Close, once the call under way has ended or run out of time. Gives what went wrong, if anything did."""
        self._unusable = "its lease has ended"
        if self._inline:
            return self._close_inline()
        if self._job is not None and not self._job.abandoned:
            with suppress(HungCall):
                await self._pool.wait(self._job)
        job = await self._pool.start(self._config.reset_seconds, self._holder.close)
        try:
            _, error = await self._pool.wait(job)
        except HungCall:
            return self._hung("close()", "reset_seconds")
        return None if error is None else self._raised("close()", error)

    def _close_inline(self) -> str | None:
        try:
            self._holder.close()
        except Exception as error:
            return self._raised("close()", error)
        return None

    async def _run(self, what: str, limit: _Limit, expected: type[T], function: Callable[[Environment], Any]) -> T:
        async with self._turn:
            if self._unusable is not None:
                raise EnvironmentFault(f"{self._named(what)} cannot run: {self._unusable}")
            try:
                outcome = self._run_inline(function) if self._inline else await self._run_in_thread(limit, function)
                value, error = await self._awaited(outcome, limit)
            except (HungCall, TimeoutError):
                self._unusable = f"{what} hangs"
                raise EnvironmentFault(self._hung(what, limit)) from None
            except asyncio.CancelledError:
                self._unusable = f"{what} was cancelled while it ran"
                raise
        if isinstance(error, UserFault | JudgeFault):
            raise error
        if error is not None:
            raise EnvironmentFault(self._raised(what, error)) from error
        if not isinstance(value, expected):
            raise EnvironmentFault(f"{self._named(what)} gave {type(value).__name__} instead of {expected.__name__}")
        return value

    def _run_inline(self, function: Callable[[Environment], Any]) -> Outcome:
        try:
            return function(self._holder.get()), None
        except Exception as error:
            return None, error

    async def _run_in_thread(self, limit: _Limit, function: Callable[[Environment], Any]) -> Outcome:
        holder = self._holder
        self._job = await self._pool.start(getattr(self._config, limit), lambda: function(holder.get()))
        return await self._pool.wait(self._job)

    async def _awaited(self, outcome: Outcome, limit: _Limit) -> Outcome:
        """What a coroutine method gives in the end; anything else is there already."""
        value, error = outcome
        if not inspect.isawaitable(value):
            return value, error
        try:
            async with asyncio.timeout(getattr(self._config, limit)) as deadline:
                return await value, None
        except TimeoutError as late:
            if deadline.expired():
                raise
            return None, late
        except Exception as raised:
            return None, raised

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


class LeasedUserTools:
    """The user's side of a lease; implements :class:`mua.users.protocol.UserTools`."""

    def __init__(self, leased: LeasedEnvironment) -> None:
        self.known: tuple[ToolSchema, ...] = ()
        self._leased = leased
        self._taken: list[Json] = []

    def schemas(self) -> Sequence[ToolSchema]:
        """The user's tools, as they were right after the reset."""
        return self.known

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one, and keep what was called and answered."""
        result = await self._leased.user_call(name, arguments)
        self._taken.append({"name": name, "arguments": arguments, "answer": result.text})
        return result

    def taken(self) -> list[Json]:
        """What was called since the last time this was asked."""
        taken, self._taken = self._taken, []
        return taken


def isolation_of(domain: Domain, config: EnvironmentConfig) -> Isolation:
    """Where the domain's environments run under ``config``."""
    return getattr(domain, "isolation", "thread") if config.isolation == "auto" else config.isolation


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
