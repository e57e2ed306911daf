"""Attention taken apart into pieces and put together by log-sum-exp; what the CPU computes.

Softmax over several sets of keys is the mean of the softmaxes over each, weighted by their normalizers. That is how
FlashAttention goes through blocks (Dao et al., 2022), and how Hydragen (Juravsky et al., 2024) and FlashInfer's cascade
attention (Ye et al., 2024) let many sequences attend to one shared prefix: all their queries in one product, no key
copied. Here it is trained through as well: given output and normalizer of the whole, the gradients of each piece are
those of ordinary fused attention, and they add up, as in Ring Attention (Liu et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mua.compat import torch_flash_cpu
from mua.megatron.pieces import Piece


def attend(query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float) -> Tensor:
    """Attention of the pairs in ``pieces``.

    Args:
        query: float32 or float64 ``[queries, heads, head dim]``.
        key: ``[keys, groups, head dim]``, and so ``value``; each group serves ``heads / groups`` neighbouring heads.
        pieces: as of :func:`mua.megatron.pieces.pieces`; the causal ones hold every query once and come first.
        scale: factor on the scores.

    Returns:
        ``[queries, heads, head dim]``
    """
    result: Tensor = _Piecewise.apply(query, key, value, pieces, scale)
    return result


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: Sequence[Piece], scale: float) -> Tensor:
        output = query.new_empty(query.shape)
        queries, outputs = (_grouped(tensor, key.shape[1]) for tensor in (query, output))
        normalizers = query.new_empty(queries.shape[:3])
        for piece in pieces:
            at = piece.queries
            keys, values = (_expanded(tensor[piece.keys], queries.shape[1]) for tensor in (key, value))
            part, normalizer = torch_flash_cpu.attend(queries[:, :, at], keys, values, causal=piece.causal, scale=scale)
            if piece.causal:
                outputs[:, :, at], normalizers[:, :, at] = part, normalizer
            else:
                _join(outputs[:, :, at], normalizers[:, :, at], part, normalizer)
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.pieces, ctx.scale = pieces, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalizers = ctx.saved_tensors
        groups = key.shape[1]
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        gradient, queries, outputs, by_queries = (
            _grouped(tensor, groups) for tensor in (gradients[0].contiguous(), query, output, by_query)
        )
        for piece in ctx.pieces:
            at = piece.queries
            keys, values = (_expanded(tensor[piece.keys], queries.shape[1]) for tensor in (key, value))
            parts = torch_flash_cpu.gradients(
                gradient[:, :, at], queries[:, :, at], keys, values, outputs[:, :, at], normalizers[:, :, at],
                causal=piece.causal, scale=ctx.scale,
            )  # fmt: skip
            if piece.causal:
                by_queries[:, :, at] = parts[0]
            else:
                by_queries[:, :, at] += parts[0]
            by_key[piece.keys] += parts[1].sum(1).transpose(0, 1)
            by_value[piece.keys] += parts[2].sum(1).transpose(0, 1)
        return by_query, by_key, by_value, None, None


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[tokens, heads, head dim]`` as ``[groups, heads a group, tokens, head dim]``, a view."""
    return tensor.view(len(tensor), groups, -1, tensor.shape[-1]).permute(1, 2, 0, 3)


def _expanded(tensor: Tensor, heads: int) -> Tensor:
    """``[tokens, groups, head dim]`` as ``[groups, heads, tokens, head dim]``, a view."""
    return tensor.transpose(0, 1)[:, None].expand(-1, heads, -1, -1)


def _join(output: Tensor, normalizer: Tensor, part: Tensor, part_normalizer: Tensor) -> None:
    """Puts attention to further keys into ``output`` and ``normalizer``, in place."""
    output.lerp_(part, torch.sigmoid(part_normalizer - normalizer)[..., None])
    torch.logaddexp(normalizer, part_normalizer, out=normalizer)
