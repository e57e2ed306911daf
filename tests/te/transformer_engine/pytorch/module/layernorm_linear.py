"""A norm and the column-parallel product that takes its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import (
    PARALLEL_MODES,
    TransformerEngineBaseModule,
    normed,
    parallel_product,
    refuse_delay,
    refuse_overlap,
)
from transformer_engine.pytorch.module.linear import divided


class LayerNormLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        assert normalization in ("LayerNorm", "RMSNorm"), "Unsupported normalization type!"
        assert parallel_mode in PARALLEL_MODES, f"parallel_mode {parallel_mode} not supported"
        if parallel_mode == "row":
            raise NotImplementedError("Normalization does not support tensor-parallel distribution.")
        if normalization == "LayerNorm" or return_layernorm_output or return_layernorm_output_gathered:
            raise NotImplementedError("the stand-in has RMSNorm, whose output it keeps to itself")
        assert parameters_split is None, "the stand-in keeps one weight"
        refuse_delay(delay_wgrad_compute)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.fuse_wgrad_accumulation, self.parallel_mode = fuse_wgrad_accumulation, parallel_mode
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.take_group(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        overlap = self.sequence_parallel and parallel_mode == "column"
        refuse_overlap(
            ub_name, ag=overlap and ub_overlap_ag, rs=overlap and (ub_overlap_rs or ub_overlap_rs_dgrad),
            bulk=overlap and (ub_bulk_dgrad or ub_bulk_wgrad),
        )  # fmt: skip
        self.in_features = in_features
        self.out_features = divided(out_features, self.tp_size) if parallel_mode == "column" else out_features
        kind = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        begin = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self.parameter("layer_norm_weight", (in_features,), kind, begin, None)
        self.layer_norm_bias = None
        self.parameter("weight", (self.out_features, in_features), kind, init_method, get_rng_state_tracker)
        if bias:
            self.parameter("bias", (self.out_features,), kind, torch.nn.init.zeros_, None)
        else:
            self.bias = torch.empty(0, **kind)
        self.reset_parameters(defer_init=device == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            self.layer_norm_weight.sequence_parallel = self.sequence_parallel
            self.mark_weights(["weight"], ["bias"] if self.use_bias else [], self.parallel_mode, self.sequence_parallel)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        # Under sequence parallelism the norm sees this rank's tokens: its weight's gradient is a part of the whole.
        own = normed(self.checked(inp), self.layer_norm_weight, self.eps, self.zero_centered_gamma)
        out = parallel_product(self, own, self.weight)
        if self.apply_bias:
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out
