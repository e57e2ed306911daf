"""What a loss is to the training backend. The single home of these types: backend and losses both import them.

A loss is called once per micro-batch, on this rank's trained tokens only, as flat float32 tensors of shape
``[N]`` (``N`` may be 0). Everything it returns can be added up (or maximised) over micro-batches and ranks in
any order, because the global denominators are already inside ``weights``; means are taken once, at the very
end, by :func:`mua.algorithms.losses.finish_metrics`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True, slots=True)
class TokenTensors:
    """What the batch knows about each trained token. All ``[N]``, float32, without gradient."""

    weights: Tensor
    """Loss weight with the global denominator divided in (:class:`mua.types.TrainSequence`)."""
    advantages: Tensor
    behaviour_logprobs: Tensor
    """Log-probability under the policy that sampled, as the engine reported it."""
    old_logprobs: Tensor
    """What the clipped ratio is taken against."""
    reference_logprobs: Tensor | None = None
    """Under the frozen reference policy; None when no reference is kept."""
    old_values: Tensor | None = None
    """The critic's values before this batch's first step; None without a critic."""
    returns: Tensor | None = None
    """What the critic's values are trained towards; None without a critic."""
    sequence: Tensor | None = None
    """int64 ``[N]``: which sequence of the micro-batch each token belongs to, from 0."""
    sequences: int = 0
    """Sequences of the micro-batch. A sequence lies in one micro-batch, but may be spread over several ranks."""
    add_up: Callable[[Tensor], Tensor] = _alone
    """Adds a tensor with one value a sequence over the ranks that share the sequences, without gradient."""

    def mean_of_sequence(self, values: Tensor) -> Tensor:
        """For each token the mean of ``values`` (``[N]``) over its whole sequence, without gradient."""
        assert self.sequence is not None, "the training backend says which sequence a token belongs to"
        sums = values.new_zeros(2, self.sequences)
        sums[0].index_add_(0, self.sequence, values.detach())
        sums[1].index_add_(0, self.sequence, torch.ones_like(values))
        total, count = self.add_up(sums)
        return (total / count.clamp(min=1))[self.sequence]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What one micro-batch contributes."""

    loss: Tensor
    """Scalar with gradient: the weighted *sum* over the tokens given."""
    sums: dict[str, Tensor]
    """Detached scalars, added over micro-batches and ranks. Holds the plain count ``tokens``."""
    maxima: dict[str, Tensor]
    """Detached scalars, maximised over micro-batches and ranks."""


class LossFunction(Protocol):
    """Turns log-probabilities of the trained tokens into a loss."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: TokenTensors) -> LossTerms:
        """Compute the terms of one micro-batch.

        ``logprobs`` (``[N]``, float32, with gradient) are of ``logits / temperature`` under the current policy;
        ``entropy`` (``[N]``, nats) is that of the whole next-token distribution.
        """


class ValueLossFunction(Protocol):
    """Turns the critic's values of the trained tokens into a loss."""

    def __call__(self, values: Tensor, tokens: TokenTensors) -> LossTerms:
        """Compute the terms of one micro-batch.

        ``values`` (``[N]``, float32, with gradient) are of what comes before each trained token.
        """
