"""Attention over a row of prefix trees, taken apart into rectangles and triangles of the score matrix.

Nodes lie in the row in pre-order, so that all that continues a node follows it without a gap, and a token sees an
earlier one if it lies before the end of that one's subtree::

    position        0 1 2 3 4 5 6      node 0 is continued by node 1 and node 2
    node            0 0 0 1 1 2 2
    end of subtree  7 7 7 5 5 7 7      5 sees 0, 1 and 2, not 3 and 4, whose subtree ended at 5

    keys  0 1 2 3 4 5 6
      0   ╲                            a triangle for node 0 and its first child, which is the longest: a run
      1   . ╲
      2   . . ╲
      3   . . . ╲
      4   . . . . ╲
      5   █ █ █     ╲                  a rectangle for the queries of all other children at once,
      6   █ █ █     . ╲                and a triangle for each of them

A run is a heavy path (Sleator and Tarjan, 1983): where the child with most tokens comes first, as in
:func:`mua.megatron.trees.merged`, a token is part of at most ``1 + log2(tokens)`` pieces, however deep the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mua.megatron.context import IndexArray


@dataclass(frozen=True, slots=True)
class Piece:
    """Scores of consecutive queries with consecutive keys."""

    queries: slice
    """Among this rank's tokens."""
    keys: slice
    """Among the tokens of the row."""
    causal: bool
    """A triangle: as many queries as keys, and the i-th sees keys up to the i-th. Else every one sees all."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the nodes of a row lie."""

    starts: tuple[int, ...]
    """Position of each node's first token."""
    filled: tuple[int, ...]
    """Position behind each node's last token; padding follows."""
    stops: tuple[int, ...]
    """Position behind each node's padding, where the next node starts."""
    ends: tuple[int, ...]
    """Position behind the last node of each node's subtree."""
    parents: tuple[int, ...]

    @classmethod
    def of(cls, lengths: tuple[int, ...], used: tuple[int, ...], parents: tuple[int, ...]) -> Layout:
        """From what :class:`mua.megatron.modules.PackedMicrobatch` knows.

        Raises:
            ValueError: the nodes are not in pre-order.
        """
        stops = tuple(itertools.accumulate(lengths))
        starts = (0, *stops[:-1])
        filled = (*(start + count for start, count in zip(starts, used, strict=False)), *stops[len(used) :])
        parents = (*parents, *(-1 for _ in lengths[len(parents) :]))
        return cls(starts, filled, stops, _ends(parents, stops), parents)


def _ends(parents: tuple[int, ...], stops: tuple[int, ...]) -> tuple[int, ...]:
    """Behind each node and all that continue it."""
    ends = list(stops)
    path: list[int] = []
    for node, parent in enumerate(parents):
        while path and path[-1] != parent:
            ends[path.pop()] = stops[node - 1]
        if parent >= 0 and not path:
            raise ValueError(f"node {node} does not follow its parent in pre-order: parents {parents}")
        path.append(node)
    for node in path:
        ends[node] = stops[-1]
    return tuple(ends)


def visible_until(layout: Layout) -> IndexArray:
    """Position j is seen from i if ``j <= i < visible_until[j]``: int64 ``[row]``.

    Padding is seen by the padding behind it in the same node, and by nothing else.
    """
    found = np.zeros(layout.stops[-1], dtype=np.int64)
    for node, start in enumerate(layout.starts):
        found[start : layout.filled[node]] = layout.ends[node]
        found[layout.filled[node] : layout.stops[node]] = layout.stops[node]
    return found


def pieces(layout: Layout, size: int = 1, rank: int = 0) -> tuple[Piece, ...]:
    """Every visible pair of a rank's query and a key of the row, once; triangles first, one for each query.

    Args:
        size: context-parallel ranks, of which ``rank`` holds two chunks of every node, as
            :func:`mua.megatron.context.zigzag` says.
    """
    found: list[Piece] = []
    for run in _runs(layout, joining=size == 1):
        found += _within(layout.starts[run[0]], layout.stops[run[-1]], size, rank)
        found += _below(run, layout, size)
    return tuple(sorted(found, key=lambda piece: not piece.causal))


def _runs(layout: Layout, joining: bool) -> Iterator[range]:
    """Nodes in a row of which each is the first child of the one before, without padding between them."""
    first, count = 0, len(layout.starts)
    for node in range(1, count):
        adjoins = layout.parents[node] == node - 1 and layout.filled[node - 1] == layout.stops[node - 1]
        if not (joining and adjoins):
            yield range(first, node)
            first = node
    yield range(first, count)


def _within(start: int, stop: int, size: int, rank: int) -> Iterator[Piece]:
    """Queries of a run with its own keys."""
    if size == 1:
        yield Piece(slice(start, stop), slice(start, stop), causal=True)
        return
    chunk, place = (stop - start) // (2 * size), start // size
    for part in (rank, 2 * size - 1 - rank):
        queries, before = slice(place, place + chunk), start + part * chunk
        yield Piece(queries, slice(before, before + chunk), causal=True)
        if part:
            yield Piece(queries, slice(start, before), causal=False)
        place += chunk


def _below(run: range, layout: Layout, size: int) -> Iterator[Piece]:
    """Queries that continue a run without belonging to it, all those that leave it behind the same node at once."""
    inner = layout.stops[run[-1]]
    for node in reversed(run):
        outer = layout.ends[node]
        if outer > inner:
            keys = slice(layout.starts[run[0]], layout.filled[node])
            yield Piece(slice(inner // size, outer // size), keys, causal=False)
        inner = outer
