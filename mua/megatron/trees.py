"""Prefix trees: tokens that several sequences begin with are laid out, and computed, once.

Trajectories of one task share system prompt, tools and first turns; segments of one trajectory share what precedes a
rewritten context. ::

    s0  a b c d e            node 0  a b c          (root, shared by all)
    s1  a b c d f     ──►    node 1  d  ▸ node 0    (shared by s0 and s1)
    s2  a b c g              node 2  e  ▸ node 1    node 3  f  ▸ node 1    node 4  g  ▸ node 0

A token attends to its node's earlier tokens and to all of the node's ancestors; its position is its depth. What follows
a node is predicted by the node's last token, so that at a branching point one position predicts several tokens, each
with the weight and the advantage of its own sequence: the loss is that of the sequences laid out one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
