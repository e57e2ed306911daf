"""Threads for blocking calls that may never return.

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
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias

CallOutcome: TypeAlias = tuple[Any, BaseException | None]
"""What a call returned, or what it raised. Exceptions travel as values: a future refuses StopIteration, SystemExit
must not kill the thread, and a CancelledError out of a tool is no cancellation of the episode."""
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

        Cancelling the wait leaves the call running; it can be waited for again.
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
