"""Where the tokens of a packed micro-batch lie: on context-parallel ranks, and in the score matrix of attention.

Context parallelism: each node of the micro-batch is cut into ``2 * size`` chunks of equal length, and rank ``r`` holds
chunks ``r`` and ``2 * size - 1 - r`` of it (zigzag), so that under causal attention all ranks have the same work::

    2 ranks, one sequence:   | 0 | 1 | 1 | 0 |      a rank's positions lie in their order: head chunk, tail chunk

Attention over prefix trees is taken apart into rectangles and triangles of the score matrix. Nodes lie in pre-order, so
that all that continues a node follows it without a gap, and a token sees an earlier one if it lies before the end of
that one's subtree::

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
:func:`mua.megatron.trees.merged`, a token is part of at most ``1 + log2(tokens)`` tiles, however deep the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

IndexArray: TypeAlias = npt.NDArray[np.int64]


def zigzag(lengths: Sequence[int], size: int, rank: int) -> IndexArray:
    """The positions that a rank holds, in the order in which it holds them: int64 ``[tokens / size]``.

    Args:
        lengths: tokens of each node, multiples of ``2 * size`` (any length if ``size`` is 1).
        size: context-parallel ranks.
    """
    if size == 1:
        return np.arange(sum(lengths), dtype=np.int64)
    chunks = [np.zeros(0, dtype=np.int64)]
    start = 0
    for length in lengths:
        chunk = length // (2 * size)
        chunks += [start + part * chunk + np.arange(chunk) for part in (rank, 2 * size - 1 - rank)]
        start += length
    return np.concatenate(chunks)


def gathered_order(lengths: Sequence[int], size: int) -> IndexArray:
    """Where each position is found in the concatenation of all ranks' parts: int64 ``[tokens]``."""
    return np.argsort(np.concatenate([zigzag(lengths, size, rank) for rank in range(size)]))


@dataclass(frozen=True, slots=True)
class Tile:
    """Scores of consecutive queries with consecutive keys."""

    queries: slice
    """Among this rank's tokens."""
    keys: slice
    """Among the tokens of the micro-batch."""
    causal: bool
    """A triangle: as many queries as keys, and the i-th sees keys up to the i-th. Else every one sees all."""


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """Where the nodes of a micro-batch lie."""

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
    def of(cls, lengths: tuple[int, ...], used: tuple[int, ...], parents: tuple[int, ...]) -> NodePlaces:
        """From what :class:`mua.megatron.modules.PackedMicrobatch` knows.

        Raises:
            ValueError: the nodes are not in pre-order.
        """
        stops = tuple(itertools.accumulate(lengths))
        starts = (0, *stops[:-1])
        filled = (*(start + count for start, count in zip(starts, used, strict=False)), *stops[len(used) :])
        parents = (*parents, *(-1 for _ in lengths[len(parents) :]))
        ends, path = list(stops), list[int]()
        for node, parent in enumerate(parents):
            while path and path[-1] != parent:
                ends[path.pop()] = stops[node - 1]
            if parent >= 0 and not path:
                raise ValueError(f"node {node} does not follow its parent in pre-order: parents {parents}")
            path.append(node)
        for node in path:
            ends[node] = stops[-1]
        return cls(starts, filled, stops, tuple(ends), parents)


def visible_until(nodes: NodePlaces) -> IndexArray:
    """Position j is seen from i if ``j <= i < visible_until[j]``: int64 ``[tokens]``.

    Padding is seen by the padding behind it in the same node, and by nothing else.
    """
    found = np.zeros(nodes.stops[-1], dtype=np.int64)
    for start, filled, stop, end in zip(nodes.starts, nodes.filled, nodes.stops, nodes.ends, strict=True):
        found[start:filled] = end
        found[filled:stop] = stop
    return found


def tiles(nodes: NodePlaces, size: int = 1, rank: int = 0) -> tuple[Tile, ...]:
    """Every visible pair of a rank's query and a key of the micro-batch, once; triangles first, one for each query.

    Args:
        size: context-parallel ranks, of which ``rank`` holds two chunks of every node, see :func:`zigzag`.
    """
    found: list[Tile] = []
    count = len(nodes.starts)
    # Runs: nodes one after the other of which each is the first child of the one before, without padding between them.
    firsts = [
        node
        for node in range(count)
        if size > 1 or nodes.parents[node] != node - 1 or node == 0 or nodes.filled[node - 1] != nodes.stops[node - 1]
    ]
    for run in itertools.starmap(range, itertools.pairwise([*firsts, count])):
        start, inner = nodes.starts[run[0]], nodes.stops[run[-1]]
        if size == 1:
            found.append(Tile(slice(start, inner), slice(start, inner), causal=True))
        else:  # two chunks of a node, each with itself and with what of the node lies before it
            chunk, place = (inner - start) // (2 * size), start // size
            for part in (rank, 2 * size - 1 - rank):
                queries, before = slice(place, place + chunk), start + part * chunk
                found.append(Tile(queries, slice(before, before + chunk), causal=True))
                if part:
                    found.append(Tile(queries, slice(start, before), causal=False))
                place += chunk
        # Queries that continue the run without belonging to it, all those that leave it behind the same node at once.
        for node in reversed(run):
            outer = nodes.ends[node]
            if outer > inner:
                keys = slice(start, nodes.filled[node])
                found.append(Tile(slice(inner // size, outer // size), keys, causal=False))
            inner = outer
    return tuple(sorted(found, key=lambda tile: not tile.causal))
