"""All experts of a rank in one product, without Transformer Engine: torch's grouped matrix product.

Megatron-Core's local experts run one after the other, each waiting for the host to learn how many tokens it has. Here
the modules, and so the names in checkpoints and bridge, are Megatron's, and their weights are multiplied together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from mua.compat.forward_pre_hooks import run_forward_pre_hooks

_ALIGNED = 16
"""Bytes that strides of the grouped product are multiples of."""


class GroupedExperts(SequentialMLP):
    """Megatron's sequential experts with SwiGLU, computed as two grouped products.

    What torch's product does not take (:func:`takes`) goes the way of the base class, one expert after the other.
    """

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Output of every expert for its tokens, weighted by the router.

        Args:
            hidden: ``[tokens, hidden]``, in the order of experts.
            tokens_per_expert: int64 ``[experts]``, on the host or on the device.
            probs: ``[tokens]``.

        Returns:
            ``[tokens, hidden]``, and None, as there is no bias.
        """
        first = [self._weight_of(expert.linear_fc1) for expert in self.local_experts]
        second = [self._weight_of(expert.linear_fc2) for expert in self.local_experts]
        if not self._is_swiglu() or not takes(hidden, first[0].shape[0] // 2):
            return super().forward(hidden, tokens_per_expert, probs)
        ends = tokens_per_expert.cumsum(0).to(hidden.device, torch.int32, non_blocking=True)
        inner = self._activated(grouped_product(hidden, first, ends), probs)
        return grouped_product(inner, second, ends), None

    def _is_swiglu(self) -> bool:
        config = self.config
        plain = not (config.add_bias_linear or config.fp8 or config.fp4 or config.moe_apply_probs_on_input)
        shape = config.activation_func is F.silu and config.gated_linear_unit
        return plain and shape and config.activation_func_clamp_value is None and not config.glu_linear_offset

    def _activated(self, gate_up: Tensor, probs: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            fused: Tensor = weighted_bias_swiglu_impl(gate_up, None, probs[:, None], False)
            return fused
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up * probs[:, None]).to(gate_up.dtype)

    @staticmethod
    def _weight_of(linear: Any) -> Tensor:
        """The weight, gathered first where data-parallel ranks gather parameters while the forward pass runs."""
        run_forward_pre_hooks(linear)
        weight: Tensor = linear.weight
        return weight


def takes(hidden: Tensor, inner: int) -> bool:
    """Whether torch's grouped product takes tokens ``[tokens, hidden]`` and experts of the inner size ``inner``."""
    if any(size * hidden.element_size() % _ALIGNED for size in (hidden.shape[-1], inner)):
        return False
    if hidden.is_cuda:
        return hidden.dtype == torch.bfloat16 and _is_hopper(hidden.device)
    return hasattr(F, "grouped_mm")


@cache
def _is_hopper(device: torch.device) -> bool:
    """Or later: before it torch's product is a loop over experts."""
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device) >= (9, 0)


def grouped_product(inp: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Tokens of each expert times its weight.

    Args:
        inp: ``[tokens, n]``, in the order of experts.
        weights: ``[m, n]`` each.
        ends: int32 ``[experts]``, behind the last token of each.

    Returns:
        ``[tokens, m]``
    """
    product: Tensor = _Grouped.apply(inp, ends, *weights)
    return product


class _Grouped(torch.autograd.Function):
    """Weights are put side by side for each product, and again for its gradient, rather than kept twice."""

    @staticmethod
    def forward(ctx: Any, inp: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(inp, ends, *weights)
        return F.grouped_mm(inp, torch.stack(weights).transpose(-2, -1), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inp, ends, *weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        by_input = F.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        by_weight: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[2:]):
            by_weight = F.grouped_mm(grad.T, inp, offs=ends).unbind()
        return by_input, None, *by_weight
