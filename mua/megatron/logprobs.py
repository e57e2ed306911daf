"""Log-probabilities and entropy from vocabulary-parallel logits: the one function for every policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Logits converted to full precision at once: 16 MiB in float32."""

_LOWEST = -1e30  # stands for the maximum over no logits: finite, so that differences with it are no NaN


def log_probabilities(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    *,
    rows: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """``log softmax(logits / temperature)`` at ``ids``, and the entropy of the same distribution in nats.

    The softmax is formed chunk by chunk, forward and backward; besides the logits only two numbers a row are kept.
    The gradient with respect to this rank's shard is complete as it stands: it is neither scaled by, nor to be summed
    over, the tensor-parallel ranks.

    Args:
        logits: ``[T, V / tp]``, this rank's shard of the vocabulary, contiguous in rank order.
        ids: int64 ``[N]``, each in ``[0, vocab_size)``.
        temperature: above 0.
        rows: int64 ``[N]``: the row of ``logits`` that predicts each id; one may predict several, as where a prefix
            tree branches. Other rows get gradient 0.
        vocab_size: columns from there on, counted over all shards, are padding and have probability 0.
        group: tensor-parallel process group.

    Returns:
        log-probabilities and entropy, both ``[N]``, float32 (float64 for float64 logits).

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    result: tuple[Tensor, Tensor] = _LogProbabilities.apply(logits, ids, temperature, rows, vocab_size, group)
    return result


class _LogProbabilities(torch.autograd.Function):
    """With z = logits / temperature, m = max z, S = sum exp(z - m), U = sum exp(z - m) (z - m):
    log p(i) = z_i - m - log S and entropy = log S - U / S.

    Each shard reduces to its own m, S, U first; two small collectives join them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        rows: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * logits.shape[1]
        valid = min(max(vocab_size - first, 0), logits.shape[1])
        held = (ids >= first) & (ids < first + valid)
        columns = (ids - first).clamp(0, max(valid - 1, 0))
        maximum, statistics = _shard_statistics(logits, rows, columns, held, temperature, valid)
        normalizer, chosen, entropy = _joined(maximum, statistics, group)
        ctx.save_for_backward(logits, rows, columns, held, normalizer, entropy)
        ctx.temperature, ctx.valid = temperature, valid
        ctx.set_materialize_grads(False)
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(i) / dz_j = [i = j] - p_j;  d entropy / dz_j = -p_j (log p_j + entropy)."""
        by_logprob, by_entropy = gradients
        logits, rows, columns, held, normalizer, entropy = ctx.saved_tensors
        result = torch.zeros_like(logits)
        for part, z in _chunks(logits, rows, ctx.temperature, ctx.valid):
            log_p = z.sub_(normalizer[part, None])
            p = log_p.exp()
            gradient = torch.zeros_like(p)
            if by_logprob is not None:
                gradient.addcmul_(p, by_logprob[part, None], value=-1)
                gradient.scatter_add_(1, columns[part, None], (by_logprob[part] * held[part])[:, None])
            if by_entropy is not None:
                gradient -= p * (log_p + entropy[part, None]) * by_entropy[part, None]
            result[:, : ctx.valid].index_add_(0, rows[part], gradient.div_(ctx.temperature).to(logits.dtype))
        return result, None, None, None, None, None


def _chunks(logits: Tensor, rows: Tensor, temperature: float, valid: int) -> Iterator[tuple[slice, Tensor]]:
    """Parts of ``rows`` with their scaled logits ``[n, valid]`` in at least float32, a fresh tensor each."""
    if valid == 0:
        return
    dtype = torch.promote_types(logits.dtype, torch.float32)
    size = max(1, CHUNK_ELEMENTS // valid)
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        yield part, logits[rows[part], :valid].to(dtype).div_(temperature)


def _shard_statistics(
    logits: Tensor, rows: Tensor, columns: Tensor, held: Tensor, temperature: float, valid: int
) -> tuple[Tensor, Tensor]:
    """This shard's maximum ``[N]``, and S, U and the chosen logit (0 where another shard holds it), ``[3, N]``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    maximum = torch.full((len(rows),), _LOWEST, dtype=dtype, device=logits.device)
    statistics = torch.zeros((3, len(rows)), dtype=dtype, device=logits.device)
    for part, z in _chunks(logits, rows, temperature, valid):
        chosen = z.gather(1, columns[part, None])[:, 0]
        statistics[2, part] = torch.where(held[part], chosen, 0.0)
        maximum[part] = z.amax(1)
        shifted = z.sub_(maximum[part, None])
        weights = shifted.exp()
        statistics[0, part] = weights.sum(1)
        statistics[1, part] = weights.mul_(shifted).sum(1)
    return maximum, statistics


def _joined(maximum: Tensor, statistics: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Over all shards: log of the normalizer of exp(z), the chosen z, and the entropy, each ``[N]``."""
    if group.size() > 1:
        shard_maximum = maximum.clone()
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        lowered = shard_maximum - maximum
        scale = lowered.exp()
        statistics[1] = scale * (statistics[1] + lowered * statistics[0])
        statistics[0] *= scale
        dist.all_reduce(statistics, group=group)
    total, weighted, chosen = statistics
    log_total = total.log()
    return maximum + log_total, chosen, log_total - weighted / total
