"""Planning of packed micro-batches: capacity, balance and its bounds, determinism, alignment, estimated work, what is
refused.

Does not cover that they train alike whatever the plan (tests/parity/test_megatron_layouts.py), nor real lengths
(tests/unit/test_bench_packing.py).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mua.config.schema import MegatronConfig
from mua.megatron.architecture import Architecture, Workload
from mua.megatron.packing import Alignment, LoadBalance, Packed, check_first_tokens, pack, plan_microbatches
from mua.types import TrainSequence
from mua.utils.errors import MuaError
from tests.planned_support import EXPERTS, SHAPE

lengths = st.lists(st.integers(1, 50), max_size=60)
WORK = Workload(per_token=100, per_pair=7)
"""Attention as expensive as the weights from 28 tokens on."""


def costs_of(lengths: list[int]) -> list[int]:
    return [WORK.operations([(0, length)]) for length in lengths]


def spent_by(lengths: list[int], costs: list[int], capacity: int, ranks: int, **settings: Any) -> np.ndarray:
    """The work of every micro-batch, ``[ranks, micro-batches]``."""
    plan = plan_microbatches(lengths, capacity, ranks, costs=costs, **settings)
    return np.array([[sum(costs[index] for index in taken) for taken in rank] for rank in plan.microbatches])


@pytest.mark.parametrize("by_costs", [False, True])
@given(
    lengths=lengths,
    ranks=st.integers(1, 5),
    alignment=st.sampled_from([1, 2, 8]),
    capacity=st.integers(50, 200),
    multiple=st.integers(1, 3),
)
def test_every_sequence_is_packed_once_within_capacity(
    by_costs: bool, lengths: list[int], ranks: int, alignment: int, capacity: int, multiple: int
) -> None:
    costs = costs_of(lengths) if by_costs else None
    plan = plan_microbatches(lengths, capacity, ranks, Alignment(1, alignment), multiple=multiple, costs=costs)
    packed = [index for rank in plan.microbatches for taken in rank for index in taken]
    assert sorted(packed) == list(range(len(lengths)))
    assert len(plan.microbatches) == ranks
    assert {len(rank) for rank in plan.microbatches} == {plan.count // ranks}
    assert plan.count % (ranks * multiple) == 0
    sizes = [sum(lengths[index] for index in taken) for rank in plan.microbatches for taken in rank]
    assert max(sizes) <= capacity
    aligned = [max(alignment, -(-size // alignment) * alignment) for size in sizes]
    assert plan.padded_tokens == sum(aligned)
    assert plan.tokens == sum(lengths)
    assert plan.padding_share == pytest.approx(1 - sum(lengths) / sum(aligned))
    assert plan == plan_microbatches(
        list(lengths), capacity, ranks, Alignment(1, alignment), multiple=multiple, costs=costs
    )


@given(lengths=lengths, ranks=st.integers(1, 5), capacity=st.integers(50, 120))
def test_micro_batches_that_run_together_are_as_even_as_their_order_allows(
    lengths: list[int], ranks: int, capacity: int
) -> None:
    spent = spent_by(lengths, costs_of(lengths), capacity, ranks, lockstep=True)
    best = np.sort(spent.ravel())[::-1].reshape(-1, ranks).max(1).sum()
    assert spent.max(0).sum() == best
    assert np.ptp(spent.sum(1)) <= np.ptp(spent, axis=0).max()  # and ranks no further apart than such rows


@pytest.mark.parametrize("lockstep", [False, True])
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), ranks=st.integers(1, 4))
def test_no_exchange_of_two_sequences_would_help(lockstep: bool, lengths: list[int], ranks: int) -> None:
    costs, capacity = costs_of(lengths), 64
    plan = plan_microbatches(lengths, capacity, ranks, costs=costs, lockstep=lockstep)
    spent = spent_by(lengths, costs, capacity, ranks, lockstep=lockstep)
    if lockstep:  # between the most expensive and the cheapest micro-batch
        rows, totals = [taken for rank in plan.microbatches for taken in rank], spent.ravel()
        pairs = [(rows[totals.argmax()], rows[totals.argmin()])]
    else:  # between micro-batches of the most expensive and the cheapest rank that run together
        totals = spent.sum(1)
        pairs = list(zip(plan.microbatches[totals.argmax()], plan.microbatches[totals.argmin()], strict=True))
    for high, low in pairs:
        full_high, full_low = (sum(lengths[i] for i in taken) for taken in (high, low))
        for away in high:
            for cost, length in [(0, 0), *((costs[i], lengths[i]) for i in low)]:
                moved, grown = costs[away] - cost, lengths[away] - length
                fits = full_low + grown <= capacity and full_high - grown <= capacity
                assert not fits or not 0 < moved < np.ptp(totals)


def test_balance_by_work_evens_out_what_tokens_leave_uneven() -> None:
    random = np.random.default_rng(1)
    drawn = np.minimum(32768, random.lognormal(8.5, 0.8, 256)).astype(int).tolist()
    work = Workload(per_token=64_000_000, per_pair=2_100)  # as in Qwen3-32B
    costs = [work.operations([(0, length)]) for length in drawn]

    def uneven(by: list[int] | None, *, lockstep: bool) -> tuple[float, float]:
        plan = plan_microbatches(drawn, 32768, 4, costs=by, lockstep=lockstep)
        spent = np.array([[sum(costs[index] for index in taken) for taken in rank] for rank in plan.microbatches])
        return spent.sum(1).max() / spent.sum() * 4, spent.max(0).sum() / spent.sum() * 4

    assert uneven(None, lockstep=False)[0] > 1.03
    assert uneven(costs, lockstep=False)[0] < 1.001
    assert uneven(None, lockstep=True)[1] > 1.08
    assert uneven(costs, lockstep=True)[1] < 1.02


def test_too_long_a_sequence_names_the_key() -> None:
    with pytest.raises(MuaError, match=r"sequence 1 has 101 tokens.*megatron\.max_tokens_per_microbatch 100"):
        plan_microbatches([5, 101], 100, 1)


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_estimated_work_is_what_a_forward_pass_multiplies(model: str) -> None:
    """Counted by torch in transformers' model, whose attention, unlike ours, computes the pairs above the diagonal."""
    shape: dict[str, Any] = SHAPE | (EXPERTS if model == "experts" else {})
    config = transformers.AutoConfig.for_model(**{k: v for k, v in shape.items() if k != "architectures"})
    policy = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    tokens, work = 60, Workload.of(Architecture.from_hf(shape))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        policy(torch.zeros(1, tokens, dtype=torch.int64))
    assert counter.get_total_flops() == pytest.approx(tokens * work.per_token + tokens**2 * work.per_pair, rel=2e-3)
    assert work.operations([(0, tokens)]) == tokens * work.per_token + tokens * (tokens + 1) // 2 * work.per_pair


def packed(sequences: list[list[int]], **settings: Any) -> Packed:
    config = MegatronConfig(**{"max_tokens_per_microbatch": 64, **settings})
    ids = [np.array(sequence, dtype=np.int32) for sequence in sequences]
    return pack(ids, config, WORK)


def work_of(found: Packed, rank: int) -> int:
    spans = [span for taken in found.microbatches[rank] for span in taken.spans]
    return WORK.operations(spans)


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=12))
def test_a_trees_work_counts_shared_tokens_once_and_every_token_all_it_attends_to(sequences: list[list[int]]) -> None:
    found = packed(sequences, merge_prefixes=True)
    prefixes = {tuple(s[:end]) for s in sequences for end in range(1, len(s) + 1)}  # one a token of the tree
    expected = sum(WORK.per_token + len(prefix) * WORK.per_pair for prefix in prefixes)
    assert work_of(found, 0) >= expected  # runs too short to be shared, or in another micro-batch, are computed again
    if found.plan.tokens == len(prefixes):
        assert work_of(found, 0) == expected


def test_load_balance_by_hand() -> None:
    tokens, flops = [[30, 10], [20, 20]], [[900, 100], [300, 300]]
    balance = LoadBalance.of(tokens, flops, useful=1200, lockstep=False)
    assert asdict(balance) == pytest.approx(
        {
            "imbalance_tokens": 1.0,
            "imbalance_flops": 1000 / 800,
            "microbatch_imbalance_tokens": (30 + 20) / 40,
            "microbatch_imbalance_flops": (900 + 300) / 800,
            "utilization": 1200 / (2 * 1000),
        }
    )
    assert LoadBalance.of(tokens, flops, useful=1200, lockstep=True).utilization == pytest.approx(1200 / (2 * 1200))


@pytest.mark.parametrize("size", [0, 3])
def test_a_first_token_cannot_be_trained(size: int) -> None:
    values = np.ones(size, dtype=np.float32)
    sequence = TrainSequence(values.astype(np.int32), values, values, values, values)
    with pytest.raises(MuaError, match=r"sequence 0 .* first token"):
        check_first_tokens([sequence])
