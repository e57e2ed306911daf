"""Log-probabilities and entropy under a vocabulary-parallel output layer: the one function for every policy.

The output layer belongs to it, so that the logits of a micro-batch, by far its largest tensor, never exist: ::

    hidden [T, H] ──► those of one chunk ──► logits [n, V / tp] ──► maximum, normalizer, entropy, chosen logit
                       (n V / tp <= CHUNK_ELEMENTS)    └─ freed ─┘   two numbers a token are kept

The backward pass forms the logits of each chunk again. Only tokens that are scored have logits at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_ELEMENTS = 1 << 25
"""Logits that exist at once: 128 MiB in float32. A chunk of a vocabulary of 151,936 in one piece has 220 tokens, about
as many as keep a GPU busy with the product rather than with reading the weight."""

_LOWEST = -1e30  # stands for the maximum over no logits: finite, so that differences with it are no NaN


def log_probabilities(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperature: float,
    *,
    predictors: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """``log softmax(hidden @ weight.T / temperature)`` at ``ids``, and the entropy of the same distribution in nats.

    The gradient of ``weight`` is complete as it stands: it is neither scaled by, nor to be summed over, the
    tensor-parallel ranks. That of ``hidden``, which all of them hold, is this shard's part and has to be summed over
    them, as the sequence-parallel gather does that precedes it.

    Args:
        hidden: ``[T, H]``, the same on every tensor-parallel rank.
        weight: ``[V / tp, H]``, this rank's shard of the output layer, shards in rank order; of ``hidden``'s dtype.
        ids: int64 ``[N]``, each in ``[0, vocab_size)``.
        temperature: above 0.
        predictors: int64 ``[N]``: the position of ``hidden`` that predicts each id; one may predict several, as where a
            prefix tree branches. Others get gradient 0.
        vocab_size: columns from there on, counted over all shards, are padding and have probability 0.
        group: tensor-parallel process group.
        fp32: logits are sums in float32 of products of ``hidden`` and ``weight``, not rounded to their dtype; what
            SGLang's ``enable_fp32_lm_head`` computes. The gradient's products stay in that dtype.

    Returns:
        log-probabilities and entropy, both ``[N]``, float32 (float64 for float64 ``hidden``).

    Raises:
        ValueError: the temperature is not above 0.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature}")
    result: tuple[Tensor, Tensor] = _LogProbabilities.apply(
        hidden, weight, ids, temperature, predictors, vocab_size, group, fp32
    )
    return result


class _LogProbabilities(torch.autograd.Function):
    """With z = logits / temperature, m = max z, S = sum exp(z - m), U = sum exp(z - m) (z - m):
    log p(i) = z_i - m - log S and entropy = log S - U / S.

    Each shard reduces to its own m, S, U first; two small collectives join them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperature: float,
        predictors: Tensor,
        vocab_size: int,
        group: dist.ProcessGroup,
        fp32: bool,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * len(weight)
        valid = min(max(vocab_size - first, 0), len(weight))
        held = (ids >= first) & (ids < first + valid)
        columns = (ids - first).clamp(0, max(valid - 1, 0))
        # This shard's maximum, and S, U and the chosen logit (0 where another shard holds it).
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        maximum = torch.full((len(predictors),), _LOWEST, dtype=dtype, device=hidden.device)
        statistics = torch.zeros((3, len(predictors)), dtype=dtype, device=hidden.device)
        for part in _parts(len(predictors), valid):
            z = _scaled_logits(hidden[predictors[part]], weight[:valid], temperature, fp32)
            statistics[2, part] = torch.where(held[part], z.gather(1, columns[part, None])[:, 0], 0.0)
            maximum[part] = z.amax(1)
            weights = z.sub_(maximum[part, None]).exp()
            statistics[0, part], statistics[1, part] = weights.sum(1), weights.mul_(z).sum(1)
            del z, weights  # before the next ones are made
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
        normalizer, entropy = maximum + log_total, log_total - weighted / total
        ctx.save_for_backward(hidden, weight, predictors, columns, held, normalizer, entropy)
        ctx.temperature, ctx.valid, ctx.fp32 = temperature, valid, fp32
        ctx.set_materialize_grads(False)
        return chosen - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """d log p(i) / dz_j = [i = j] - p_j;  d entropy / dz_j = -p_j (log p_j + entropy)."""
        by_logprob, by_entropy = gradients
        hidden, weight, predictors, columns, held, normalizer, entropy = ctx.saved_tensors
        by_logprob = torch.zeros_like(normalizer) if by_logprob is None else by_logprob
        by_hidden = torch.zeros_like(hidden)
        # The chunks' parts are added up in full precision, as one product over all tokens would have done.
        by_weight = torch.zeros_like(weight, dtype=normalizer.dtype)
        matrix = weight[: ctx.valid]

        def add(part: slice) -> None:
            states = hidden[predictors[part]]
            log_p = _scaled_logits(states, matrix, ctx.temperature, ctx.fp32).sub_(normalizer[part, None])
            slope = log_p.exp()
            drift = by_logprob[part, None]
            if by_entropy is not None:
                drift = log_p.add_(entropy[part, None]).mul_(by_entropy[part, None]).add_(drift)
            slope.mul_(drift).neg_()
            slope.scatter_add_(1, columns[part, None], (by_logprob[part] * held[part])[:, None])
            by_logits = slope.div_(ctx.temperature).to(hidden.dtype)
            by_hidden.index_add_(0, predictors[part], by_logits @ matrix)
            if by_weight.dtype == states.dtype:
                by_weight[: ctx.valid].addmm_(by_logits.T, states)
            else:  # part by part of what has to be made in the other type first
                size = max(1, CHUNK_ELEMENTS // states.shape[1])
                for total, factors in zip(by_weight[: ctx.valid].split(size), by_logits.T.split(size), strict=True):
                    total += factors @ states

        for part in _parts(len(predictors), ctx.valid):
            add(part)  # a function of its own, so that nothing of a chunk outlives it
        return by_hidden, by_weight.to(weight.dtype), None, None, None, None, None, None


def _parts(tokens: int, columns: int) -> Iterator[slice]:
    """The chunks; none without columns."""
    if columns == 0:
        return
    size = max(1, CHUNK_ELEMENTS // columns)
    for start in range(0, tokens, size):
        yield slice(start, min(start + size, tokens))


def _scaled_logits(states: Tensor, weight: Tensor, temperature: float, fp32: bool) -> Tensor:
    """``[n, valid]``, in at least float32, of hidden states ``[n, H]``; with ``fp32`` never rounded to less."""
    dtype = torch.promote_types(states.dtype, torch.float32)
    if not fp32 or states.dtype == dtype:
        logits = (states @ weight.T).to(dtype)
    elif states.is_cuda:
        logits = torch.mm(states, weight.T, out_dtype=dtype)  # the tensor cores' own sums, as SGLang takes them
    else:
        logits = states.to(dtype) @ weight.T.to(dtype)
    return logits.div_(temperature)
