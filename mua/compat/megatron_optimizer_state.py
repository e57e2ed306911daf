"""What Megatron-Core's optimizers keep of each parameter: read, and set, where it lies.

Upstream: megatron-core 0.19.2, ``megatron/core/optimizer``. Its own checkpoints of a distributed optimizer that any
layout can read gather main weights and moments of the whole data-parallel group in the host memory of every rank, and
one rank writes them. Here a rank gives the elements that it updates, from the device they are on.
Goes when: upstream offers a parameter's state by public names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor

from mua.compat.megatron_optimizer import initialize_state, zero_state

WEIGHT = "weight"
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
"""Of every parameter: the float32 weight and AdamW's moments."""


@dataclass(frozen=True, slots=True)
class ParameterState:
    """Elements ``first`` to ``end`` of one of this rank's parameters, whose state is this rank's to save."""

    parameter: Tensor
    first: int
    end: int
    _part: Any
    _main: Tensor | None
    """The whole main weight, where every data-parallel rank holds it."""

    @torch.no_grad()
    def read(self) -> dict[str, Tensor]:
        """By each of :data:`KINDS`, float32 ``[end - first]``; mostly not a copy."""
        if self._main is None:
            found = self._part._get_main_param_and_optimizer_states(self.parameter)
            found[WEIGHT] = found.pop("param")
            return {kind: found[kind].detach().float().reshape(-1) for kind in KINDS}
        whole = {WEIGHT: self._main, **self._part.optimizer.state[self._main]}
        return {kind: whole[kind].detach().reshape(-1)[self.first : self.end] for kind in KINDS}

    @torch.no_grad()
    def write(self, values: dict[str, Tensor]) -> None:
        """Set what :meth:`read` gives; where every rank holds the whole state, ``values`` are of all elements."""
        if self._main is None:
            # Of an optimizer that is partly on the host the device never holds all: :func:`settle` moves its share.
            hybrid = isinstance(self._part.optimizer, HybridDeviceOptimizer)
            device = "cpu" if hybrid else self.parameter.device
            found: dict[str, Any] = {"step": None}  # of torch's Adam: :func:`settle` sets it
            found |= {"param" if kind == WEIGHT else kind: value.to(device) for kind, value in values.items()}
            self._part._set_main_param_and_optimizer_states(self.parameter, found)
            return
        for kind, target in {WEIGHT: self._main, **self._part.optimizer.state[self._main]}.items():
            if kind in KINDS:
                target.copy_(values[kind].view_as(target))

    @property
    def held(self) -> tuple[int, int]:
        """First and end of the elements that this rank needs when it loads."""
        return (self.first, self.end) if self._main is None else (0, self.parameter.numel())


def parameter_states(optimizer: ChainedOptimizer) -> Iterator[ParameterState]:
    """The state of all parameters that this rank updates, moments of zero where there was no step yet.

    Data-parallel ranks divide the elements of a parameter among them: each element is one rank's.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            zero_state(part.optimizer)
        else:
            initialize_state(part)
        if isinstance(part, DistributedOptimizer):
            for parameter in part.model_param_group_index_map:
                span = part._get_model_param_range_map(parameter)["param"]
                yield ParameterState(parameter, span.start, span.end, part, None)
            continue
        for parameter, main in _pairs(part):
            group = (
                parallel_state.get_data_parallel_group(with_context_parallel=True)
                if getattr(parameter, "allreduce", True)
                else parallel_state.get_expert_data_parallel_group()
            )
            first, end = (parameter.numel() * (group.rank() + more) // group.size() for more in (0, 1))
            yield ParameterState(parameter, first, end, part, main)


def _pairs(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters of the model with their main weights, of an optimizer that every data-parallel rank has whole."""
    if not hasattr(part, "float16_groups"):
        yield from ((parameter, parameter) for group in part.optimizer.param_groups for parameter in group["params"])
        return
    for parameters, mains in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
        yield from zip(parameters, mains, strict=True)
    yield from ((parameter, parameter) for group in part.fp32_from_fp32_groups for parameter in group)


def settle(optimizer: ChainedOptimizer, steps: int) -> None:
    """Ends a loading: ``steps`` were made, and copies of weights and moments on other devices follow."""
    for part in optimizer.chained_optimizers:
        inner, counting = part.optimizer, part.optimizer
        for state in inner.state.values() if inner is not None else ():
            if "step" in state:  # torch's own counts for each parameter
                state["step"].fill_(steps)
        if isinstance(inner, HybridDeviceOptimizer):
            inner._init_sub_optimizers()
            inner._sync_hdo_param_groups_to_sub_optimizers()
            inner._sync_hdo_state_to_sub_optimizers()
            counting = inner.gpu_optimizer
        for group in counting.param_groups if counting is not None else ():
            group["step"] = steps
        if getattr(inner, "store_param_remainders", False):
            for chunk in part.model_chunks:
                chunk.start_param_sync(force_sync=True)
