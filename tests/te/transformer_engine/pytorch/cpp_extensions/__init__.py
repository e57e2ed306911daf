"""The product that Megatron-Core calls for its router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def general_gemm(
    A: Tensor,
    B: Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> list[Any]:
    """``layout`` is of column-major BLAS: "TN" is ``B @ A.T``, "NN" ``B @ A``, "NT" ``B.T @ A``."""
    assert layout in ("TN", "NN", "NT"), f"GEMM layout {layout} not supported."
    if any((gelu, accumulate, ub is not None, bulk_overlap, bias is not None and grad)):
        raise NotImplementedError("the stand-in multiplies and does nothing else")
    kind = out_dtype or A.dtype
    left = B.reshape(-1, B.shape[-1]).T if layout[1] == "T" else B
    right = A.T if layout[0] == "T" else A
    product = left.to(torch.promote_types(kind, A.dtype)).matmul(right.to(torch.promote_types(kind, A.dtype))).to(kind)
    if bias is not None:
        product = product + bias
    if out is not None:
        product = out.copy_(product)
    return [product, None, None, None]
