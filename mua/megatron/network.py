"""One network on this rank, policy or critic: model chunks, gradient buffers, optimizer, a batch's way through them.

sequences ──► packed micro-batches ──► Megatron's schedule ──► per scored token: what ``read`` finds
                                                          └──► loss ``terms`` ──► gradients ──► a step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mua.algorithms.losses import LossFunction, LossTerms, ValueLossFunction, finish_metrics
from mua.config.schema import MegatronConfig, OptimizerConfig
from mua.megatron import moe, parallel
from mua.megatron.batch_sharder import RankBatch
from mua.megatron.logprobs import log_probabilities
from mua.megatron.microbatch import MicroBatch, micro_batch
from mua.megatron.modules import output_weight
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.packing import Alignment

Terms: TypeAlias = Callable[[MicroBatch, Any, Tensor], LossTerms]
"""Of a micro-batch, the model chunk and its output ``[1, tokens, ...]``: what it adds to the loss of the batch."""
Read: TypeAlias = Callable[[MicroBatch, Any, Tensor], Tensor]
"""Of the same: one number for each scored token, float32 ``[N]``."""


class Network:
    """Chunks that hold their first weights, wrapped and with an optimizer. All methods are collective.

    Args:
        chunks: this rank's, with the Hugging Face configuration attached.
        total_steps: optimizer steps in the run; a decaying schedule ends there.
        prefix: of this network's metrics and of the section that ``optimizer`` is, as messages name it.
    """

    def __init__(
        self,
        chunks: list[GPTModel],
        megatron: MegatronConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        *,
        prefix: str = "",
    ) -> None:
        self._config = megatron
        self._alignment = Alignment.of(megatron)
        self._prefix = prefix
        self.vocab_size: int = chunks[0].hf_config["vocab_size"]
        """Tokens of the true vocabulary."""
        for chunk in chunks:  # without Megatron's division by a token count: the weights hold the denominators
            chunk.config.finalize_model_grads_func = lambda chunks, num_tokens=None, **groups: finalize_model_grads(
                chunks, None, **groups
            )
        self.chunks = chunks
        self.wrapped = wrap_data_parallel(chunks, megatron)
        section = prefix.replace("/", ".") + "optimizer"
        self.optimizer = Optimizer(self.wrapped, optimizer, megatron, total_steps, section=section)
        self._gathers_late = self.wrapped[0].ddp_config.overlap_param_gather
        self._whole = True
        """Whether every rank has all weights of its chunks, not only its shard of the last step's."""
        self.skipped_steps = 0
        """Steps that changed nothing: the gradient norm was not finite, or there was nothing to learn from."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank's chunks, in a fixed order."""
        return (parameter for chunk in self.chunks for parameter in chunk.parameters())

    def gather_parameters(self) -> None:
        """Make weights whole that the last step left to be gathered during the next one; collective.

        Nothing but :meth:`train` may look at them before. It does nothing without ``megatron.overlap_param_gather``.
        """
        if not self._whole:
            for chunk in self.wrapped:
                chunk.disable_forward_pre_hook()
            self._whole = True

    def train(self, batch: RankBatch, terms: Terms) -> dict[str, float]:
        """One optimizer step on the global batch of which this rank has ``batch``: gradients are plain sums of those of
        ``terms``.

        A step whose gradient norm is not finite changes nothing and is counted. With ``megatron.overlap_param_gather``
        call :meth:`gather_parameters` before weights are read by anything but the next call.

        Returns:
            metrics, the same on every rank: those of ``terms`` (:func:`mua.algorithms.losses.finish_metrics`); of a
            policy ``train/loss`` and ``train/entropy`` (mean over trained tokens, nats); and, under
            ``train/`` or the prefix, ``grad_norm``, ``learning_rate``, ``microbatches``, ``padding_share``,
            ``merged_share`` (of tokens, that were not computed because another sequence begins with them), ``skipped``,
            ``forward_backward_seconds``, ``optimizer_seconds``, how evenly ranks and micro-batches are loaded
            (:class:`mua.megatron.packing.LoadBalance`), and of the experts' load
            (:func:`mua.megatron.moe.collect_metrics`), whose losses are no part of ``loss``.
        """

        def step(micro: MicroBatch, model: Any, output: Tensor) -> tuple[Tensor, Tensor, LossTerms]:
            """Megatron's loss triple: loss, a token count (unused), and what is collected."""
            found = terms(micro, model, output)
            collected = LossTerms(found.loss.detach(), found.sums, found.maxima)
            return found.loss, torch.zeros((), dtype=torch.int, device=output.device), collected

        start = time.perf_counter()
        batches = self._micro_batches(batch, scoring=False)
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        sums, maxima = _reduced(self._scheduled(batches, step, batch.packed.plan.least, forward_only=False))
        moe.forget_graphs(self.chunks)
        between = time.perf_counter()
        done = self.optimizer.step()
        if self._gathers_late and self._whole:  # the next forward pass gathers module by module, a bucket ahead
            for chunk in self.wrapped:
                chunk.enable_forward_pre_hook()
            self._whole = False
        self.skipped_steps += not done.applied
        policy = {}
        if "_loss" in sums:
            policy = {"train/loss": sums.pop("_loss"), "train/entropy": sums.pop("_entropy") / max(sums["tokens"], 1.0)}
        own = {
            "grad_norm": done.grad_norm,
            "lr": done.learning_rate,
            "num_microbatches": float(batch.packed.plan.count),
            "padding_share": batch.packed.plan.padding_share,
            "merged_share": batch.packed.merged_share,
            "skipped": float(not done.applied),
            "forward_backward_seconds": between - start,
            "optimizer_seconds": time.perf_counter() - between,
            **asdict(batch.packed.balance),
        }
        experts = moe.collect_metrics(self.chunks, self._config.moe_aux_loss, self._config.moe_z_loss)
        return (
            finish_metrics(sums, maxima)
            | policy
            | {(self._prefix or "train/") + name: value for name, value in own.items()}
            | {(self._prefix or "train/") + name: value for name, value in experts.items()}
        )

    def skip(self, steps: int) -> None:
        """Move the schedule on by steps that have nothing to learn from."""
        self.optimizer.scheduler.step(steps)
        self.skipped_steps += steps

    @torch.no_grad()
    def score(self, batch: RankBatch, read: Read) -> list[Tensor]:
        """What ``read`` finds for every token but a sequence's first.

        Returns:
            of each micro-batch of the rank float32 ``[N]``, in order of its scored tokens; on last stages alone.
        """

        def step(micro: MicroBatch, model: Any, output: Tensor, non_loss_data: bool) -> Tensor:
            return read(micro, model, output)

        return self._scheduled(
            self._micro_batches(batch, scoring=True), step, batch.packed.plan.least, forward_only=True
        )

    def _micro_batches(self, batch: RankBatch, *, scoring: bool) -> list[MicroBatch]:
        predicts = any(chunk.post_process for chunk in self.chunks)
        return [
            micro_batch(
                sequences, self._alignment, batch.packed.plan, planned,
                scoring=scoring, predicts=predicts, experts=experts,
            )
            for planned, sequences, experts in zip(batch.microbatches, batch.sequences, batch.experts, strict=True)
        ]  # fmt: skip

    def _scheduled(
        self, batches: Sequence[MicroBatch], step: Callable[..., Any], length: int, *, forward_only: bool
    ) -> list[Any]:
        """What ``step`` finds on the last stage, by Megatron's schedule: no pipelining, 1F1B, or interleaved, as the
        layout asks. Gradients are left, summed over all ranks, in the chunks' buffers.

        Args:
            length: positions of every micro-batch under the interleaved schedule; otherwise they may differ, and it is
                unused.
        """

        def forward_step(left: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
            batch = next(left)
            assert batch.packing.positions is not None
            output = model(batch.ids, batch.packing.positions[None], None, packed_seq_params=batch.packing)
            return output, partial(step, batch, model)

        iterators = [iter(batches) for _ in self.wrapped]
        single = len(self.wrapped) == 1
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.wrapped[0] if single else self.wrapped,
            num_microbatches=len(batches),
            seq_length=length,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results


def policy_terms(
    loss: LossFunction, temperature: float, vocab_size: int, fp32: bool = False, *, kept: list[Tensor] | None = None
) -> Terms:
    """The loss of a policy, its logits in float32 with ``fp32``.

    ``kept`` gets the log-probabilities of the trained tokens, float32 ``[N]``, micro-batch by micro-batch.

    Its sums also hold ``tokens``, ``_loss`` and ``_entropy``: the number of trained tokens, the total loss, the summed
    entropy.
    """

    def terms(batch: MicroBatch, model: Any, hidden: Tensor) -> LossTerms:
        assert batch.tokens is not None
        logprobs, entropy = _token_logprobs(batch, model, hidden, temperature, vocab_size, fp32)
        found = loss(logprobs, entropy, batch.tokens)
        if kept is not None:
            kept.append(logprobs.detach().float())
        own = {
            "_loss": found.loss.detach(),
            "_entropy": entropy.detach().sum(),
            "tokens": torch.tensor(float(len(logprobs)), device=hidden.device),
        }
        return LossTerms(found.loss, found.sums | own, found.maxima)

    return terms


def read_logprobs(temperature: float, vocab_size: int, fp32: bool = False) -> Read:
    """Log-probabilities of the scored tokens, of logits in float32 with ``fp32``."""
    return lambda batch, model, hidden: _token_logprobs(batch, model, hidden, temperature, vocab_size, fp32)[0]


def value_terms(loss: ValueLossFunction) -> Terms:
    """The loss of a critic."""

    def terms(batch: MicroBatch, model: Any, values: Tensor) -> LossTerms:
        assert batch.tokens is not None
        return loss(read_values(batch, model, values), batch.tokens)

    return terms


def read_values(batch: MicroBatch, model: Any, values: Tensor) -> Tensor:
    """A critic's value of what comes before each scored token, off the position that would predict the token."""
    return values[0, :, 0][batch.predictors]


def _token_logprobs(
    batch: MicroBatch, model: Any, hidden: Tensor, temperature: float, vocab_size: int, fp32: bool
) -> tuple[Tensor, Tensor]:
    return log_probabilities(
        hidden[0],
        output_weight(model.module),
        batch.targets,
        temperature,
        predictors=batch.predictors,
        vocab_size=vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
        fp32=fp32,
    )


def _reduced(results: list[LossTerms]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums added up and maxima over micro-batches, then over ranks, in float64; the same on every rank."""
    names = [(sorted(results[0].sums), sorted(results[0].maxima))] if results else [([], [])]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:  # only the last stage has seen them
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(names, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    ((of_sums, of_maxima),) = names
    sums = torch.zeros(len(of_sums), dtype=torch.float64, device=parallel.device())
    maxima = torch.full((len(of_maxima),), -math.inf, dtype=torch.float64, device=parallel.device())
    # Other tensor-parallel ranks hold the same; context-parallel ones their own.
    if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
        for found in results:
            sums += torch.stack([found.sums[name].double() for name in of_sums])
            if of_maxima:
                maxima = torch.maximum(maxima, torch.stack([found.maxima[name].double() for name in of_maxima]))
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return dict(zip(of_sums, sums.tolist(), strict=True)), dict(zip(of_maxima, maxima.tolist(), strict=True))
