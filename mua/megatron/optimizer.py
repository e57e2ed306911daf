"""Data-parallel wrapping, AdamW and its schedule, all Megatron-Core's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mua.compat.megatron_adam import initialize_state
from mua.compat.megatron_offload import OF_HYBRID, settle_steps, zero_state
from mua.config.schema import MegatronConfig, OptimizerConfig
from mua.megatron.gradients import GradientWatch
from mua.megatron.settings import data_parallel_config, optimizer_config
from mua.utils.errors import ConfigError

_RESTORED = frozenset({"params", "step"})
_SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Megatron pairs saved and present parameter groups by these, among others. Here every group has the configuration's,
and a run may be continued with others."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step did."""

    applied: bool
    """False when the gradient norm was not finite: nothing was changed."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    """The rate this step used (or would have used)."""


def wrap_data_parallel(chunks: list[GPTModel], megatron: MegatronConfig) -> list[DistributedDataParallel]:
    """Gradient buffers, summed (never averaged) over data-parallel ranks, while the backward pass goes on if so asked.

    Where weights are gathered while a forward pass goes on, :class:`mua.megatron.network.Network` says when; until then
    they are whole.
    """
    config = data_parallel_config(megatron)
    wrapped = [
        DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if config.overlap_grad_reduce:
        each = [chunk.no_sync for chunk in wrapped]
        chunks[0].config.no_sync_func = each if len(each) > 1 else each[0]
    if config.overlap_param_gather:
        for chunk in wrapped:
            chunk.disable_forward_pre_hook(param_sync=False)
    return wrapped


class Optimizer:
    """Megatron's optimizer and schedule behind one step.

    Args:
        chunks: wrapped by :func:`wrap_data_parallel`.
        total_steps: optimizer steps of the run, where a decaying schedule ends.
        section: of the configuration that ``config`` is, for messages.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        config: OptimizerConfig,
        megatron: MegatronConfig,
        total_steps: int,
        *,
        section: str = "optimizer",
    ) -> None:
        if config.min_learning_rate > config.learning_rate:
            raise ConfigError(
                f"{section}.min_learning_rate {config.min_learning_rate} is above {section}.learning_rate "
                f"{config.learning_rate}"
            )
        if config.schedule != "constant" and config.warmup_steps >= total_steps:
            raise ConfigError(
                f"{section}.warmup_steps {config.warmup_steps} leaves none of the run's {total_steps} steps to decay "
                f"in; lower it or set {section}.schedule to constant"
            )
        self.megatron: ChainedOptimizer = get_megatron_optimizer(
            optimizer_config(config, chunks[0].config.params_dtype, megatron, section=section),
            chunks,
        )
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            lr_warmup_steps=config.warmup_steps,
            lr_decay_steps=max(total_steps, config.warmup_steps + 1),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=total_steps,
            wd_incr_style="constant",
        )
        self._clip = config.clip_grad
        self.watch: GradientWatch | None = None
        """What is told every step's gradients before they are clipped."""

    def step(self) -> StepResult:
        """Clips and applies the gradients, unless their norm is infinite or no number, then moves the schedule on."""
        learning_rate = self.learning_rate
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if self.watch is not None:
            parts = self.megatron.chained_optimizers
            self.watch.note([grad for part in parts for grad in part.get_grads_for_grad_norm()])
        if not math.isfinite(norm):
            return StepResult(False, norm, learning_rate)
        if self._clip > 0:
            for part in self.megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(
                    part.get_parameters(),
                    max_norm=self._clip,
                    total_norm=norm,
                    use_decoupled_grad=part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
                )
        self.megatron.step_with_ready_grads()
        self.scheduler.step(1)
        return StepResult(True, norm, learning_rate)

    @property
    def learning_rate(self) -> float:
        """The rate the next step uses."""
        return float(self.megatron.param_groups[0]["lr"])

    @property
    def steps(self) -> int:
        """Steps applied so far, which is the schedule's position."""
        return int(self.scheduler.num_steps)

    def sharded_state_dict(self, model: dict[str, Any], metadata: dict[str, Any], loading: bool) -> dict[str, Any]:
        """Moments and float32 weights in Megatron's sharded form, next to the model's."""
        for part in self.megatron.chained_optimizers:  # zero moments where no step was made yet
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                zero_state(part.optimizer)
            else:
                initialize_state(part)
        state: dict[str, Any] = self.megatron.sharded_state_dict(model, is_loading=loading, metadata=metadata)
        for group in _saved_groups(state):
            for key in OF_HYBRID:  # where state lies is the configuration's to say, also of a run that goes on
                group.pop(key, None)
        return state

    def load_state_dict(self, state: dict[str, Any], steps: int) -> None:
        """Restores moments and float32 weights; rates, betas and decay stay those of the configuration."""
        for group in _saved_groups(state):
            present = self.megatron.param_groups[0]
            for key in _SCHEDULED:
                group.pop(key, None)
            group.update({key: present[key] for key in _SCHEDULED if key in present})
        configured = [{k: v for k, v in group.items() if k not in _RESTORED} for group in self.megatron.param_groups]
        with torch.no_grad():  # float32 parameters are leaves that are written in place
            self.megatron.load_state_dict(state)
        for group, values in zip(self.megatron.param_groups, configured, strict=True):
            group.update(values)
        for part in self.megatron.chained_optimizers:
            if isinstance(part.optimizer, HybridDeviceOptimizer):
                settle_steps(part.optimizer)
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)


def _saved_groups(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups in the state of one optimizer or of a chain of them."""
    for key, value in state.items():
        if key == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _saved_groups(value)
