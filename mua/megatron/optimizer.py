"""Data-parallel wrapping, AdamW and its schedule, all Megatron-Core's own, and a watch of the gradients applied."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mua.config.schema import MegatronConfig, OptimizerConfig
from mua.megatron.settings import data_parallel_config, optimizer_config
from mua.utils.collective import gathered


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
        self.megatron: ChainedOptimizer = get_megatron_optimizer(
            optimizer_config(config, chunks[0].config.params_dtype, megatron, section=section), chunks
        )
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            # Rises to its peak at step W - 1, from step 0 on, so that step n has (n + 1) / W of it and none has 0.
            init_lr=config.learning_rate / max(1, config.warmup_steps),
            max_lr=config.learning_rate,
            min_lr=config.min_learning_rate,
            lr_warmup_steps=max(0, config.warmup_steps - 1),
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
        """Clips and applies the gradients, unless their norm is infinite or no number. The schedule moves on anyway."""
        learning_rate = self.learning_rate
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if self.watch is not None:
            parts = self.megatron.chained_optimizers
            self.watch.note([grad for part in parts for grad in part.get_grads_for_grad_norm()])
        if not math.isfinite(norm):
            self.scheduler.step(1)
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
        """The schedule's position: steps so far, those that changed nothing included."""
        return int(self.scheduler.num_steps)

    def continue_from(self, steps: int) -> None:
        """Set the schedule to the position after ``steps`` steps; rates, betas and decay are the configuration's."""
        self.scheduler.num_steps = 0
        self.scheduler.step(steps)


class GradientWatch:
    """Fingerprints and copies of the gradients that optimizer steps apply, on every rank. Its methods are collective.

    They are those of the global norm, before clipping: of every parameter once within the model-parallel ranks
    (``get_grads_for_grad_norm``), with a distributed optimizer each rank's own shard.
    """

    def __init__(self, *, keep: bool = False) -> None:
        """``keep``: a copy in host memory too, float32, for :func:`cosine`."""
        self._keep = keep
        self._digests: list[str] = []
        self._kept: list[list[Tensor]] = []

    def note(self, gradients: Sequence[Tensor]) -> None:
        """The gradients of one step on this rank, in a fixed order."""
        hashed = hashlib.blake2b(digest_size=16)
        for gradient in gradients:
            flat = gradient.detach().reshape(-1).cpu().contiguous()
            hashed.update(flat.view(torch.uint8).numpy().data)
        self._digests.append(hashed.hexdigest())
        if self._keep:
            self._kept.append([gradient.detach().float().cpu().clone() for gradient in gradients])

    def take(self) -> tuple[list[str], list[list[Tensor]]]:
        """A digest (32 hexadecimal digits over all ranks, in their order) of each step since the last call, the same on
        every rank; and this rank's copies, where they are kept."""
        own, self._digests = self._digests, []
        kept, self._kept = self._kept, []
        joined = ["".join(parts) for parts in zip(*gathered(own), strict=True)]
        return [hashlib.blake2b(one.encode(), digest_size=16).hexdigest() for one in joined], kept


def cosine(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Of two gradients, each rank giving its part, in float64; NaN where one is 0 everywhere. Collective.

    A parameter that data-parallel ranks all hold counts as often as they are, in numerator and denominator alike.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for a, b in zip(first, second, strict=True):
        left, right = a.double().flatten(), b.double().flatten()
        sums += torch.stack([left @ right, left @ left, right @ right])
    product, left, right = torch.stack(gathered(sums)).sum(0).tolist()
    return product / math.sqrt(left * right) if left and right else math.nan
