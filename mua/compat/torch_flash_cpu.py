"""Fused attention on the CPU that also gives its log-normalizers, and the gradients that belong to given ones.

Reason: softmaxes over parts of the keys are joined by their normalizers, which ``scaled_dot_product_attention`` does
not return. ``flex_attention`` does, but has no backward pass on the CPU. These are the operators that
``scaled_dot_product_attention`` itself calls there.

Upstream: torch 2.14.1. Goes when:
``tests/unit/test_megatron_attention.py::test_upstream_flex_attention_has_no_backward_pass_on_the_cpu`` fails.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention; where ``causal``, query i sees keys 0 to i.

    Args:
        query: float32 or float64 ``[batch, heads, queries, head dim]``, any strides but 1 in the last dimension.
        key: ``[batch, heads, keys, head dim]``, and so ``value``; heads may be expanded.
        scale: factor on the scores.

    Returns:
        the output, shaped as ``query``, and ``log sum exp`` of each query's scores, ``[batch, heads, queries]``.
    """
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    return result


def flash_attention_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normalizer: Tensor, *, causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients with respect to query, key and value.

    Probabilities are recomputed as ``exp(score - normalizer)``: with output and normalizer of a softmax over more keys
    than these, the result is what these keys contribute to the gradients of that softmax.
    """
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, normalizer, 0.0, causal, scale=scale
    )
    return result
