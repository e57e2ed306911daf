"""Putting a tensor together from rectangles that lie elsewhere, a band of rows at a time.

A Hugging Face tensor comes from shards on several ranks, or from several stored chunks of a Megatron checkpoint.
Cut into bands, whole rows of it are complete in the order of the file, so that a writer holds one band and no more.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from mua.utils.errors import BridgeError

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
