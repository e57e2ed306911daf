"""One call for a list of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class MultiTensorApply:
    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        if any(len(tensors) != len(tensor_lists[0]) for tensors in tensor_lists):
            raise RuntimeError("Expected aligned multi-tensor lists.")
        keep = [tensor.numel() > 0 for tensor in tensor_lists[0]]
        lists = [[tensor for tensor, kept in zip(tensors, keep, strict=True) if kept] for tensors in tensor_lists]
        return op(self.chunk_size, noop_flag_buffer, lists, *args) if lists[0] else None


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool | None = False
) -> tuple[Tensor, Tensor]:
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else torch.empty(0)


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: float) -> None:
    if not isinstance(scale, float):
        raise TypeError(f"scale must be a float, not {type(scale).__name__}")
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)
