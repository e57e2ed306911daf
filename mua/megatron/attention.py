"""Core attention over packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mua.compat import torch_flash_cpu
from mua.megatron import context, flex
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.pieces import Layout, Piece, pieces


class PackedAttention(MegatronModule):
    """Causal attention in which a token sees only earlier tokens of its own sequence, or its ancestors in a tree.

    What several sequences begin with (:mod:`mua.megatron.trees`) is computed once, nothing is computed across
    boundaries, no score matrix is kept and no key copied: on CUDA in one block-sparse kernel
    (:mod:`mua.megatron.flex`), elsewhere in a few calls of fused attention (:func:`attend_piecewise`). It takes
    the place of Megatron's ``DotProductAttention``, which refuses packed micro-batches and materialises all scores.

    Under context parallelism (:mod:`mua.megatron.context`) every rank gathers the keys and values of the whole row,
    which with grouped query attention are small, and attends from its own queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedMicrobatch | None = None,
    ) -> Tensor:
        """Attends within each sequence of the row.

        Args:
            query: ``[tokens, 1, heads, head dim]``, this rank's tokens; key and value may have fewer heads (grouped
                query attention).
            packed_seq_params: gives the lengths; the other arguments are Megatron's and unused.

        Returns:
            ``[tokens, 1, heads * head dim]``
        """
        assert packed_seq_params is not None, "PositionedRotary has checked this"
        queries, keys, values = query[:, 0], key[:, 0], value[:, 0]
        size, rank = self.group.size(), self.group.rank()
        if size > 1:
            both = context.gather(torch.cat([keys, values], dim=-1), self.group)[packed_seq_params.order]
            keys, values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        layout = _layout(packed_seq_params.lengths, packed_seq_params.used, packed_seq_params.parents)
        if query.is_cuda:
            mask = flex.block_mask(layout, size, rank, query.device)
            attended = flex.attend(queries, keys, values, mask, self.scale)
        else:
            queries, keys, values = (_full_precision(tensor) for tensor in (queries, keys, values))
            attended = attend_piecewise(queries, keys, values, _pieces(layout, size, rank), self.scale)
        return attended.reshape(*query.shape[:2], -1).to(query.dtype)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """It has no parameters."""
        return {}


# One a row, for all layers; pipelines have several rows under way.
_layout = lru_cache(maxsize=32)(Layout.of)


@lru_cache(maxsize=32)
def _pieces(layout: Layout, size: int, rank: int) -> tuple[Piece, ...]:
    return pieces(layout, size, rank)


def _full_precision(tensor: Tensor) -> Tensor:
    """In float32: softmaxes of pieces are joined, and their gradients added up, in the precision of the tensors."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def attend_piecewise(query: Tensor, key: Tensor, value: Tensor, taken: Sequence[Piece], scale: float) -> Tensor:
    """Attention of the pairs in ``taken``, put together by log-sum-exp; what the CPU computes.

    Softmax over several sets of keys is the mean of the softmaxes over each, weighted by their normalizers. That is how
    FlashAttention goes through blocks (Dao et al., 2022), and how Hydragen (Juravsky et al., 2024) and FlashInfer's
    cascade attention (Ye et al., 2024) let many sequences attend to one shared prefix: all their queries in one
    product, no key copied. Here it is trained through as well: given output and normalizer of the whole, the gradients
    of each piece are those of ordinary fused attention, and they add up, as in Ring Attention (Liu et al., 2023).

    Args:
        query: float32 or float64 ``[queries, heads, head dim]``.
        key: ``[keys, groups, head dim]``, and so ``value``; each group serves ``heads / groups`` neighbouring heads.
        taken: as of :func:`mua.megatron.pieces.pieces`; the causal ones hold every query once and come first.
        scale: factor on the scores.

    Returns:
        ``[queries, heads, head dim]``
    """
    result: Tensor = _Piecewise.apply(query, key, value, taken, scale)
    return result


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, taken: Sequence[Piece], scale: float) -> Tensor:
        output = query.new_empty(query.shape)
        queries, outputs = (_grouped(tensor, key.shape[1]) for tensor in (query, output))
        normalizers = query.new_empty(queries.shape[:3])
        for piece in taken:
            at = piece.queries
            keys, values = (_expanded(tensor[piece.keys], queries.shape[1]) for tensor in (key, value))
            part, normalizer = torch_flash_cpu.flash_attention(
                queries[:, :, at], keys, values, causal=piece.causal, scale=scale
            )
            if piece.causal:
                outputs[:, :, at], normalizers[:, :, at] = part, normalizer
            else:
                _join(outputs[:, :, at], normalizers[:, :, at], part, normalizer)
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.pieces, ctx.scale = taken, scale
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
            parts = torch_flash_cpu.flash_attention_gradients(
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
