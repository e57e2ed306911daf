"""Context parallelism: how one packed micro-batch is divided over the ranks that share it.

Each sequence of the row is cut into ``2 * size`` chunks of equal length, and rank ``r`` holds chunks ``r`` and
``2 * size - 1 - r`` of it (zigzag), so that under causal attention all ranks have the same work::

    2 ranks, one sequence:   | 0 | 1 | 1 | 0 |      a rank's positions lie in the row's order: head chunk, tail chunk
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

IndexArray: TypeAlias = npt.NDArray[np.int64]


def zigzag(lengths: Sequence[int], size: int, rank: int) -> IndexArray:
    """The positions of a row that a rank holds, in the order in which it holds them: int64 ``[tokens / size]``.

    Args:
        lengths: tokens of each sequence, multiples of ``2 * size`` (any length if ``size`` is 1).
        size: context-parallel ranks.
    """
    if size == 1:
        return np.arange(sum(lengths), dtype=np.int64)
    pieces = [np.zeros(0, dtype=np.int64)]
    start = 0
    for length in lengths:
        chunk = length // (2 * size)
        pieces += [start + part * chunk + np.arange(chunk) for part in (rank, 2 * size - 1 - rank)]
        start += length
    return np.concatenate(pieces)


def row_order(lengths: Sequence[int], size: int) -> IndexArray:
    """Where each position of a row is found in the concatenation of all ranks' parts: int64 ``[tokens]``."""
    return np.argsort(np.concatenate([zigzag(lengths, size, rank) for rank in range(size)]))


def gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Concatenates every rank's ``[n, ...]`` to ``[size * n, ...]``; the gradient is summed back over the ranks."""
    whole: Tensor = _Gather.apply(part, group)
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = part.new_empty((group.size() * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (whole,) = gradients
        part = whole.new_empty((whole.shape[0] // ctx.group.size(), *whole.shape[1:]))
        dist.reduce_scatter_tensor(part, whole.contiguous(), group=ctx.group)
        return part, None
