"""What packed micro-batches cost in floating-point operations, and how evenly a plan spreads them over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mua.plan.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Workload:
    """Operations of one forward pass; a backward pass takes twice as many of each kind."""

    per_token: int
    """Two for every weight that a token is multiplied with: of a mixture of experts those that it is sent to, and the
    output layer, but no embedding."""
    per_pair: int
    """Of a token and one that it attends to, itself included: two products over all query heads and layers."""

    @classmethod
    def of(cls, architecture: Architecture) -> Self:
        """2 a weight and token, 4 x heads x head dim a pair and layer: the matrix products as Narayanan et al.,
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021, appendix) and Chowdhery
        et al., "PaLM" (2022, appendix B) count them, but of attention only the pairs below the diagonal.

        Norms, rotary embedding and softmax are no matrix products and left out.
        """
        a = architecture
        return cls(2 * a.active_weights, 4 * a.layers * a.heads * a.head_dim)

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """From a model's config.json. Raises ``BridgeError`` for a family the bridge lacks."""
        return cls.of(Architecture.from_hf(hf_config))

    def operations(self, spans: Iterable[tuple[int, int]]) -> int:
        """Of runs of tokens, each ``(start, length)``: its depth in its sequences, whose earlier tokens it attends to,
        and its tokens. A sequence by itself starts at 0; what a prefix tree shares is one run, so that its tokens count
        once, while everything that continues it pays for attending to it."""
        return sum(
            length * self.per_token + (length * start + length * (length + 1) // 2) * self.per_pair
            for start, length in spans
        )


@dataclass(frozen=True, slots=True)
class Spread:
    """How evenly work lies on data-parallel ranks. An imbalance is 1 where all have the same.

    Ranks wait for each other at the end of a step, when gradients are summed: the busiest counts. Where experts are
    spread over data-parallel ranks they wait for each other in every layer, and the busiest counts row by row.
    """

    imbalance_tokens: float
    """Positions computed (padding included) on the rank with most, over the mean of ranks."""
    imbalance_flops: float
    """Operations, likewise."""
    row_imbalance_tokens: float
    """Of rows that run at the same time the largest, over their mean; both are summed over the step first."""
    row_imbalance_flops: float
    """Operations, likewise."""
    utilisation: float
    """Operations on real tokens over what the ranks could have done until the last was ready, 0 to 1: what padding and
    waiting for other ranks leave. Pipeline bubbles and what kernels reach of the hardware are not in it."""

    @classmethod
    def of(
        cls, tokens: Sequence[Sequence[int]], flops: Sequence[Sequence[int]], useful: int, *, lockstep: bool
    ) -> Self:
        """Args:
        tokens: positions of the i-th row of each rank, ``[ranks][rows]``.
        flops: its operations.
        useful: operations on real tokens, over all ranks.
        lockstep: ranks wait for each other in every row.
        """
        work = np.array(flops, dtype=np.float64)
        ranks, rows = _imbalances(work)
        tokens_ranks, tokens_rows = _imbalances(np.array(tokens, dtype=np.float64))
        return cls(tokens_ranks, ranks, tokens_rows, rows, useful / float(work.sum()) / (rows if lockstep else ranks))

    def metrics(self) -> dict[str, float]:
        """By the names of the fields."""
        return {name: getattr(self, name) for name in self.__slots__}


def _imbalances(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Of ranks, and of rows that run at the same time, for positive ``values`` ``[ranks, rows]``."""
    mean = values.sum() / len(values)
    return float(values.sum(1).max() / mean), float(values.max(0).sum() / mean)
