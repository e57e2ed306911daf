"""The three places an environment can run in, behind one interface: the event loop, a thread, a worker process.

::

    LeasedEnvironment ── Request ──► Place.run ──┬─ inline    on the loop: work of microseconds that cannot hang
                                                 ├─ thread    a hang costs the thread
                                                 └─ process   a hang or crash costs the worker (processes.py)

What an environment raises comes back as a value, never as an exception: a future refuses StopIteration, SystemExit
must not end anything, and a CancelledError out of a tool is no cancellation of the episode. Coroutine methods run on
the event loop of the run in the first two places, on one of the worker's own in the third, under the same deadlines.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextlib import suppress
from typing import Any, Protocol

from mua.environment.protocol import Domain, Environment, Task
from mua.environment.requests import Request, checked
from mua.environment.threads import BlockingPool, HungCall, Job, Outcome


class LostEnvironment(Exception):
    """The environment is gone, with the process that it ran in; the text says how that ended."""


class Place(Protocol):
    """One environment where it runs. Requests come one at a time, the first of them a reset, which builds it."""

    async def run(self, request: Request, seconds: float) -> Outcome:
        """What the environment answered or raised.

        Raises :class:`HungCall`, whose text says what became of the call, after ``seconds`` of execution, and
        :class:`LostEnvironment`. When the wait is cancelled, the request itself still runs to its end.
        """

    async def close(self, seconds: float) -> BaseException | None:
        """Close it, once the request under way has ended; what that raised. Raises :class:`HungCall`."""


class Executor(Protocol):
    """Where the environments of one manager run. Belongs to one event loop."""

    closes_at_once: bool
    """Whether :meth:`Place.close` never waits, so that no cancellation can come between."""

    @property
    def hung(self) -> int:
        """Calls that hang past their deadline and still hold something."""

    def place(self, task: Task) -> Place:
        """Room for one environment; nothing is built yet."""

    async def close(self) -> None:
        """Give back threads or processes. Every place has been closed before."""


class InlineExecutor:
    """On the event loop itself: for work of microseconds a thread costs more than the work."""

    closes_at_once = True
    hung = 0

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def place(self, task: Task) -> Place:
        return _InlinePlace(self._domain)

    async def close(self) -> None:
        return None


class ThreadExecutor:
    """In at most ``threads`` threads at once; one whose call hangs is abandoned and replaced."""

    closes_at_once = False

    def __init__(self, domain: Domain, threads: int) -> None:
        self._domain = domain
        self._pool = BlockingPool(threads)

    @property
    def hung(self) -> int:
        return self._pool.abandoned

    def place(self, task: Task) -> Place:
        return _ThreadPlace(self._domain, self._pool)

    async def close(self) -> None:
        self._pool.close()


class _InlinePlace:
    __slots__ = ("_domain", "_environment")

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._environment: Environment | None = None

    async def run(self, request: Request, seconds: float) -> Outcome:
        try:
            if self._environment is None:
                self._environment = self._domain.environment()
            answer = request.perform(self._environment)
        except Exception as error:
            return None, error
        return await _finished(request, answer, seconds)

    async def close(self, seconds: float) -> BaseException | None:
        environment, self._environment = self._environment, None
        try:
            if environment is not None:
                environment.close()
        except Exception as error:
            return error
        return None


class _ThreadPlace:
    def __init__(self, domain: Domain, pool: BlockingPool) -> None:
        self._holder = _Holder(domain)
        self._pool = pool
        self._job: Job | None = None

    async def run(self, request: Request, seconds: float) -> Outcome:
        holder = self._holder
        self._job = await self._pool.start(seconds, lambda: request.perform(holder.get()))
        answer, error = await self._pool.wait(self._job)
        return (None, error) if error is not None else await _finished(request, answer, seconds)

    async def close(self, seconds: float) -> BaseException | None:
        if self._job is not None and not self._job.abandoned:
            with suppress(HungCall):
                await self._pool.wait(self._job)
        _, error = await self._pool.wait(await self._pool.start(seconds, self._holder.close))
        return error


async def _finished(request: Request, answer: Any, seconds: float) -> Outcome:
    """The answer, of the right type; what a coroutine method gives in the end, under its deadline."""
    try:
        if inspect.isawaitable(answer):
            async with asyncio.timeout(seconds) as deadline:
                answer = await answer
        return checked(request, answer), None
    except TimeoutError as late:
        if deadline.expired():
            raise HungCall("its coroutine is cancelled") from None
        return None, late
    except Exception as raised:
        return None, raised


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
