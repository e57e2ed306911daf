"""Prefix trees of random sequences: paths spell the sequences, nothing shared is laid out twice, capacity holds.

Does not cover training on them (tests/parity/test_megatron_layouts.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.megatron.trees import Forest, group_by_prefix, merge_prefixes
from mua.types import Int32Array
from mua.utils.errors import MuaError

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)


def arrays(sequences: list[list[int]]) -> list[Int32Array]:
    return [np.array(sequence, dtype=np.int32) for sequence in sequences]


def assert_spells(forest: Forest, ids: list[Int32Array]) -> None:
    assert len(forest.paths) == len(ids)
    for path, sequence in zip(forest.paths, ids, strict=True):
        nodes = [forest.nodes[index] for index in path]
        depth = 0
        for place, node in enumerate(nodes):
            assert node.start == depth
            assert node.parent == (path[place - 1] if place else -1)
            assert node.parent < path[place]
            depth = node.stop
        spelled = np.concatenate([ids[node.sequence][node.start : node.stop] for node in nodes])
        np.testing.assert_array_equal(spelled, sequence)


@given(SEQUENCES, st.integers(1, 4))
def test_paths_spell_the_sequences(sequences: list[list[int]], least: int) -> None:
    ids = arrays(sequences)
    assert_spells(merge_prefixes(ids, least), ids)


@given(SEQUENCES)
def test_every_prefix_is_laid_out_once(sequences: list[list[int]]) -> None:
    prefixes = {tuple(s[:length]) for s in sequences for length in range(1, len(s) + 1)}
    assert merge_prefixes(arrays(sequences)).tokens == len(prefixes)


@given(SEQUENCES, st.integers(2, 4))
def test_runs_shorter_than_the_least_are_not_shared(sequences: list[list[int]], least: int) -> None:
    forest = merge_prefixes(arrays(sequences), least)
    holders = [sum(index in path for path in forest.paths) for index in range(len(forest.nodes))]
    for node, count in zip(forest.nodes, holders, strict=True):
        assert count == 1 or len(node) >= least or any(len(s) == node.stop for s in sequences)


@given(SEQUENCES)
def test_a_node_is_held_by_a_sequence_that_goes_on_if_any_does(sequences: list[list[int]]) -> None:
    forest = merge_prefixes(arrays(sequences))
    for index, node in enumerate(forest.nodes):
        goes_on = any(child.parent == index for child in forest.nodes)
        assert (node.stop < len(sequences[node.sequence])) == goes_on


@given(SEQUENCES, st.integers(1, 3), st.integers(9, 30))
def test_groups_hold_every_sequence_once_within_capacity(sequences, least: int, capacity: int) -> None:
    ids = arrays(sequences)
    found = group_by_prefix(ids, capacity, least)
    assert sorted(index for group in found for index in group) == list(range(len(ids)))
    assert all(merge_prefixes([ids[index] for index in group], least).tokens <= capacity for group in found)


def test_a_common_prefix_stays_together() -> None:
    prefix, other = [1] * 20, [2] * 20
    sequences = [[*prefix, 5], [*other, 5], [*prefix, 6], [*other, 6]]
    assert sorted(map(sorted, group_by_prefix(arrays(sequences), 25))) == [[0, 2], [1, 3]]


def test_a_sequence_longer_than_a_row_is_named() -> None:
    with pytest.raises(MuaError, match=r"sequence 1 has 5 tokens, more than megatron\.max_tokens_per_microbatch 4"):
        group_by_prefix(arrays([[1], [2] * 5]), 4)
