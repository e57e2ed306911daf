"""The block plan, by itself: every element of every shard is written once, every source element is read once.

Covers the packing algebra and each rule of the family tables for random head counts, widths and tensor-parallel
sizes, also with more ranks than KV heads. The reference of grouped QKV and gate/up is written here by reshape and
concatenation, the way Megatron-Core's own documentation describes them. Does not cover files or models.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bridge.blocks import BlockCopy, Packing, Split, merge_blocks
from megatron_bridge.families import FAMILIES
from megatron_bridge.family import Sizes, column_split, gate_up, grouped_qkv, replicated, vocabulary
from mua.utils.errors import BridgeError

small = st.integers(1, 5)
ranks = st.sampled_from([1, 2, 3, 4, 8])


def sizes(tp: int, *, vocab: int = 1, heads: int = 1, query_groups: int = 1, head_dim: int = 1) -> Sizes:
    return Sizes(vocab=vocab, heads=heads, query_groups=query_groups, head_dim=head_dim, tp=tp)


def numbered_sources(packing: Packing) -> dict[str, np.ndarray]:
    """Sources whose elements are all different and never 0."""
    sources, first = {}, 1
    for index, name in enumerate(packing.sources):
        shape = (packing.source_rows(index), packing.cols)
        sources[name] = np.arange(first, first + shape[0] * shape[1]).reshape(shape)
        first += shape[0] * shape[1]
    return sources


def source_view(block: BlockCopy, sources: dict[str, np.ndarray]) -> np.ndarray:
    rows = slice(block.source_row, block.source_row + block.rows)
    return sources[block.source][rows, block.source_col : block.source_col + block.cols]


def shard_view(block: BlockCopy, shard: np.ndarray) -> np.ndarray:
    rows = slice(block.shard_row, block.shard_row + block.rows)
    return shard[rows, block.shard_col : block.shard_col + block.cols]


def shards_of(packing: Packing, tp: int, sources: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Fill every shard by the plan, asserting that no element is written twice."""
    shards = []
    for rank in range(tp):
        shard = np.zeros(packing.shard_shape(tp), dtype=int)
        for block in packing.shard_blocks(tp, rank):
            assert not shard_view(block, shard).any()
            shard_view(block, shard)[:] = source_view(block, sources)
        shards.append(shard)
    return shards


def assert_exact_cover(packing: Packing, tp: int) -> list[np.ndarray]:
    sources = numbered_sources(packing)
    shards = shards_of(packing, tp, sources)
    distinct = shards[:1] if packing.split is Split.REPLICATED else shards
    found = np.concatenate([shard.ravel() for shard in distinct])
    expected = np.concatenate([source.ravel() for source in sources.values()])
    assert np.array_equal(np.sort(found[found != 0]), expected)
    assert (found == 0).sum() == (packing.rows - sum(packing.group_rows) * packing.groups) * packing.cols
    return shards


@given(groups=small, queries=small, head_dim=small, width=small, tp=ranks)
def test_grouped_qkv_is_megatrons_order_for_any_tp(groups, queries, head_dim, width, tp):
    rows = groups * (queries + 2) * head_dim
    if rows % tp:
        return
    size = sizes(tp, heads=groups * queries, query_groups=groups, head_dim=head_dim)
    packing = grouped_qkv("q", "k", "v").pack(("q", "k", "v"), (rows // tp, width), size)
    source = numbered_sources(packing)
    grouped = [source[name].reshape(groups, -1, width) for name in "qkv"]
    expected = np.concatenate(grouped, axis=1).reshape(rows, width)
    shards = assert_exact_cover(packing, tp)
    assert np.array_equal(np.concatenate(shards), expected)


@given(ffn=small, width=small, tp=ranks)
def test_gate_up_is_halved_in_every_shard(ffn, width, tp):
    packing = gate_up("gate", "up").pack(("gate", "up"), (2 * ffn, width), sizes(tp))
    source = numbered_sources(packing)
    for rank, shard in enumerate(assert_exact_cover(packing, tp)):
        mine = slice(rank * ffn, (rank + 1) * ffn)
        assert np.array_equal(shard, np.concatenate([source["gate"][mine], source["up"][mine]]))


@given(vocab=st.integers(1, 40), shard_rows=st.integers(1, 12), width=small, tp=ranks)
def test_vocabulary_padding_is_at_the_end_and_zero(vocab, shard_rows, width, tp):
    rule = vocabulary("embed")
    if shard_rows * tp < vocab:
        with pytest.raises(BridgeError, match=f"{shard_rows * tp} vocabulary rows, config.json says {vocab}"):
            rule.pack(("embed",), (shard_rows, width), sizes(tp, vocab=vocab))
        return
    packing = rule.pack(("embed",), (shard_rows, width), sizes(tp, vocab=vocab))
    whole = np.concatenate(assert_exact_cover(packing, tp))
    assert np.array_equal(whole[:vocab], numbered_sources(packing)["embed"])
    assert not whole[vocab:].any()


@given(rows=small, shard_cols=small, tp=ranks)
def test_column_split_and_replicated(rows, shard_cols, tp):
    columns = column_split("w").pack(("w",), (rows, shard_cols), sizes(tp))
    shards = assert_exact_cover(columns, tp)
    assert np.array_equal(np.concatenate(shards, axis=1), numbered_sources(columns)["w"])
    whole = replicated("w").pack(("w",), (rows, shard_cols), sizes(tp))
    assert all(np.array_equal(shard, numbered_sources(whole)["w"]) for shard in assert_exact_cover(whole, tp))


@given(
    group_rows=st.lists(small, min_size=1, max_size=4),
    groups=small,
    padding=st.integers(0, 6),
    width=small,
    tp=ranks,
)
def test_any_packing_is_covered_exactly(group_rows, groups, padding, width, tp):
    rows = sum(group_rows) * groups + padding
    rows += -rows % tp
    names = tuple(f"s{index}" for index in range(len(group_rows)))
    assert_exact_cover(Packing(names, tuple(group_rows), groups, rows, width, Split.ROWS), tp)


def test_adjacent_blocks_are_read_at_once():
    packing = Packing(("a",), (2,), 6, 12, 3, Split.ROWS)
    assert packing.shard_blocks(2, 1) == [BlockCopy("a", 6, 0, 0, 0, 6, 3)]
    apart = [BlockCopy("a", 0, 0, 0, 0, 1, 3), BlockCopy("a", 2, 0, 1, 0, 1, 3)]
    assert merge_blocks(apart) == apart


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_tables_name_layer_and_expert_in_every_source_or_in_none(family):
    for name, rule in family.parameters.items():
        counts = {len(re.findall(r"\{\}", text)) for text in (name, *rule.sources)}
        assert len(counts) == 1, name
        assert max(counts) <= 2, name


@pytest.mark.parametrize("name", ["mlp.experts.local_experts.12.linear_fc2.weight", "mlp.experts.linear_fc2.weight12"])
def test_layer_and_expert_numbers_reach_the_sources(name):
    packing = FAMILIES["qwen3_moe"].packing(f"decoder.layers.30.{name}", (4, 4), sizes(2))
    assert packing.sources == ("model.layers.30.mlp.experts.12.down_proj.weight",)
    assert packing.cols == 8
