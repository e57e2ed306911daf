"""The name that Megatron-Core imports; mua takes log-probabilities elsewhere (``mua/megatron/logprobs.py``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    raise NotImplementedError("the stand-in has no cross entropy")
