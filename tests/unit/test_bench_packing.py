"""Padding on the lengths of real conversations: below 2 % in every layout that tools/bench/packing.py measures, except
where rows must have one length and no way of filling them could do it: there it is near the least that is possible.

The conversations are the scripted experts', with short and full prompts. Does not cover lengths that a policy makes of
its own, nor time: docs/benchmarks/packing.md holds the whole table, for batches as large as a recipe's.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mua.config.load import load_config
from mua.types import Int32Array
from tools.bench import packing


@pytest.fixture(scope="module", params=packing.RECIPES)
def distributions(request: pytest.FixtureRequest) -> tuple[int, dict[str, list[Int32Array]]]:
    """Tokens a row, and batches of 64 conversations by their prompt."""
    return (
        load_config(packing.ROOT / packing.RECIPES[request.param]).megatron.tokens_per_row,
        dict(packing.batches(request.param, groups=32, members=2, seed=1)),
    )


def least_padding(lengths: Sequence[int], capacity: int, multiple: int) -> float:
    """What rows of one length cannot go below with so many sequences, in any multiple of rows up to twice the fewest.

    With ``n`` sequences in ``r`` rows, some rows hold more than ``n // r``; of these the fullest is as long as the
    shortest sequences together that such rows could share, or as the longest sequence that is left for one of them.
    """
    fewest = -(-sum(lengths) // (capacity * multiple)) * multiple
    return min(_least_in(sorted(lengths), rows) for rows in range(fewest, 2 * fewest + multiple + 1, multiple))


def _least_in(lengths: Sequence[int], rows: int) -> float:
    each, more = divmod(len(lengths), rows)
    fuller = sum(lengths[: each + 2])  # a row with two more than the others need
    if more:
        together = sum(lengths[: more * (each + 1)]) / more
        left = lengths[more * (each + 1) - 1] + sum(lengths[:each])
        longest = min(fuller, max(together, left))
    else:
        longest = min(sum(lengths[: each + 1]), lengths[-1] + sum(lengths[: each - 1]))
    return 1 - sum(lengths) / rows / max(longest, sum(lengths) / rows, lengths[-1])


def test_the_least_padding_is_that_of_the_best_rows() -> None:
    assert least_padding([10] * 8, 20, 4) == 0  # two in each of four
    assert least_padding([10] * 9, 20, 4) == 0.25  # twos in four rows leave one over; best are twelve rows of one
    assert least_padding([10, 10, 10, 30], 60, 2) == pytest.approx(0)  # three against one


@pytest.mark.parametrize("prompt", ["short", "full"])
def test_less_than_two_percent_is_padding(distributions: tuple[int, dict[str, list[Int32Array]]], prompt: str) -> None:
    capacity, batches = distributions
    ids = batches[prompt]
    assert len(ids) == 64
    assert len({len(sequence) for sequence in ids}) > 20  # they are not all alike
    for layout, (_, sizes) in packing.LAYOUTS.items():
        bound = 0.02
        if "virtual_pipeline" in sizes:
            multiple = sizes["data_parallel"] * sizes["pipeline_parallel"]
            bound = max(bound, least_padding([len(one) for one in ids], capacity, multiple) + 0.01)
        for way in ("tokens", "flops"):
            found = packing.measured(layout, ids, capacity, way)
            assert found.padding < bound, (layout, way, found)
            assert found.utilisation > 0.97 - bound, (layout, way, found)
    # In the order of arrival rows of one length waste much more: the bound is not met by itself.
    assert packing.measured("PP2 VPP2 DP4", ids, capacity, "arrival").padding > 0.05
