"""Attention over prefix trees: what is seen, that tiles and blocks are just that, output and gradients.

Each against the definition, which knows of paths alone: brute force over all pairs, and a masked softmax in float64.
FlexAttention runs forward on the CPU, interpreted and (slow) compiled with dynamic shapes; its backward pass and CUDA
are not covered. Training under parallel layouts: tests/parity/test_megatron_layouts.py.
"""

from __future__ import annotations

import itertools
import math
import shutil
from inspect import signature

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

from mua.megatron import attention
from mua.megatron.attention import attend_tiles
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.trees import NodePlaces, join_forests, merge_prefixes, tiles, visible_until, zigzag
from mua.types import BoolArray

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=9)


def layout_of(groups: list[list[list[int]]], multiple: int = 1, rest: int = 0) -> NodePlaces:
    """Groups of sequences as trees side by side, nodes padded to ``multiple``, ``rest`` positions of padding behind."""
    forest = join_forests([merge_prefixes([np.array(ids, dtype=np.int32) for ids in group]) for group in groups])
    used = tuple(len(node) for node in forest.nodes)
    padded = (*(-(-length // multiple) * multiple for length in used), *([rest] if rest else []))
    return NodePlaces.of(padded, used, tuple(node.parent for node in forest.nodes))


def seen(layout: NodePlaces) -> BoolArray:
    """By definition: earlier in the same node, or a token of an ancestor; ``[row, row]``."""
    found = np.zeros((layout.stops[-1],) * 2, dtype=np.bool_)
    for node, (start, stop) in enumerate(zip(layout.starts, layout.stops, strict=True)):
        found[start:stop, start:stop] = np.tri(stop - start, dtype=np.bool_)
        parent = layout.parents[node]
        while parent >= 0:
            found[start:stop, layout.starts[parent] : layout.filled[parent]] = True
            parent = layout.parents[parent]
    return found


@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_a_token_is_seen_until_its_subtree_ends(groups, size: int, tail: bool) -> None:
    layout = layout_of(groups, 2 * size, 2 * size * tail)
    place = np.arange(layout.stops[-1])
    expected = (place <= place[:, None]) & (place[:, None] < visible_until(layout))
    np.testing.assert_array_equal(seen(layout), expected)


@given(st.lists(SEQUENCES, min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_tiles_hold_every_visible_pair_once(groups, size: int, tail: bool) -> None:
    multiple = 1 if size == 1 else 2 * size
    layout = layout_of(groups, multiple, multiple * tail)
    lengths = [stop - start for start, stop in zip(layout.starts, layout.stops, strict=True)]
    for rank in range(size):
        mine = zigzag(lengths, size, rank)
        held = np.zeros((len(mine), layout.stops[-1]), dtype=np.int64)
        triangles = np.zeros(len(mine), dtype=np.int64)
        for tile in tiles(layout, size, rank):
            shape = held[tile.queries, tile.keys].shape
            assert 0 not in shape
            held[tile.queries, tile.keys] += np.tri(*shape, dtype=np.int64) if tile.causal else 1
            triangles[tile.queries] += tile.causal
        np.testing.assert_array_equal(held, seen(layout)[mine])
        assert set(triangles) == {1}


def test_a_token_is_in_few_tiles_however_deep_the_tree() -> None:
    """A conversation whose every reply is a sample too, as where templates drop reasoning from what follows."""
    turns = [[10 * turn] * 5 for turn in range(30)]
    layout = layout_of([[[*itertools.chain(*turns[:count]), -count, count] for count in range(1, 31)]])
    found = tiles(layout)
    parts = np.zeros(layout.stops[-1], dtype=np.int64)
    for tile in found:
        parts[tile.queries] += 1
    assert len(found) == 30 + 29
    assert parts.max() == 2


def test_nodes_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="node 3 does not follow its parent in pre-order"):
        NodePlaces.of((2, 2, 2, 2), (2, 2, 2, 2), (-1, 0, -1, 1))


def tensors(layout: NodePlaces, queries: int, heads: int = 4, groups: int = 2, width: int = 16) -> list[Tensor]:
    torch.manual_seed(0)
    keys = layout.stops[-1]
    return [
        torch.randn(n, h, width, dtype=torch.float64) for n, h in ((queries, heads), (keys, groups), (keys, groups))
    ]


def reference(query: Tensor, key: Tensor, value: Tensor, mask: BoolArray, scale: float) -> Tensor:
    """Softmax with all scores formed."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~torch.from_numpy(mask), -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def large_layout(size: int = 1) -> NodePlaces:
    """Two trees and a sequence alone, of some hundred tokens, that branch several times."""
    random = np.random.default_rng(0)

    def text(length: int) -> list[int]:
        return random.integers(0, 50, length).tolist()

    prompt, turn, other = text(170), text(90), text(140)
    tree = [prompt + text(60), prompt + turn + text(30), prompt + turn + text(45), prompt + turn, prompt + text(7)]
    return layout_of([tree, [other + text(20), other + text(80)], [text(33)]], 1 if size == 1 else 2 * size, 4 * size)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_output_and_gradients_are_those_of_a_masked_softmax(size: int, rank: int) -> None:
    layout = large_layout(size)
    mine = zigzag([b - a for a, b in zip(layout.starts, layout.stops, strict=True)], size, rank)
    given_ = [tensor.requires_grad_() for tensor in tensors(layout, len(mine))]
    direction = torch.randn(given_[0].shape, dtype=torch.float64)
    found, expected = [], []
    for output, results in (
        (attend_tiles(*given_, tiles(layout, size, rank), 0.3), found),
        (reference(*given_, seen(layout)[mine], 0.3), expected),
    ):
        results += [output, *torch.autograd.grad((output * direction).sum(), given_)]
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-10)


def test_scores_of_any_size_are_joined() -> None:
    layout = layout_of([[[0] * 20 + [1] * 5, [0] * 20 + [2] * 5]])
    query, key, value = tensors(layout, layout.stops[-1])
    key[:20] *= 300.0  # some queries see all but nothing in the prefix, others nothing but it
    output = attend_tiles(query, key, value, tiles(layout), 1.0)
    torch.testing.assert_close(output, reference(query, key, value, seen(layout), 1.0), rtol=1e-10, atol=1e-10)


@settings(max_examples=30)
@given(st.integers(1, 2), st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(0, 10**6))
def test_blocks_leave_nothing_out_and_those_of_all_pairs_need_no_mask(size: int, lengths, seed: int) -> None:
    random, multiple = np.random.default_rng(seed), 1 if size == 1 else 2 * size
    padded = tuple(-(-length // multiple) * multiple for length in lengths)
    parents = [-1]
    for node in range(1, len(lengths)):
        path = [node - 1]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        parents.append(int(random.choice([*path, -1])))
    layout = NodePlaces.of(padded, tuple(lengths), tuple(parents))
    for rank in range(size):
        mask = attention.block_mask(layout, size, rank, torch.device("cpu"))
        pairs = seen(layout)[zigzag(padded, size, rank)]
        np.testing.assert_array_equal(by_blocks(mask, pairs.shape), pairs)


def by_blocks(mask: attention.BlockMask, shape: tuple[int, int]) -> BoolArray:
    """The pairs that a kernel computes which believes the lists of blocks."""
    rows, columns = (-(-count // attention.BLOCK) for count in shape)
    query, key = (torch.arange(count) for count in shape)
    single = mask.mask_mod(torch.tensor(0), torch.tensor(0), query[:, None], key[None]).numpy()
    found = np.zeros((rows * attention.BLOCK, columns * attention.BLOCK), dtype=np.bool_)
    cut = np.zeros_like(found)
    cut[: shape[0], : shape[1]] = single
    for counts, indices, whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for row, number in itertools.product(range(rows), range(columns)):
            if number < counts[0, 0, row]:
                column = int(indices[0, 0, row, number])
                at = np.s_[
                    row * attention.BLOCK : (row + 1) * attention.BLOCK,
                    column * attention.BLOCK : (column + 1) * attention.BLOCK,
                ]
                found[at] = True if whole else cut[at]
    return found[: shape[0], : shape[1]]


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 1)])
def test_flex_attention_is_the_same(size: int, rank: int) -> None:
    layout = large_layout(size)
    mine = zigzag([b - a for a, b in zip(layout.starts, layout.stops, strict=True)], size, rank)
    query, key, value = tensors(layout, len(mine))
    output = attention.attend_block_sparse(
        query, key, value, attention.block_mask(layout, size, rank, torch.device("cpu")), 0.3
    )
    torch.testing.assert_close(output, attend_tiles(query, key, value, tiles(layout, size, rank), 0.3))


def test_the_kernel_for_lengths_is_called_as_torch_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on CUDA only: here its arguments are bound to its signature, and what they mean is computed."""
    declared = signature(varlen_attn)

    def computed(*args: object, **kwargs: object) -> torch.Tensor:
        given = declared.bind(*args, **kwargs).arguments
        assert given["cu_seq_q"].dtype == torch.int32
        assert given["window_size"] == (-1, 0)
        assert given["max_q"] == given["max_k"] == 40
        ends = given["cu_seq_q"].tolist()
        parts = [
            torch.nn.functional.scaled_dot_product_attention(
                *(given[name][start:stop].transpose(0, 1)[None] for name in ("query", "key", "value")),
                is_causal=True, scale=given["scale"], enable_gqa=given["enable_gqa"],
            )[0].transpose(0, 1)
            for start, stop in itertools.pairwise(ends)
        ]  # fmt: skip
        return torch.cat(parts)

    monkeypatch.setattr(attention, "_varlen_attn", computed)
    packing = PackedMicrobatch(lengths=(5, 40, 2), used=(5, 37, 2), parents=(-1, -1, -1))
    layout = NodePlaces.of(packing.lengths, packing.used, packing.parents)
    query, key, value = tensors(layout, 47)
    output = attention.attend_by_length(query, key, value, packing.by_length, 0.3)
    real = np.concatenate([np.arange(42), [45, 46]])
    torch.testing.assert_close(output[real], attend_tiles(query, key, value, tiles(layout), 0.3)[real])
    assert PackedMicrobatch(lengths=(5, 3), used=(5, 3), parents=(-1, 0)).by_length is None


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles C++")
def test_compiled_flex_attention_is_the_same_and_compiled_once() -> None:
    """As on CUDA with its forward pass: whole blocks leave the compiler, too, nothing that lengths could change."""
    torch._dynamo.utils.counters.clear()
    for layout in (large_layout(), *(NodePlaces.of((length,), (length,), ()) for length in (1, 100, 128, 1000, 1024))):
        query, key, value = (tensor.float() for tensor in tensors(layout, layout.stops[-1]))
        mask = attention.block_mask(layout, 1, 0, torch.device("cpu"))
        output = attention.attend_block_sparse(query, key, value, mask, 0.3, attention.compiled())
        expected = attend_tiles(query, key, value, tiles(layout), 0.3)
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_upstream_flex_attention_has_no_backward_pass_on_the_cpu() -> None:
    query = torch.randn(1, 1, 16, 16, requires_grad=True)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(query, query, query)


def test_the_fused_operators_are_those_of_scaled_dot_product_attention() -> None:
    query = torch.randn(1, 1, 16, 16, requires_grad=True)
    with torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()
    called = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in called
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in called
