"""Padding on the lengths of real conversations: below 2 % in every layout that tools/bench/packing.py measures.

The conversations are the scripted experts', with short and full prompts. Does not cover lengths that a policy makes of
its own, nor time: docs/benchmarks/packing.md holds the whole table.
"""

from __future__ import annotations

import pytest

from mua.config.load import load_config
from mua.types import Int32Array
from tools.bench import packing


@pytest.fixture(scope="module", params=packing.RECIPES)
def distributions(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Int32Array]]]:
    """Tokens a row, and batches of 64 conversations by their prompt."""
    return (
        load_config(packing.kit.ROOT / packing.RECIPES[request.param]).megatron.max_tokens_per_microbatch,
        dict(packing.batches(request.param, groups=32, members=2, seed=1)),
    )


@pytest.mark.parametrize("prompt", ["short", "full"])
def test_less_than_two_percent_is_padding(distributions: tuple[int, dict[str, list[Int32Array]]], prompt: str) -> None:
    capacity, batches = distributions
    ids = batches[prompt]
    assert len(ids) == 64
    assert len({len(sequence) for sequence in ids}) > 20  # they are not all alike
    for layout in packing.LAYOUTS:
        for way in ("tokens", "flops"):
            found = packing.measured(layout, ids, capacity, way)
            assert found.padding < 0.02, (layout, way, found)
            assert found.utilization > 0.95, (layout, way, found)
    # In the order of arrival rows of one length waste much more: the bound is not met by itself.
    assert packing.measured("PP2 VPP2 DP4", ids, capacity, "arrival").padding > 0.05
