"""Mixture-of-experts helpers of Megatron-Core without CUDA.

Upstream: megatron-core 0.19.2, ``megatron/core/transformer/moe/moe_utils.py``. ``maybe_move_tensor_to_cpu`` converts to
numpy only what comes from a GPU; ``all_to_all_single`` then gets a tensor where it wants integers.
Goes with :mod:`mua.compat.megatron_cpu`; earlier when
``tests/unit/test_megatron_compat.py::test_upstream_still_leaves_host_tensors_as_they_are`` fails.
"""

from __future__ import annotations

from typing import Any

import torch


def repair(module: Any, without_cuda: bool) -> None:
    """Gives the imported ``megatron.core.transformer.moe.moe_utils`` a conversion that takes host tensors too."""
    if without_cuda:
        module.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
            tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
        )
