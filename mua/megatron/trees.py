"""Prefix trees: tokens that several sequences begin with are laid out, and computed, once.

Trajectories of one task share system prompt, tools and first turns; segments of one trajectory share what precedes a
rewritten context. ::

    s0  a b c d e            node 0  a b c          (root, shared by all)
    s1  a b c d f     ──►    node 1  d  ▸ node 0    (shared by s0 and s1)
    s2  a b c g              node 2  e  ▸ node 1    node 3  f  ▸ node 1    node 4  g  ▸ node 0

A token attends to its node's earlier tokens and to all of the node's ancestors; its position is its depth. What follows
a node is predicted by the node's last token, so that at a branching point one position predicts several tokens, each
with the weight and the advantage of its own sequence: the loss is that of the sequences laid out one by one.

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
:func:`merge_prefixes`, a token is part of at most ``1 + log2(tokens)`` tiles, however deep the tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from mua.types import Int32Array
from mua.utils.errors import MuaError


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens without a branch."""

    sequence: int
    """One of the sequences that hold it, one that goes on behind it if any does."""
    start: int
    """Where it begins in that sequence, which is its depth."""
    stop: int
    parent: int
    """Index of the node it continues, before it in the forest; -1 for none."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Forest:
    """Sequences as paths through nodes."""

    nodes: tuple[Node, ...]
    """In pre-order: what continues a node follows it, the child with most tokens below it first."""
    paths: tuple[tuple[int, ...], ...]
    """For each sequence its nodes, from the root on; together they are the sequence."""

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(len(node) for node in self.nodes)

    def lay_out(self, arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """What belongs to the tokens of every node, from the sequence that holds it, end to end."""
        return np.concatenate([arrays[node.sequence][node.start : node.stop] for node in self.nodes])

    def places(self) -> npt.NDArray[np.int64]:
        """For every token of every sequence its index in the nodes laid end to end."""
        first = np.cumsum([0, *(len(node) for node in self.nodes)])
        return np.concatenate([np.arange(first[n], first[n + 1]) for path in self.paths for n in path])

    def last_tokens(self) -> npt.NDArray[np.int64]:
        """Of sequences that nothing goes on behind, the last token's index in the nodes laid end to end."""
        lengths = [sum(len(self.nodes[index]) for index in path) for path in self.paths]
        ends = np.cumsum([len(node) for node in self.nodes]) - 1
        return ends[[node.stop == lengths[node.sequence] for node in self.nodes]]


def join_forests(forests: Sequence[Forest]) -> Forest:
    """Several forests side by side; their sequences follow each other."""
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = []
    for forest in forests:
        first, sequences = len(nodes), len(paths)
        nodes += [
            replace(node, sequence=node.sequence + sequences, parent=node.parent + first if node.parent >= 0 else -1)
            for node in forest.nodes
        ]
        paths += [tuple(index + first for index in path) for path in forest.paths]
    return Forest(tuple(nodes), tuple(paths))


def merge_prefixes(ids: Sequence[Int32Array], least: int = 1) -> Forest:
    """The prefix tree of ``ids``; shared runs of fewer than ``least`` tokens stay separate."""
    order = sorted(range(len(ids)), key=lambda index: ids[index].tobytes())
    shared = [0, *(_shared(ids[one], ids[other]) for one, other in itertools.pairwise(order))]
    nodes: list[Node] = []
    paths: list[tuple[int, ...]] = [()] * len(ids)
    # A run of neighbors in sorted order that share ``depth`` tokens, laid out already along ``path``.
    runs: list[tuple[int, int, int, tuple[int, ...]]] = [(0, len(order), 0, ())] if ids else []
    while runs:
        low, high, depth, path = runs.pop()
        # Runs within it that share at least ``least`` tokens more.
        cuts = [low, *(place for place in range(low + 1, high) if shared[place] < depth + least), high]
        if len(cuts) > 2:
            runs += [(start, stop, depth, path) for start, stop in reversed(list(itertools.pairwise(cuts)))]
            continue
        longest = order[high - 1]
        end = min([len(ids[order[low]]), *shared[low + 1 : high]])
        if end > depth:
            nodes.append(Node(longest, depth, end, path[-1] if path else -1))
            path = (*path, len(nodes) - 1)
        if high - low == 1:
            paths[longest] = path
            continue
        ended = low
        while ended < high and len(ids[order[ended]]) == end:
            paths[order[ended]] = path
            ended += 1
        if ended < high:
            # What goes on shares nothing more with the first that does not, so that it falls apart next time round.
            runs.append((ended, high, end, path))
    return _heaviest_first(nodes, paths)


def _heaviest_first(nodes: Sequence[Node], paths: Sequence[tuple[int, ...]]) -> Forest:
    """The forest with each node's children ordered by the tokens of their subtrees."""
    weights = [len(node) for node in nodes]
    children: dict[int, list[int]] = {index: [] for index in range(-1, len(nodes))}
    for index in reversed(range(len(nodes))):
        parent = nodes[index].parent
        children[parent].append(index)
        if parent >= 0:
            weights[parent] += weights[index]
    order: list[int] = []
    ahead = children[-1]
    while ahead:
        order.append(ahead.pop())
        ahead += sorted(children[order[-1]], key=lambda index: (weights[index], -index))
    place = {index: position for position, index in enumerate(order)} | {-1: -1}
    ordered = tuple(replace(nodes[index], parent=place[nodes[index].parent]) for index in order)
    return Forest(ordered, tuple(tuple(place[index] for index in path) for path in paths))


def group_by_prefix(ids: Sequence[Int32Array], capacity: int, least: int = 1) -> list[list[int]]:
    """Cuts sequences into groups whose merged tokens are at most ``capacity``, neighbors in sorted order together.

    Raises:
        MuaError: a sequence is longer than that.
    """
    for index, sequence in enumerate(ids):
        if len(sequence) > capacity:
            raise MuaError(
                f"sequence {index} has {len(sequence)} tokens, more than megatron.max_tokens_per_microbatch "
                f"{capacity}; raise the key or lower rollout.max_tokens"
            )
    order = sorted(range(len(ids)), key=lambda index: ids[index].tobytes())
    found: list[list[int]] = []
    while order:
        # As many as are at most ``capacity`` tokens when merged, by what neighbors share.
        taken = size = 0
        for before, index in zip([None, *order], order, strict=False):
            common = 0 if before is None else _shared(ids[before], ids[index])
            size += len(ids[index]) - (common if common >= least else 0)
            if size > capacity:
                break
            taken += 1
        # Short runs that are not shared in the end make a tree larger than the count of shared tokens says.
        while merge_prefixes([ids[index] for index in order[:taken]], least).tokens > capacity:
            taken -= 1
        found.append(order[:taken])
        order = order[taken:]
    return found


def _shared(one: Int32Array, other: Int32Array) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


# ---- where the tokens of a packed micro-batch lie: on context-parallel ranks, and in the scores of attention

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
