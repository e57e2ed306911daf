"""What an engine had sampled of a turn when it was told to stop goes on as the same turn on another engine.

The rest is asked for from prompt + sampled ids. SGLang draws a token from (``sampling_seed``, position in the
sequence), its ``multinomial_with_seed``, so that with a seed the rest is the one the first engine would have sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mua.engine.sampler import SamplingParams
from mua.types import Generation


class PartialTurn:
    """One turn, sampled in pieces. Each piece keeps its log-probabilities and the versions that sampled it."""

    def __init__(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._prompt, self._params = list(prompt_ids), params
        self.sampled: Generation | None = None
        """So far."""

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return 0 if self.sampled is None else len(self.sampled.ids)

    @property
    def prompt_ids(self) -> list[int]:
        """What the next engine is given."""
        return self._prompt if self.sampled is None else [*self._prompt, *self.sampled.ids.tolist()]

    @property
    def params(self) -> SamplingParams:
        """How the rest is to be sampled."""
        known = self._params.experts_from
        if not self.tokens:
            return self._params
        if known is not None:  # of the last sampled token on: it was not routed yet
            known = len(self.prompt_ids) - 1
        left = self._params.max_new_tokens - self.tokens
        return replace(self._params, max_new_tokens=left, experts_from=known)

    def add(self, piece: Generation) -> Generation:
        """The turn with ``piece`` behind what there is; it becomes :attr:`sampled`."""
        before = self.sampled
        if before is None or not self.tokens:
            # A piece without a token has no experts to go on from.
            self.sampled = piece if len(piece.ids) or piece.finish != "abort" else None
            return piece
        if not len(piece.ids):
            self.sampled = replace(before, finish=piece.finish, waited=before.waited + piece.waited)
            return self.sampled
        experts = None
        if before.experts is not None and piece.experts is not None:
            experts = np.concatenate([before.experts, piece.experts])  # of two types the wider holds both
        self.sampled = Generation(
            np.concatenate([before.ids, piece.ids]), np.concatenate([before.logprobs, piece.logprobs]), piece.finish,
            piece.version, np.concatenate([before.versions, piece.versions]), before.cached_tokens, experts,
            before.waited + piece.waited,
            before.engine if piece.engine in before.engine.split(", ") else f"{before.engine}, {piece.engine}",
        )  # fmt: skip
        return self.sampled

    @property
    def full(self) -> bool:
        """Whether there is no room for a further token."""
        return self.tokens >= self._params.max_new_tokens
