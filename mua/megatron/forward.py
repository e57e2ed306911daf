"""Runs micro-batches through Megatron's schedules and joins their results over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mua.algorithms.loss_protocol import LossFunction, LossTerms, ValueLossFunction
from mua.megatron.logprobs import log_probabilities
from mua.megatron.microbatch import MicroBatch
from mua.megatron.modules import output_weight
from mua.megatron.parallel import device, reports_results

Terms: TypeAlias = Callable[[MicroBatch, Any, Tensor], LossTerms]
"""Of a micro-batch, the model chunk and its output ``[1, tokens, ...]``: what it adds to the loss of the batch."""
Read: TypeAlias = Callable[[MicroBatch, Any, Tensor], Tensor]
"""Of the same: one number for each scored token, float32 ``[N]``."""
_Result = tuple[dict[str, Tensor], dict[str, Tensor]]


def sum_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's ``finalize_model_grads`` without its division by a token count: the weights hold the denominators."""
    finalize_model_grads(chunks, None, **groups)


def train(
    chunks: list[DistributedDataParallel], micro_batches: Sequence[MicroBatch], terms: Terms, row_length: int
) -> tuple[dict[str, float], dict[str, float]]:
    """One forward and backward pass; gradients are left, summed over all ranks, in the chunks' buffers.

    Args:
        row_length: positions of every row under the interleaved schedule; otherwise rows may differ, and it is unused.

    Returns:
        the sums and maxima of ``terms`` over the whole batch, the same on every rank.
    """
    results: list[_Result] = _run(chunks, micro_batches, partial(_train, terms), row_length, forward_only=False)
    return _reduced(results)


@torch.no_grad()
def score(
    chunks: list[DistributedDataParallel], micro_batches: Sequence[MicroBatch], read: Read, row_length: int
) -> list[Tensor]:
    """What ``read`` finds for the scored tokens of each micro-batch, ``[N]`` float32; empty off the last stage."""
    results: list[Tensor] = _run(chunks, micro_batches, partial(_score, read), row_length, forward_only=True)
    return results


def policy_terms(loss: LossFunction, temperature: float, vocab_size: int) -> Terms:
    """The loss of a policy. Its sums also hold ``tokens``, ``_loss`` and ``_entropy``: the number of trained tokens,
    the total loss, the summed entropy."""

    def terms(batch: MicroBatch, model: Any, hidden: Tensor) -> LossTerms:
        assert batch.tokens is not None
        logprobs, entropy = _token_logprobs(batch, model, hidden, temperature, vocab_size)
        found = loss(logprobs, entropy, batch.tokens)
        own = {
            "_loss": found.loss.detach(),
            "_entropy": entropy.detach().sum(),
            "tokens": torch.tensor(float(len(logprobs)), device=hidden.device),
        }
        return LossTerms(found.loss, found.sums | own, found.maxima)

    return terms


def read_logprobs(temperature: float, vocab_size: int) -> Read:
    """Log-probabilities of the scored tokens."""
    return lambda batch, model, hidden: _token_logprobs(batch, model, hidden, temperature, vocab_size)[0]


def value_terms(loss: ValueLossFunction) -> Terms:
    """The loss of a critic."""

    def terms(batch: MicroBatch, model: Any, values: Tensor) -> LossTerms:
        assert batch.tokens is not None
        return loss(read_values(batch, model, values), batch.tokens)

    return terms


def read_values(batch: MicroBatch, model: Any, values: Tensor) -> Tensor:
    """A critic's value of what comes before each scored token, off the position that would predict the token."""
    return values[0, :, 0][batch.predictors]


def _run(
    chunks: list[DistributedDataParallel],
    micro_batches: Sequence[MicroBatch],
    score: Any,
    row_length: int,
    *,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule: no pipelining, 1F1B, or interleaved, as the layout asks."""
    step = partial(_forward_step, score)
    iterators: list[Iterator[MicroBatch]] = [iter(micro_batches) for _ in chunks]
    single = len(chunks) == 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else chunks,
        num_microbatches=len(micro_batches),
        seq_length=row_length,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _forward_step(score: Any, batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    assert batch.row.positions is not None
    output = model(batch.ids, batch.row.positions[None], None, packed_seq_params=batch.row)
    return output, partial(score, batch, model)


def _token_logprobs(
    batch: MicroBatch, model: Any, hidden: Tensor, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    return log_probabilities(
        hidden[0],
        output_weight(model.module),
        batch.targets,
        temperature,
        rows=batch.predictors,
        vocab_size=vocab_size,
        group=parallel_state.get_tensor_model_parallel_group(),
    )


def _train(terms: Terms, batch: MicroBatch, model: Any, output: Tensor) -> tuple[Tensor, Tensor, _Result]:
    """Megatron's loss triple: loss, a token count (unused), and what is collected."""
    found = terms(batch, model, output)
    count = torch.zeros((), dtype=torch.int, device=output.device)
    return found.loss, count, (found.sums, found.maxima)


def _score(read: Read, batch: MicroBatch, model: Any, output: Tensor, non_loss_data: bool) -> Tensor:
    return read(batch, model, output)


def _reduced(results: list[_Result]) -> tuple[dict[str, float], dict[str, float]]:
    """Adds (maximises) over micro-batches, then over ranks, in float64."""
    names = _names(results)
    sums = torch.zeros(len(names[0]), dtype=torch.float64, device=device())
    maxima = torch.full((len(names[1]),), -math.inf, dtype=torch.float64, device=device())
    if reports_results():
        for batch_sums, batch_maxima in results:
            sums += torch.stack([batch_sums[name].double() for name in names[0]])
            if names[1]:
                maxima = torch.maximum(maxima, torch.stack([batch_maxima[name].double() for name in names[1]]))
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    return dict(zip(names[0], sums.tolist(), strict=True)), dict(zip(names[1], maxima.tolist(), strict=True))


def _names(results: list[_Result]) -> tuple[list[str], list[str]]:
    """Names of sums and maxima, which only the last pipeline stage has seen."""
    names = [(sorted(results[0][0]), sorted(results[0][1]))] if results else [([], [])]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(names, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return names[0]
