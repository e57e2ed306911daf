"""Random states of Megatron-Core's tensor-parallel room.

Upstream: megatron-core 0.19.2, ``megatron/core/tensor_parallel/random.py``.

* Without CUDA its tracker reads and writes the generator of a CUDA device through torch's private C names. Here the
  one CPU generator takes that place, and the warning that the CPU state changed inside a fork, true by construction,
  is dropped. Goes with :mod:`mua.compat.megatron_cpu`.
* Without Transformer Engine, ``CheckpointWithoutOutput`` calls three names that only Transformer Engine defines:
  ``recompute_modules=["layernorm"]`` ends in a NameError. They are given their meaning without fp8.
  Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_lacks_recompute_names`` fails.
"""

from __future__ import annotations

import contextlib
import logging
import types
from typing import Any

import torch


def repair(module: Any, without_cuda: bool) -> None:
    """Applies both repairs to the imported ``megatron.core.tensor_parallel.random``."""
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
