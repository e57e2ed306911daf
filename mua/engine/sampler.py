"""What the rollout needs from an inference engine: token ids in, token ids with log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
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
    """The deadline of a request passed while the engine was at work on it; it told what it had written."""

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
        answers the abort with what it had sampled. Cancelling the awaiting task aborts the request too.
        """
