"""Deadlines that stand still while the trainer has the engines' memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager


class Pauses:
    """Belongs to one event loop. Pauses do not nest: a second ``begin`` changes nothing."""

    def __init__(self) -> None:
        self._earlier = 0.0
        self._began: float | None = None
        self._timeouts: dict[asyncio.Timeout, Deadline] = {}

    def begin(self) -> None:
        """Deadlines stand still from now on."""
        if self._began is None:
            self._began = _now()
            for timeout in self._open():
                timeout.reschedule(None)

    def end(self) -> None:
        """They go on."""
        if self._began is not None:
            self._earlier += _now() - self._began
            self._began = None
            for timeout in self._open():
                timeout.reschedule(_now() + self._timeouts[timeout].left)

    @property
    def seconds(self) -> float:
        """How long all pauses were, with the present one."""
        return self._earlier + (0.0 if self._began is None else _now() - self._began)

    def deadline(self, seconds: float) -> Deadline:
        """One that is over when ``seconds`` have passed from now on, without pauses."""
        return Deadline(self, seconds)

    @asynccontextmanager
    async def timeout(self, deadline: Deadline) -> AsyncIterator[asyncio.Timeout]:
        """``asyncio.timeout`` for what is left until ``deadline``."""
        async with asyncio.timeout(None if self._began is not None else deadline.left) as timeout:
            self._timeouts[timeout] = deadline
            try:
                yield timeout
            finally:
                del self._timeouts[timeout]

    def _open(self) -> list[asyncio.Timeout]:
        return [timeout for timeout in self._timeouts if not timeout.expired()]


class Deadline:
    """See :meth:`Pauses.deadline`."""

    def __init__(self, pauses: Pauses, seconds: float) -> None:
        self._pauses, self._seconds = pauses, seconds
        self._began, self._paused = _now(), pauses.seconds

    @property
    def left(self) -> float:
        """Seconds until it is over, without pauses; 0 at least."""
        passed = _now() - self._began - (self._pauses.seconds - self._paused)
        return max(0.0, self._seconds - passed)

    def timeout(self) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """``asyncio.timeout`` for what is left."""
        return self._pauses.timeout(self)


def _now() -> float:
    return asyncio.get_running_loop().time()
