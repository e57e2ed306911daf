"""Gather and reduce-scatter of uneven splits, which gloo does not have.

Upstream: torch 2.14.1 (gloo) with megatron-core 0.19.2, ``megatron/core/tensor_parallel/mappings.py``; met by the
alltoall dispatcher with expert tensor parallelism. Every split is padded to the longest one. Goes when:
``tests/unit/test_megatron_compat.py::test_gloo_still_lacks_uneven_gather`` fails.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def repair(module: Any, without_cuda: bool) -> None:
    """Replaces the two collectives of the imported ``megatron.core.tensor_parallel.mappings`` where gloo serves."""
    if not without_cuda:
        return
    even_gather, even_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather(input_: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        return _gather(input_, group, [int(size) for size in output_split_sizes])

    def scatter(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        return _reduce_scatter(input_, group, [int(size) for size in input_split_sizes])

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, scatter


def _gather(local: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """Concatenates ``[sizes[r], ...]`` of every rank to ``[sum(sizes), ...]``."""
    longest = max(sizes)
    whole = local.new_empty((longest * len(sizes), *local.shape[1:]))
    dist.all_gather_into_tensor(whole, _padded(local, longest), group=group)
    return torch.cat([part[:size] for part, size in zip(whole.chunk(len(sizes)), sizes, strict=True)])


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
    """Sums ``[sum(sizes), ...]`` over ranks and returns this rank's ``[sizes[rank], ...]``."""
    longest = max(sizes)
    local = whole.new_empty((longest, *whole.shape[1:]))
    dist.reduce_scatter_tensor(local, torch.cat([_padded(part, longest) for part in whole.split(sizes)]), group=group)
    return local[: sizes[group.rank()]].contiguous()


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))]).contiguous()
