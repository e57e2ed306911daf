"""Attention over a row of prefix trees in one block-sparse kernel; what CUDA computes.

torch's FlexAttention (Dong et al., 2024) skips blocks of the score matrix that no query of the block sees, computes
those that all see without a mask, and asks for single pairs in the rest. Which block is which follows from the ends of
subtrees (:mod:`mua.megatron.pieces`), least and greatest of a block, so that no mask of the row is ever formed.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from mua.megatron.context import zigzag
from mua.megatron.pieces import Layout, visible_until

BLOCK = 128
"""Queries and keys of a block: FlexAttention's own, which its kernels' tiles divide."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    """Attention of the visible pairs.

    Args:
        query: ``[queries, heads, head dim]``.
        key: ``[keys, groups, head dim]``, and so ``value``; each group serves ``heads / groups`` neighbouring heads.
        mask: of :func:`block_mask`.
        scale: factor on the scores.

    Returns:
        ``[queries, heads, head dim]``
    """
    by_head = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    kernel = _compiled() if query.is_cuda else flex_attention
    output = kernel(*by_head, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return output[0].transpose(0, 1)


@cache
def _compiled() -> Any:
    """Uncompiled, the function forms all scores. ``fullgraph`` makes an error of a quiet return to that."""
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@lru_cache(maxsize=32)  # one a row, for all layers; pipelines have several rows under way
def block_mask(layout: Layout, size: int, rank: int, device: torch.device) -> BlockMask:
    """Which pairs of a rank's queries and the row's keys are visible.

    Args:
        size: context-parallel ranks, of which ``rank`` holds two chunks of every node, as
            :func:`mua.megatron.context.zigzag` says.
    """
    until = torch.from_numpy(visible_until(layout)).to(device)
    lengths = [stop - start for start, stop in zip(layout.starts, layout.stops, strict=True)]
    places = torch.from_numpy(zigzag(lengths, size, rank)).to(device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = places[query]
        return (key <= place) & (place < until[key])

    some, all_ = _blocks(places, until)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~all_),
        *_listed(all_),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(len(places), len(until)),
    )


def _blocks(places: Tensor, until: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks in which some pair may be visible, and those in which all are: bool ``[query blocks, key blocks]``.

    A block that is cut off by the end of the row is never one of all.
    """
    (first, last), (soonest, latest) = _extremes(places), _extremes(until)
    start = torch.arange(len(soonest), device=until.device) * BLOCK
    some = (start <= last[:, None]) & (first.clamp(min=0)[:, None] < latest)
    return some, (start + BLOCK - 1 <= first[:, None]) & (last[:, None] < soonest)


def _extremes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of each block; a block that is cut off has -1 in the rest."""
    blocks = F.pad(values, (0, -len(values) % BLOCK), value=-1).view(-1, BLOCK)
    return blocks.amin(1), blocks.amax(1)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of each block of queries how many blocks of keys there are, and a list that begins with them.

    Returns:
        int32 ``[1, 1, query blocks]`` and ``[1, 1, query blocks, key blocks]``.
    """
    order = torch.argsort(blocks.int(), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]
