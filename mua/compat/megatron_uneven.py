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
        """Concatenates ``[sizes[r], ...]`` of every rank to ``[sum(sizes), ...]``."""
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        whole = input_.new_empty((max(sizes) * len(sizes), *input_.shape[1:]))
        dist.all_gather_into_tensor(whole, _padded(input_, max(sizes)), group=group)
        return torch.cat([part[:size] for part, size in zip(whole.chunk(len(sizes)), sizes, strict=True)])

    def scatter(input_: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Any:
        """Sums ``[sum(sizes), ...]`` over ranks and returns this rank's ``[sizes[rank], ...]``."""
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, input_split_sizes, use_global_buffer)
        sizes = [int(size) for size in input_split_sizes]
        local = input_.new_empty((max(sizes), *input_.shape[1:]))
        padded = torch.cat([_padded(part, max(sizes)) for part in input_.split(sizes)])
        dist.reduce_scatter_tensor(local, padded, group=group)
        return local[: sizes[group.rank()]].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather, scatter


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))]).contiguous()
