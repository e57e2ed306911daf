"""Mappings as block copies: which rows and columns of which Hugging Face tensor fill which part of a shard.

A full Megatron parameter is a stack of *groups*; every group holds some rows of each source tensor in turn.
One group per KV head with rows ``(q, k, v)`` is the grouped-query interleaving of ``linear_qkv``; one group per
tensor-parallel rank with rows ``(gate, up)`` is the packing of ``linear_fc1``; one group with one source is a
plain copy. A shard is then always a contiguous slice of that stack, over rows or over columns, so the same few
lines give every shard of every layout, also when there are more ranks than KV heads.

Read forwards, the plan loads; read backwards, it exports. No inverse is written by hand. Nothing here knows
about torch: a one-dimensional tensor of n elements counts as n rows of one column.

A Hugging Face tensor comes from shards on several ranks, or from several stored chunks of a Megatron checkpoint.
Cut into bands (:func:`bands`), whole rows of it are complete in the order of the file, so that a writer holds one band
and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from mua.utils.errors import BridgeError


class Split(Enum):
    """How tensor parallelism divides a full Megatron parameter."""

    REPLICATED = "replicated"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A rectangle of ``rows`` x ``cols`` that appears in a source tensor and, unchanged, in a shard."""

    source: str
    source_row: int
    source_col: int
    shard_row: int
    shard_col: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of one full Megatron parameter, ``[rows, cols]``, before tensor parallelism divides it.

    ``sources`` are Hugging Face names; ``group_rows[i]`` is how many rows of source i each group holds. Rows
    beyond the groups are padding, belong to no source, and are zero.
    """

    sources: tuple[str, ...]
    group_rows: tuple[int, ...]
    groups: int
    rows: int
    cols: int
    split: Split

    def source_rows(self, index: int) -> int:
        """Rows of source ``index`` in whole."""
        return self.group_rows[index] * self.groups

    def shard_shape(self, tp: int) -> tuple[int, int]:
        """``(rows, cols)`` of one of ``tp`` shards."""
        if self.split is Split.ROWS:
            return _divide(self.rows, tp, self, "rows"), self.cols
        if self.split is Split.COLUMNS:
            return self.rows, _divide(self.cols, tp, self, "columns")
        return self.rows, self.cols

    def shard_blocks(self, tp: int, rank: int) -> list[BlockCopy]:
        """The copies that fill shard ``rank`` of ``tp``, in the order of the shard's rows."""
        rows, cols = self.shard_shape(tp)
        first_row = rank * rows if self.split is Split.ROWS else 0
        first_col = rank * cols if self.split is Split.COLUMNS else 0
        blocks = []
        start = 0  # a source's first row in the stack
        for group in range(self.groups):
            for source, count in zip(self.sources, self.group_rows, strict=True):
                low, high = max(start, first_row), min(start + count, first_row + rows)
                if low < high:
                    source_row = group * count + low - start
                    blocks.append(BlockCopy(source, source_row, first_col, low - first_row, 0, high - low, cols))
                start += count
        return merge_blocks(blocks)


def merge_blocks(blocks: list[BlockCopy]) -> list[BlockCopy]:
    """Join copies that continue each other both in the source and in the shard."""
    merged: list[BlockCopy] = []
    for block in blocks:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.source == block.source
            and last.source_row + last.rows == block.source_row
            and last.shard_row + last.rows == block.shard_row
            and (last.source_col, last.shard_col, last.cols) == (block.source_col, block.shard_col, block.cols)
        ):
            merged[-1] = replace(last, rows=last.rows + block.rows)
        else:
            merged.append(block)
    return merged


def _divide(size: int, tp: int, packing: Packing, axis: str) -> int:
    if size % tp:
        sources = ", ".join(packing.sources)
        raise BridgeError(f"{sources}: {size} {axis} do not divide by tensor_model_parallel_size {tp}")
    return size // tp


# ---- tensors put together, a band of rows at a time

Origin = TypeVar("Origin")


@dataclass(frozen=True, slots=True)
class BandPart(Generic[Origin]):
    """A rectangle of ``rows`` x ``cols`` of a tensor, and the same rectangle where its values are."""

    origin: Origin
    """Where the values are: a rank, a stored chunk."""
    origin_row: int
    origin_col: int
    row: int
    col: int
    rows: int
    cols: int

    def cut(self, row: int, rows: int) -> BandPart[Origin]:
        """Its rows ``row`` to ``row + rows``, counted in the tensor."""
        origin_row = self.origin_row + row - self.row
        return BandPart(self.origin, origin_row, self.origin_col, row, self.col, rows, self.cols)


@dataclass(frozen=True, slots=True)
class RowBand(Generic[Origin]):
    """Whole rows of a tensor: ``pieces`` side by side, from its first column to its last."""

    row: int
    rows: int
    pieces: tuple[BandPart[Origin], ...]


def bands(
    name: str, pieces: Iterable[BandPart[Origin]], rows: int, cols: int, max_rows: int
) -> Iterator[RowBand[Origin]]:
    """The tensor ``name``, ``[rows, cols]``, from top to bottom in bands of at most ``max_rows`` rows.

    Raises:
        BridgeError: the pieces leave a gap or overlap.
    """
    waiting = sorted(pieces, key=lambda piece: (piece.row, piece.col), reverse=True)
    active: list[BandPart[Origin]] = []
    row = 0
    while row < rows:
        active = [piece for piece in active if piece.row + piece.rows > row]
        while waiting and waiting[-1].row <= row:
            active.append(waiting.pop())
        active.sort(key=lambda piece: piece.col)
        ends = [0, *itertools.accumulate(piece.cols for piece in active)]
        faults = [end for end, col in zip(ends, (*(piece.col for piece in active), cols), strict=True) if end != col]
        if faults:
            raise BridgeError(f"{name}: column {faults[0]} of row {row} is not in one place, but in none or in several")
        end = min(piece.row + piece.rows for piece in active)
        end = min(end, waiting[-1].row if waiting else end, row + max_rows)
        yield RowBand(row, end - row, tuple(piece.cut(row, end - row) for piece in active))
        row = end
