"""Linear, on its own or in a tensor-parallel pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import (
    PARALLEL_MODES,
    TransformerEngineBaseModule,
    parallel_product,
    refuse_delay,
    refuse_overlap,
)


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        assert parallel_mode in PARALLEL_MODES, f"parallel_mode {parallel_mode} not supported"
        assert parameters_split is None, "the stand-in keeps one weight"
        refuse_delay(delay_wgrad_compute)
        self.fuse_wgrad_accumulation, self.parallel_mode = fuse_wgrad_accumulation, parallel_mode
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.rng_tracker_name, self.save_original_input = rng_tracker_name, save_original_input
        self.take_group(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        overlap = self.sequence_parallel and parallel_mode is not None
        refuse_overlap(
            ub_name, ag=overlap and ub_overlap_ag, rs=overlap and (ub_overlap_rs or ub_overlap_rs_dgrad),
            bulk=overlap and (ub_bulk_dgrad or ub_bulk_wgrad),
        )  # fmt: skip
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = divided(out_features, self.tp_size)
        elif parallel_mode == "row":
            self.in_features = divided(in_features, self.tp_size)
        kind = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        shape = (self.out_features, self.in_features)
        self.parameter("weight", shape, kind, init_method, get_rng_state_tracker)
        if bias:
            self.parameter("bias", (self.out_features,), kind, torch.nn.init.zeros_, None)
        else:
            self.bias = torch.empty(0, **kind)
        self.reset_parameters(defer_init=device == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            self.mark_weights(["weight"], ["bias"] if self.use_bias else [], self.parallel_mode, self.sequence_parallel)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        out = parallel_product(self, self.checked(inp), self.weight)
        if self.apply_bias:
            out = out + self.bias  # after the sum over ranks, if there is one
        return (out, self.bias) if self.return_bias else out


def divided(size: int, parts: int) -> int:
    assert size % parts == 0, f"{size} is not divisible by {parts}"
    return size // parts
