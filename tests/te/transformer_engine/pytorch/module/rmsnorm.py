"""RMSNorm. It is one of Transformer Engine's basic operations there, and so keeps an (empty) extra state."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import normed


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: Iterable[int] | int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError("one of `normalized_shape` and `hidden_size` (deprecated) must be provided")
        if params_dtype is not None and "dtype" in kwargs:
            raise RuntimeError("Both `dtype` and `params_dtype` (deprecated) kwargs are provided")
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", params_dtype)
        kwargs.pop("sm_margin", None)
        if kwargs:
            raise TypeError(f"RMSNorm got an unexpected keyword argument {next(iter(kwargs))!r}")
        shape = hidden_size if normalized_shape is None else normalized_shape
        self._shape = (shape,) if isinstance(shape, int) else tuple(shape)  # type: ignore[arg-type]
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(self._shape, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        with torch.no_grad():
            self.weight.fill_(0.0 if self.zero_centered_gamma else 1.0)
        if self.sequence_parallel is not None:
            self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> Tensor:
        size = math.prod(self._shape)
        if input_.shape[-len(self._shape) :] != self._shape:
            raise ValueError(f"Input tensor (shape={tuple(input_.size())}) and weight tensor ({self._shape}) differ")
        flat = input_.reshape(*input_.shape[: -len(self._shape)], size)
        return normed(flat, self.weight.view(size), self.eps, self.zero_centered_gamma).view(input_.shape)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        if state is not None and state.numel():
            raise RuntimeError("RMSNorm has no state")
