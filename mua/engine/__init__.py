"""What the rollout needs from inference engines: token ids in, token ids with log-probabilities out.

    Sampler.generate   EnginePool (pool.py): the engines of this run
                       RouterClient (router_client.py): the same from another process

Deadlines stand still while the trainer has the engines' memory (:class:`Pauses`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from mua.types import Generation
from mua.utils.errors import DeadlineExceeded


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn. ``temperature`` has no default anywhere in the project."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    """Of the tokens sampled by this request; not of its prompt."""
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Per-request sampling seed; used only by an engine in deterministic mode, which rejects None."""
    order: int = 0
    """Of the requests that wait for a slot of an engine, those of a lower number go first."""
    experts_from: int | None = None
    """Ask for the experts of all tokens from this position of the prompt on; only of an engine that records them."""


class TurnCut(DeadlineExceeded):
    """The deadline of a request passed while the engine worked on it. ``partial`` is what it had sampled."""

    def __init__(self, message: str, partial: Generation) -> None:
        super().__init__(message)
        self.partial = partial
        """``finish`` is "abort"."""


class Sampler(Protocol):
    """The client side of one or several engines."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """Sample a continuation.

        Requests of one ``session`` go to the same engine, so that its prefix cache is hit. Raises
        :class:`EngineError` when the engine fails and :class:`DeadlineExceeded` when
        ``deadline_s`` seconds pass (the request is aborted on the engine), namely :class:`TurnCut` where the engine
        answers the abort with what it had sampled. Canceling the awaiting task aborts the request too.
        """


class Pauses:
    """Deadlines that can be paused. Belongs to one event loop. A second :meth:`begin` changes nothing."""

    def __init__(self) -> None:
        self._earlier = 0.0
        self._began: float | None = None
        self.timeouts: dict[asyncio.Timeout, Deadline] = {}
        """Those that run."""

    def begin(self) -> None:
        """Deadlines stand still from now on."""
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
            self._reschedule()

    def end(self) -> None:
        """They go on."""
        if self._began is not None:
            self._earlier, self._began = self.seconds, None
            self._reschedule()

    @property
    def paused(self) -> bool:
        return self._began is not None

    @property
    def seconds(self) -> float:
        """How long all pauses were, with the present one."""
        return self._earlier + (0.0 if self._began is None else asyncio.get_running_loop().time() - self._began)

    def deadline(self, seconds: float) -> Deadline:
        """One that is over when ``seconds`` have passed from now on, without pauses."""
        return Deadline(self, seconds)

    def _reschedule(self) -> None:
        now = asyncio.get_running_loop().time()
        for timeout, deadline in self.timeouts.items():
            if not timeout.expired():
                timeout.reschedule(None if self.paused else now + deadline.left)


class Deadline:
    """See :meth:`Pauses.deadline`."""

    def __init__(self, pauses: Pauses, seconds: float) -> None:
        self._pauses, self._end = pauses, asyncio.get_running_loop().time() - pauses.seconds + seconds

    @property
    def left(self) -> float:
        """Seconds until it is over, without pauses; 0 at least."""
        return max(0.0, self._end - asyncio.get_running_loop().time() + self._pauses.seconds)

    @asynccontextmanager
    async def timeout(self) -> AsyncIterator[asyncio.Timeout]:
        """``asyncio.timeout`` for what is left."""
        async with asyncio.timeout(None if self._pauses.paused else self.left) as timeout:
            self._pauses.timeouts[timeout] = self
            try:
                yield timeout
            finally:
                del self._pauses.timeouts[timeout]
