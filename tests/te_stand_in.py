"""Transformer Engine's layer specification without Transformer Engine: its names with the arithmetic of torch.

Megatron-Core's own ``get_gpt_layer_with_transformer_engine_spec`` is built, with these modules where it takes
Transformer Engine's: the norm fused into the linear layer that follows it (``layer_norm_weight``), and all experts of a
rank in one module (``weight0``, ``weight1``, ...). Its names and shapes are thereby those of a GPU build, and the model
computes, on CPU, what that build computes up to rounding. Fused kernels, fp8 and communication overlap are not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mua.megatron import model
from mua.megatron.attention import PackedAttention
from mua.megatron.modules import RMSNorm


class NormColumnLinear(ColumnParallelLinear):
    """``TELayerNormColumnParallelLinear``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.epsilon = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.epsilon).to(x.dtype) * self.layer_norm_weight
        return super().forward(normed, *rest, **named)


class _GroupedLinear(torch.nn.Module):
    """``TEGroupedLinear``: ``forward`` takes the tokens of all experts in order, and how many each has."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any
    ) -> None:
        super().__init__()
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(torch.randn(output_size, input_size, dtype=config.params_dtype) * 0.02)
            weight.allreduce = False  # type: ignore[attr-defined]
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        parts = x.split(tokens_per_expert)
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.parameters(), strict=True)]), None


class GroupedColumnLinear(_GroupedLinear):
    """``TEColumnParallelGroupedLinear``."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, pg_collection: Any, **settings: Any):
        super().__init__(num_gemms, input_size, output_size // pg_collection.expt_tp.size(), **settings)


class GroupedRowLinear(_GroupedLinear):
    """``TERowParallelGroupedLinear``; the token dispatcher sums its outputs over the ranks."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, pg_collection: Any, **settings: Any):
        super().__init__(num_gemms, input_size // pg_collection.expt_tp.size(), output_size, **settings)


def _grouped_mlp(grouped: bool) -> Callable[..., TEGroupedMLP]:
    assert grouped
    modules = GroupedMLPSubmodules(linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear)
    return partial(TEGroupedMLP, submodules=modules)


_PROVIDER = SimpleNamespace(
    linear=lambda: ColumnParallelLinear,
    column_parallel_linear=lambda: ColumnParallelLinear,
    row_parallel_linear=lambda: RowParallelLinear,
    fuse_layernorm_and_linear=lambda: True,
    column_parallel_layer_norm_linear=lambda: NormColumnLinear,
    layer_norm=lambda *_, **__: RMSNorm,
    core_attention=lambda: PackedAttention,
    grouped_mlp_modules=_grouped_mlp,
    activation_func=lambda: None,
)
"""Megatron's ``BackendSpecProvider`` with the modules above."""


def layer_spec(config: TransformerConfig, sparse: bool = False) -> ModuleSpec:
    """In place of :func:`mua.megatron.model.layer_spec`."""
    with mock.patch.object(gpt_layer_specs, "TESpecProvider", create=True, return_value=_PROVIDER):
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if sparse else None,
            moe_grouped_gemm=True,
            qk_layernorm=config.qk_layernorm,
        )


@contextmanager
def transformer_engine_names() -> Iterator[None]:
    """Models are built with Transformer Engine's parameter names."""
    with mock.patch.object(model, "layer_spec", layer_spec):
        yield
