"""Core attention over packed micro-batches: block-sparse in one kernel on CUDA, tile by tile elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, lru_cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mua.compat import torch_private
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.tiles import IndexArray, NodePlaces, Tile, tiles, visible_until, zigzag

_varlen_attn: Any = None
"""torch's kernel for sequences of varying length, where it takes what is wanted of it here."""
with suppress(ImportError):
    from torch.nn.attention.varlen import varlen_attn

    _known = signature(varlen_attn).parameters.keys()
    if {"scale", "window_size", "enable_gqa"} <= _known:
        _varlen_attn = varlen_attn
    elif {"scale", "window_size"} <= _known:  # torch 2.11's takes grouped heads without being told
        _varlen_attn = lambda *tensors, enable_gqa, **options: varlen_attn(*tensors, **options)  # noqa: E731

BLOCK = 128
"""Queries and keys of a block: FlexAttention's own, which its kernels' tiles divide."""
LEAST_BLOCKS = 2
"""Blocks of queries, and of keys, that a kernel is given at least: a compiled function is made anew where a size is 1,
and where a length is the first that blocks divide or do not. With whole blocks, two at least, one serves all lengths,
whatever the order they come in; forward, and forward with backward, are two."""


class PackedAttention(MegatronModule):
    """Causal attention in which a token sees only earlier tokens of its own sequence, or its ancestors in a tree.

    What several sequences begin with (:mod:`mua.megatron.trees`) is computed once, nothing is computed across
    boundaries, no score matrix is kept and no key copied: on CUDA in one kernel, by cumulative lengths
    (:func:`attend_by_length`) or, for trees and context parallelism, block-sparse (:func:`attend_block_sparse`),
    elsewhere in a few calls of fused attention (:func:`attend_tiles`). It takes the place of Megatron's
    ``DotProductAttention``, which refuses packed micro-batches and materializes all scores.

    Under context parallelism (:mod:`mua.megatron.tiles`) every rank gathers the keys and values of the whole
    micro-batch, which with grouped query attention are small, and attends from its own queries.
    """

    def __init__(
        self, config: TransformerConfig, softmax_scale: float | None = None, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.group = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedMicrobatch, **__: Any
    ) -> Tensor:
        """Attends within each sequence of the micro-batch.

        Args:
            query: ``[tokens, 1, heads, head dim]``, this rank's tokens; key and value may have fewer heads (grouped
                query attention).
            packed_seq_params: gives the lengths; the other arguments are Megatron's and unused.

        Returns:
            ``[tokens, 1, heads * head dim]``
        """
        queries, keys, values = query[:, 0], key[:, 0], value[:, 0]
        size, rank = self.group.size(), self.group.rank()
        if size > 1:
            # Gradients are summed back over the ranks.
            both = gather_from_sequence_parallel_region(torch.cat([keys, values], dim=-1), group=self.group)
            keys, values = both[packed_seq_params.order].split([key.shape[-1], value.shape[-1]], dim=-1)
        packed = packed_seq_params.by_length if size == 1 and query.is_cuda and takes_lengths(query) else None
        if packed is not None:
            return attend_by_length(queries, keys, values, packed, self.scale).reshape(*query.shape[:2], -1)
        nodes = _node_places(packed_seq_params.lengths, packed_seq_params.used, packed_seq_params.parents)
        if query.is_cuda:
            mask = block_mask(nodes, size, rank, query.device)
            attended = attend_block_sparse(queries, keys, values, mask, self.scale)
        else:
            # In float32: softmaxes of tiles are joined, and their gradients added up, in the precision of the tensors.
            if query.dtype == torch.bfloat16:
                queries, keys, values = queries.float(), keys.float(), values.float()
            attended = attend_tiles(queries, keys, values, _tiles(nodes, size, rank), self.scale)
        return attended.reshape(*query.shape[:2], -1).to(query.dtype)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """It has no parameters."""
        return {}


# One per micro-batch, for all layers; pipelines have several micro-batches under way.
_node_places = lru_cache(maxsize=32)(NodePlaces.of)
_tiles = lru_cache(maxsize=32)(tiles)


def attend_tiles(query: Tensor, key: Tensor, value: Tensor, taken: Sequence[Tile], scale: float) -> Tensor:
    """Attention of the pairs in ``taken``, put together by log-sum-exp; what the CPU computes.

    Softmax over several sets of keys is the mean of the softmaxes over each, weighted by their normalizers. That is how
    FlashAttention goes through blocks (Dao et al., 2022), and how Hydragen (Juravsky et al., 2024) and FlashInfer's
    cascade attention (Ye et al., 2024) let many sequences attend to one shared prefix: all their queries in one
    product, no key copied. Here it is trained through as well: given output and normalizer of the whole, the gradients
    of each tile are those of ordinary fused attention, and they add up, as in Ring Attention (Liu et al., 2023).

    Args:
        query: float32 or float64 ``[queries, heads, head dim]``.
        key: ``[keys, groups, head dim]``, and so ``value``; each group serves ``heads / groups`` neighboring heads.
        taken: as of :func:`mua.megatron.tiles.tiles`; the causal ones hold every query once and come first.
        scale: factor on the scores.

    Returns:
        ``[queries, heads, head dim]``
    """
    result: Tensor = _Tiled.apply(query, key, value, taken, scale)
    return result


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, taken: Sequence[Tile], scale: float) -> Tensor:
        output = query.new_empty(query.shape)
        queries, outputs = (_grouped(tensor, key.shape[1]) for tensor in (query, output))
        normalizers = query.new_empty(queries.shape[:3])
        for tile in taken:
            at = tile.queries
            keys, values = (_expanded(tensor[tile.keys], queries.shape[1]) for tensor in (key, value))
            part, normalizer = torch_private.flash_attention(
                queries[:, :, at], keys, values, causal=tile.causal, scale=scale
            )
            if tile.causal:
                outputs[:, :, at], normalizers[:, :, at] = part, normalizer
            else:
                outputs[:, :, at].lerp_(part, torch.sigmoid(normalizer - normalizers[:, :, at])[..., None])
                torch.logaddexp(normalizers[:, :, at], normalizer, out=normalizers[:, :, at])
        ctx.save_for_backward(query, key, value, output, normalizers)
        ctx.tiles, ctx.scale = taken, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalizers = ctx.saved_tensors
        groups = key.shape[1]
        by_query, by_key, by_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        gradient, queries, outputs, by_queries = (
            _grouped(tensor, groups) for tensor in (gradients[0].contiguous(), query, output, by_query)
        )
        for tile in ctx.tiles:
            at = tile.queries
            keys, values = (_expanded(tensor[tile.keys], queries.shape[1]) for tensor in (key, value))
            parts = torch_private.flash_attention_gradients(
                gradient[:, :, at], queries[:, :, at], keys, values, outputs[:, :, at], normalizers[:, :, at],
                causal=tile.causal, scale=ctx.scale,
            )  # fmt: skip
            if tile.causal:
                by_queries[:, :, at] = parts[0]
            else:
                by_queries[:, :, at] += parts[0]
            by_key[tile.keys] += parts[1].sum(1).transpose(0, 1)
            by_value[tile.keys] += parts[2].sum(1).transpose(0, 1)
        return by_query, by_key, by_value, None, None


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """``[tokens, heads, head dim]`` as ``[groups, heads per group, tokens, head dim]``, a view."""
    return tensor.view(len(tensor), groups, -1, tensor.shape[-1]).permute(1, 2, 0, 3)


def _expanded(tensor: Tensor, heads: int) -> Tensor:
    """``[tokens, groups, head dim]`` as ``[groups, heads, tokens, head dim]``, a view."""
    return tensor.transpose(0, 1)[:, None].expand(-1, heads, -1, -1)


def takes_lengths(query: Tensor) -> bool:
    """Whether torch's kernel for sequences of varying length takes ``query``, ``[..., heads, head dim]`` on CUDA."""
    size = query.shape[-1]
    return (
        _varlen_attn is not None
        and query.dtype in (torch.bfloat16, torch.float16)
        and size % 8 == 0
        and size <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_by_length(query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams, scale: float) -> Tensor:
    """Causal attention within sequences side by side, by torch's FlashAttention for cumulative lengths.

    Args:
        query: ``[tokens, heads, head dim]``.
        key: ``[tokens, groups, head dim]``, and so ``value``; each group serves ``heads / groups`` neighboring heads.
        packed: of :attr:`mua.megatron.modules.PackedMicrobatch.by_length`.
        scale: factor on the scores.

    Returns:
        ``[tokens, heads, head dim]``
    """
    assert _varlen_attn is not None
    output: Tensor = _varlen_attn(
        query,
        key,
        value,
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.max_seqlen_q,
        packed.max_seqlen_kv,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def attend_block_sparse(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, kernel: Any = None
) -> Tensor:
    """Attention of the visible pairs in one kernel; what CUDA computes.

    torch's FlexAttention (Dong et al., 2024) skips blocks of the score matrix that no query of the block sees, computes
    those that all see without a mask, and asks for single pairs in the rest.

    Args:
        query: ``[queries, heads, head dim]``.
        key: ``[keys, groups, head dim]``, and so ``value``; each group serves ``heads / groups`` neighboring heads.
        mask: of :func:`block_mask`.
        scale: factor on the scores.
        kernel: FlexAttention or what was compiled of it; None: :func:`compiled` on CUDA.

    Returns:
        ``[queries, heads, head dim]``
    """
    queries, keys = mask.seq_lengths
    sizes = ((query, queries), (key, keys), (value, keys))
    by_head = (F.pad(part, (0, 0, 0, 0, 0, size - len(part))).transpose(0, 1)[None] for part, size in sizes)
    kernel = kernel or (compiled() if query.is_cuda else flex_attention)
    output = kernel(*by_head, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return output[0].transpose(0, 1)[: len(query)]


@cache
def compiled(backend: Any = "inductor") -> Any:
    """Uncompiled, the function forms all scores. ``fullgraph`` makes an error of a quiet return to that."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)


@lru_cache(maxsize=32)
def block_mask(nodes: NodePlaces, size: int, rank: int, device: torch.device) -> BlockMask:
    """Which pairs of a rank's queries and the micro-batch's keys are visible.

    Which block is skipped, masked or whole follows from the ends of subtrees, least and greatest of a block, so that no
    mask of the micro-batch is ever formed. Lengths are filled up to whole blocks, :data:`LEAST_BLOCKS` of them at
    least, with queries that see nothing and keys that nothing sees.

    Args:
        size: context-parallel ranks, of which ``rank`` holds two chunks of every node, as
            :func:`mua.megatron.tiles.zigzag` says.
    """
    until = _whole_blocks(visible_until(nodes)).to(device)
    lengths = [stop - start for start, stop in zip(nodes.starts, nodes.stops, strict=True)]
    places = _whole_blocks(zigzag(lengths, size, rank)).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = places[query]
        return (key <= place) & (place < until[key])

    (first, last), (soonest, latest) = _extremes(places), _extremes(until)
    start = torch.arange(len(soonest), device=device) * BLOCK
    some = (start <= last[:, None]) & (first.clamp(min=0)[:, None] < latest)
    whole = (start + BLOCK - 1 <= first[:, None]) & (last[:, None] < soonest)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(places), len(until)),
    )


def _whole_blocks(values: IndexArray) -> Tensor:
    """Filled up with -1."""
    wanted = max(LEAST_BLOCKS * BLOCK, -(-len(values) // BLOCK) * BLOCK)
    return F.pad(torch.from_numpy(values), (0, wanted - len(values)), value=-1)


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of each block."""
    blocks = values.view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block of queries how many blocks of keys there are, and a list that begins with them.

    Returns:
        int32 ``[1, 1, query blocks]`` and ``[1, 1, query blocks, key blocks]``.
    """
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]
