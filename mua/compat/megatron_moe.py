"""Mixture-of-experts helpers of Megatron-Core without Transformer Engine or without CUDA.

Upstream: megatron-core 0.16.1, ``megatron/core/transformer/moe/moe_utils.py``.

* ``te_general_gemm`` is imported only with Transformer Engine but read always, so that any model with experts ends in
  a NameError. It is set to None, as 0.19.2 does itself.
  Goes when: ``tests/unit/test_megatron_compat.py::test_upstream_lacks_te_general_gemm`` fails.
* ``maybe_move_tensor_to_cpu`` converts to numpy only what comes from a GPU; ``all_to_all_single`` then gets a tensor
  where it wants integers. Goes with :mod:`mua.compat.megatron_cpu`.
"""

from __future__ import annotations

from typing import Any

import torch


def repair(module: Any, without_cuda: bool) -> None:
    """Applies both repairs to the imported ``megatron.core.transformer.moe.moe_utils``."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None
    if without_cuda:
        module.maybe_move_tensor_to_cpu = _as_host_data


def _as_host_data(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
