"""Random states of Megatron-Core's tensor-parallel room.

Upstream: megatron-core 0.19.2, ``megatron/core/tensor_parallel/random.py``.

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


def repair(module: Any, without_cuda: bool) -> None:
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


def fill_storage(emptied: torch.Tensor, computed: torch.Tensor) -> None:
    """Give the storage of ``emptied``, which was resized to nothing, the bytes of that of ``computed``.

    Every view of that storage has them then, and no version counter moves.
    """
    storage, source = emptied.untyped_storage(), computed.untyped_storage()
    storage.resize_(source.nbytes())
    storage.copy_(source)
