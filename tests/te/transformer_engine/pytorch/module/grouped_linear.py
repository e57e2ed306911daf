"""One product per expert, over the tokens of each in order. It communicates nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.module.base import (
    PARALLEL_MODES,
    Product,
    TransformerEngineBaseModule,
    refuse_delay,
)
from transformer_engine.pytorch.module.linear import divided


class GroupedLinear(TransformerEngineBaseModule):
    def __init__(
        self,
        num_gemms: int,
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
        device: torch.device | str = "cuda",
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None:
        super().__init__(name)
        if ub_overlap_rs or ub_overlap_ag:
            raise ValueError("GroupedLinear doesn't support Userbuffer overlap.")
        if single_grouped_weight or single_grouped_bias or use_grouped_tensor or bias:
            raise NotImplementedError("the stand-in has a weight per expert and no bias")
        if parallel_mode not in PARALLEL_MODES:
            raise ValueError(f"parallel_mode {parallel_mode!r} not supported.")
        refuse_delay(delay_wgrad_compute)
        self.num_gemms, self.fuse_wgrad_accumulation, self.parallel_mode = (
            num_gemms, fuse_wgrad_accumulation, parallel_mode,
        )  # fmt: skip
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        self.single_grouped_weight, self.single_grouped_bias = single_grouped_weight, single_grouped_bias
        self.rng_tracker_name, self.save_original_input = rng_tracker_name, save_original_input
        self.take_group(tp_group, tp_size)
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.in_features = divided(in_features, self.tp_size) if parallel_mode == "row" else in_features
        self.out_features = divided(out_features, self.tp_size) if parallel_mode == "column" else out_features
        kind = {"dtype": params_dtype or torch.get_default_dtype(), "device": device}
        for index in range(num_gemms):
            shape = (self.out_features, self.in_features)
            self.parameter(f"weight{index}", shape, kind, init_method, get_rng_state_tracker)
        self.reset_parameters(defer_init=torch.device(device).type == "meta")

    def reset_parameters(self, defer_init: bool = False) -> None:
        super().reset_parameters(defer_init)
        if not defer_init:
            names = [f"weight{index}" for index in range(self.num_gemms)]
            self.mark_weights(names, [], self.parallel_mode, self.sequence_parallel)

    def forward(
        self,
        inp: Tensor,
        m_splits: Any,
        is_first_microbatch: bool | None = None,
        out: Tensor | None = None,
        dgrad_out: Tensor | None = None,
    ) -> Any:
        if out is not None or dgrad_out is not None:
            raise NotImplementedError("the stand-in allocates its results")
        splits = m_splits.tolist() if isinstance(m_splits, Tensor) else list(m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"Shape of splits ({len(splits)}) does not match number of GEMMs ({self.num_gemms}).")
        if sum(splits) != inp.shape[0]:
            raise ValueError(f"splits hold {sum(splits)} tokens, the input {inp.shape[0]}")
        self.checked(inp)
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        parts = zip(inp.split(splits), weights, strict=True)
        return torch.cat([Product.apply(part, weight, self.fuse_wgrad_accumulation) for part, weight in parts])
