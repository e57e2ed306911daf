"""Small faults of Megatron-Core that are no names of devices: random states, experts, collectives that gloo lacks.

Upstream: megatron-core 0.19.2, torch 2.14.1.

``megatron/core/transformer/moe/moe_utils.py``: ``maybe_move_tensor_to_cpu`` converts to numpy only what comes from a
GPU; ``all_to_all_single`` then gets a tensor where it wants integers. Goes with :mod:`mua.compat.megatron_cpu`; earlier
when ``tests/unit/test_megatron_compat.py::test_upstream_still_leaves_host_tensors_as_they_are`` fails.

``megatron/core/tensor_parallel/mappings.py``: gloo has no gather and reduce-scatter of uneven splits, which the
alltoall dispatcher asks for with expert tensor parallelism. Every split is padded to the longest one.
Goes when: ``tests/unit/test_megatron_compat.py::test_gloo_still_lacks_uneven_gather`` fails.

``megatron/core/tensor_parallel/random.py``:

* Without CUDA its tracker reads and writes the generator of a CUDA device through torch's private C names. Here the
  one CPU generator takes that place, and the warning that the CPU state changed inside a fork, true by construction,
  is dropped. Goes with :mod:`mua.compat.megatron_cpu`.
* Without Transformer Engine, ``CheckpointWithoutOutput`` calls three names that only Transformer Engine defines:
  ``recompute_modules=["layernorm"]`` ends in a NameError. They are given their meaning without fp8.
  Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_lacks_recompute_names`` fails.
* What ``CheckpointWithoutOutput`` recomputed it puts into the storage of the tensor that it had emptied by a C++
  function that is compiled while training runs: every node then needs a compiler, ninja and Python's headers, and a
  process that is killed meanwhile leaves a lock on which the next run waits for ever, in a folder that knows no version
  of torch. Here the bytes are copied, as Megatron-Core itself did before: one more copy of a norm's output.
  Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_compiles_while_it_recomputes`` fails.
"""

from __future__ import annotations

import contextlib
import logging
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def repair_moe_utils(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``megatron.core.transformer.moe.moe_utils`` a conversion that takes host tensors too."""
    if without_cuda:
        module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        )


def repair_random(module: Any, without_cuda: bool) -> None:
    """Applies all repairs to the imported ``megatron.core.tensor_parallel.random``."""
    if without_cuda:
        module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        module._set_cuda_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)
        logging.getLogger(module.__name__).addFilter(
            lambda record: "CPU RNG state changed within GPU RNG context" not in str(record.msg)
        )
    if not hasattr(module, "FP8GlobalStateManager"):
        module.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
        module.activation_recompute_forward = lambda *_, **__: contextlib.nullcontext()
        module.fp8_autocast = lambda *_, **__: contextlib.nullcontext()
    module._get_share_storage = lambda: fill_storage


def fill_storage(emptied: Tensor, computed: Tensor) -> None:
    """Give the storage of ``emptied``, which was resized to nothing, the bytes of that of ``computed``.

    Every view of that storage has them then, and no version counter moves.
    """
    storage, source = emptied.untyped_storage(), computed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)


def repair_mappings(module: Any, without_cuda: bool) -> None:
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
