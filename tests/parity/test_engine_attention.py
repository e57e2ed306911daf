"""The CPU engine's attention over blocks of sequences gives what each row alone gives, and is faster than SGLang's.

The reference computes one row at a time (``mua_cpu_invariant``, which tests/parity/test_engine_determinism.py holds);
that a served model agrees with Megatron is in test_engine_parity.py. Not covered: sliding windows and cross attention,
which stay with SGLang; several threads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mua.compat.sglang_cpu import SHIM

HEAD = 16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    monkeypatch.syspath_prepend(str(SHIM))
    import mua_cpu_grouped
    import mua_cpu_invariant

    yield mua_cpu_grouped, mua_cpu_invariant
    for name in ("mua_cpu_grouped", "mua_cpu_invariant"):
        sys.modules.pop(name)


def cache(lengths: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values [slots, kv_heads, HEAD] in any order, where they lie [requests, positions], who asks."""
    positions = int(lengths.max()) + 3
    slots = len(lengths) * positions
    where = torch.randperm(slots).view(len(lengths), positions).to(torch.int32)
    keys, values = torch.randn(2, slots, kv_heads, HEAD)
    requests = torch.randperm(len(lengths))
    held = torch.zeros(slots, dtype=torch.bool)
    for request, length in zip(requests, lengths, strict=True):
        held[where[request, :length].long()] = True
    keys[~held], values[~held] = torch.nan, torch.nan  # what is left in slots of nobody's must not be read
    return keys, values, where, requests


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize(
    ("prefixes", "new"),
    [
        ([0], [1]),
        ([0, 0, 0], [5, 1, 300]),  # one prompt of more than a block's rows
        ([200, 7, 0, 31, 31, 100, 9], [1, 40, 12, 3, 3, 25, 270]),
        ([50] * 40, [6] * 40),
    ],
)
def test_new_tokens_see_what_is_before_them(
    kernels: tuple[ModuleType, ModuleType], heads: int, kv_heads: int, prefixes: list[int], new: list[int]
) -> None:
    torch.manual_seed(len(prefixes))
    grouped, alone = kernels
    before, more = torch.tensor(prefixes), torch.tensor(new)
    query = torch.randn(sum(new), heads, HEAD)
    arguments = (*cache(before + more, kv_heads), before + more, before, more)
    settings = {"scaling": HEAD**-0.5, "enable_gqa": heads != kv_heads, "causal": True}
    found = grouped.extend(None, query, torch.full_like(query, torch.nan), *arguments, **settings)
    expected = alone.extend(None, query, torch.empty_like(query), *arguments, **settings)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("sequences", [1, 16, 53])
def test_one_token_each_sees_what_is_before_it(
    kernels: tuple[ModuleType, ModuleType], heads: int, kv_heads: int, sequences: int
) -> None:
    torch.manual_seed(sequences)
    grouped, alone = kernels
    lengths = torch.randint(1, 200, (sequences,))
    query = torch.randn(sequences, heads, HEAD)
    arguments = (*cache(lengths, kv_heads), lengths)
    settings = {"scaling": HEAD**-0.5, "enable_gqa": heads != kv_heads}
    found = grouped.decode(None, query, torch.full_like(query, torch.nan), *arguments, **settings)
    expected = alone.decode(None, query, torch.empty_like(query), *arguments, **settings)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_blocks_are_bounded(kernels: tuple[ModuleType, ModuleType]) -> None:
    grouped, _ = kernels
    asking = sorted((length, 200, 0, 0) for length in range(300, 9000, 300))
    for block in grouped._blocks(asking):
        assert len(block) * max(one[0] for one in block) * 200 <= max(grouped.CELLS, block[0][0] * 200)
        assert len(block) <= grouped.ASKING
    assert [len(block) for block in grouped._blocks([(9, 1, 0, 0)] * 40)] == [16, 16, 8]


def test_what_it_does_not_know_goes_to_sglang(
    kernels: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, _ = kernels
    for name in ("extend", "decode"):
        monkeypatch.setattr(grouped, f"_upstream_{name}", lambda *_, **__: "upstream", raising=False)
    empty = torch.empty(0, 1, HEAD)
    none = torch.empty(0, dtype=torch.long)
    rest = (empty, empty, none, none, none)
    assert grouped.extend(None, empty, empty, *rest, none, none, causal=True, sliding_window_size=4) == "upstream"
    assert grouped.extend(None, empty, empty, *rest, none, none, causal=False) == "upstream"
    assert grouped.decode(None, empty, empty, *rest, is_cross_attn=True) == "upstream"
