"""The three ways to run an environment, behind one interface: on the event loop, in a thread, in a worker process.

::

    EnvironmentInstance ── Request ──► EnvironmentHandle.run ──┬─ inline    on the loop: work of microseconds
                                                               ├─ thread    a hang costs the thread
                                                               └─ process   a hang or crash costs the worker

What an environment raises comes back as a value, never as an exception: a future refuses StopIteration, SystemExit
must not end anything, and a CancelledError out of a tool is no cancellation of the episode. Coroutine methods run on
the event loop of the run in the first two places, on one of the worker's own in the third, under the same deadlines.

Threads for blocking calls that may never return.

``concurrent.futures`` cannot be used here: its threads are joined at interpreter exit, so a single tool that
hangs would keep the process alive for ever. These threads are daemons; one that runs past its deadline is
abandoned and replaced, and stops by itself should its call ever return.

::

    event loop                        worker thread
    start() ──── function ──────────► runs it
    wait()  ◄─── call_soon_threadsafe ── outcome
       └─ deadline passed: abandon() ──► counted, replaced, exits when it returns
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

from mua.environment.domain import Domain
from mua.environment.protocol import Environment, Task
from mua.environment.requests import CallOutcome, Request, checked_answer

_Inbox: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Callable[[CallOutcome], None]] | None]"


class HungCall(Exception):
    """A call did not return before its deadline; the text says what became of it."""


@dataclass(slots=True, eq=False)
class BlockingCall:
    """One call under way in a worker thread."""

    deadline: float
    """Event-loop time at which the call counts as hung."""
    inbox: _Inbox
    outcome: asyncio.Future[CallOutcome]
    abandoned: bool = False


class BlockingPool:
    """At most ``threads`` calls at once, each in a daemon thread. Belongs to one event loop."""

    def __init__(self, threads: int) -> None:
        self.abandoned = 0
        """Threads whose call ran past its deadline and has not returned since."""
        self._free = asyncio.Semaphore(threads)
        self._idle: list[_Inbox] = []

    async def start(self, seconds: float, function: Callable[[], Any]) -> BlockingCall:
        """Start ``function`` as soon as a thread is free; its ``seconds`` count from then.

        The wait for a thread is bounded by the deadlines of the calls that hold one.
        """
        await self._free.acquire()
        if self._idle:
            inbox = self._idle.pop()
        else:
            inbox = SimpleQueue()
            threading.Thread(target=_work, args=(inbox,), name="mua-environment", daemon=True).start()
        loop = asyncio.get_running_loop()
        call = BlockingCall(loop.time() + seconds, inbox, loop.create_future())

        def deliver(outcome: CallOutcome) -> None:
            try:
                loop.call_soon_threadsafe(self._finished, call, outcome)
            except RuntimeError:
                call.inbox.put(None)  # the loop is closed, so nobody waits any more: let the thread end

        inbox.put((function, deliver))
        return call

    async def wait(self, call: BlockingCall) -> CallOutcome:
        """The call's outcome. Raises :class:`HungCall` at its deadline and abandons the thread.

        Canceling the wait leaves the call running; it can be waited for again.
        """
        remaining = max(0.0, call.deadline - asyncio.get_running_loop().time())
        await asyncio.wait((call.outcome,), timeout=remaining)
        if not call.outcome.done():
            if not call.abandoned:
                call.abandoned = True
                self.abandoned += 1
                self._free.release()
            raise HungCall(f"its thread is abandoned ({self.abandoned} hang now)")
        return call.outcome.result()

    def close(self) -> None:
        """Let idle threads exit. Threads that hang stay behind as daemons."""
        while self._idle:
            self._idle.pop().put(None)

    def _finished(self, call: BlockingCall, outcome: CallOutcome) -> None:
        """Runs on the event loop when a call has returned, in time or not."""
        if call.abandoned:
            self.abandoned -= 1
            call.inbox.put(None)
            return
        self._idle.append(call.inbox)
        self._free.release()
        call.outcome.set_result(outcome)


def _work(inbox: _Inbox) -> None:
    while (item := inbox.get()) is not None:
        function, deliver = item
        outcome: CallOutcome
        try:
            outcome = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        deliver(outcome)
        # An idle thread must not keep the last environment alive.
        del item, function, deliver, outcome


class LostEnvironment(Exception):
    """The environment is gone, with the process that it ran in; the text says how that ended."""


class EnvironmentHandle(Protocol):
    """One environment where it runs. Requests come one at a time, the first of them a reset, which builds it."""

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        """What the environment answered or raised.

        Raises :class:`HungCall`, whose text says what became of the call, after ``seconds`` of execution, and
        :class:`LostEnvironment`. When the wait is cancelled, the request itself still runs to its end.
        """

    async def close(self, seconds: float) -> BaseException | None:
        """Close it, once the request under way has ended; what that raised. Raises :class:`HungCall`."""


class LocalExecutor:
    """In this process: on the event loop itself, or in at most ``threads`` threads at once, of which one whose call
    hangs is abandoned and replaced. For work of microseconds a thread costs more than the work."""

    def __init__(self, domain: Domain, threads: int = 0) -> None:
        self._domain = domain
        self._pool = BlockingPool(threads) if threads else None

    @property
    def hung(self) -> int:
        """Calls that hang past their deadline and still hold something."""
        return self._pool.abandoned if self._pool is not None else 0

    def handle(self, task: Task) -> EnvironmentHandle:
        """A handle on one environment; nothing is built yet."""
        return _InlineHandle(self._domain) if self._pool is None else _ThreadHandle(self._domain, self._pool)

    async def close(self) -> None:
        """Give back threads. Every handle has been closed before."""
        if self._pool is not None:
            self._pool.close()


class _InlineHandle:
    __slots__ = ("_domain", "_environment")

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._environment: Environment | None = None

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        try:
            if self._environment is None:
                self._environment = self._domain.environment()
            answer = request.perform(self._environment)
        except Exception as error:
            return None, error
        return await _finished(answer, seconds, request)

    async def close(self, seconds: float) -> BaseException | None:
        environment, self._environment = self._environment, None
        try:
            closing = None if environment is None else environment.close()
        except Exception as error:
            return error
        return (await _finished(closing, seconds))[1]


class _ThreadHandle:
    """Owns the environment across threads, so that it is closed exactly once.

    When building hangs past its deadline, the instance ends before there is anything to close; whatever the build
    gives later is then closed right where it was built.
    """

    def __init__(self, domain: Domain, pool: BlockingPool) -> None:
        self._domain = domain
        self._pool = pool
        self._call: BlockingCall | None = None
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._environment: Environment | None = None
        self._ended = False

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        self._call = await self._pool.start(seconds, lambda: request.perform(self._built()))
        answer, error = await self._pool.wait(self._call)
        return (None, error) if error is not None else await _finished(answer, seconds, request)

    async def close(self, seconds: float) -> BaseException | None:
        if self._call is not None and not self._call.abandoned:
            with suppress(HungCall):
                await self._pool.wait(self._call)
        closing, error = await self._pool.wait(await self._pool.start(seconds, self._close))
        return error if error is not None else (await _finished(closing, seconds))[1]

    # ---- in a worker thread; calls of one instance never overlap

    def _built(self) -> Environment:
        """The environment, built on first use."""
        if self._environment is None:
            built = self._domain.environment()
            with self._lock:
                if not (ended := self._ended):
                    self._environment = built
            if ended and inspect.iscoroutine(closing := built.close()):
                try:
                    asyncio.run_coroutine_threadsafe(closing, self._loop)
                except RuntimeError:
                    closing.close()  # the run has gone, and its loop with it
        if (environment := self._environment) is None:
            raise RuntimeError("the instance ended while its environment was being built")
        return environment

    def _close(self) -> Any:
        """What ``close`` gave: an awaitable, where it is a coroutine function, that the event loop has to run."""
        with self._lock:
            environment, self._environment, self._ended = self._environment, None, True
        return None if environment is None else environment.close()


async def _finished(answer: Any, seconds: float, request: Request | None = None) -> CallOutcome:
    """The answer, or what a coroutine method gives in the end, under its deadline; of the type that ``request`` has.

    Raises :class:`HungCall`.
    """
    try:
        if inspect.isawaitable(answer):
            async with asyncio.timeout(seconds) as deadline:
                answer = await answer
        return answer if request is None else checked_answer(request, answer), None
    except TimeoutError as late:
        if deadline.expired():
            raise HungCall("its coroutine is cancelled") from None
        return None, late
    except Exception as raised:
        return None, raised
