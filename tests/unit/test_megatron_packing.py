"""Planning of packed rows: capacity, balance, determinism, alignment, and what is refused.

Does not cover that rows train alike whatever the plan: see ``tests/parity/test_megatron_layouts.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.errors import MuaError
from mua.megatron.packing import Alignment, check_first_tokens, plan_rows
from mua.types import TrainSequence

lengths = st.lists(st.integers(1, 50), max_size=60)


@given(lengths=lengths, ranks=st.integers(1, 5), alignment=st.sampled_from([1, 2, 8]), capacity=st.integers(50, 200))
def test_every_sequence_is_packed_once_within_capacity(
    lengths: list[int], ranks: int, alignment: int, capacity: int
) -> None:
    plan = plan_rows(lengths, capacity, ranks, Alignment(1, alignment))
    packed = [index for rank in plan.rows for row in rank for index in row]
    assert sorted(packed) == list(range(len(lengths)))
    assert len(plan.rows) == ranks
    assert len({len(rank) for rank in plan.rows}) == 1
    sizes = [sum(lengths[index] for index in row) for rank in plan.rows for row in rank]
    assert max(sizes) <= capacity
    aligned = [max(alignment, -(-size // alignment) * alignment) for size in sizes]
    assert plan.padded_tokens == sum(aligned)
    assert plan.tokens == sum(lengths)
    assert plan.padding_share == pytest.approx(1 - sum(lengths) / sum(aligned))


@given(lengths=lengths, ranks=st.integers(1, 4))
def test_plan_is_a_function_of_its_arguments(lengths: list[int], ranks: int) -> None:
    assert plan_rows(lengths, 64, ranks) == plan_rows(list(lengths), 64, ranks)


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=60), ranks=st.integers(1, 4))
def test_number_of_rows_is_near_the_fewest_possible(lengths: list[int], ranks: int) -> None:
    # First-fit-decreasing needs at most 11/9 of the optimum plus 6/9 (Dosa, 2007); ranks round up.
    fewest = -(-sum(lengths) // 64)
    largest = 11 / 9 * max(fewest, sum(length > 32 for length in lengths)) * 2 + 1 + ranks
    assert plan_rows(lengths, 64, ranks).row_count <= largest


def test_ranks_get_even_loads() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(10, 300, 128).tolist()
    plan = plan_rows(lengths, 4096, 4)
    loads = [sum(lengths[index] for row in rank for index in row) for rank in plan.rows]
    assert max(loads) / (sum(loads) / 4) < 1.02


def test_few_sequences_are_spread_over_ranks_instead_of_packed_into_one_row() -> None:
    plan = plan_rows([10, 10, 10, 10], 100, 2)
    assert [len(row) for rank in plan.rows for row in rank] == [2, 2]


def test_ranks_without_sequences_get_empty_rows() -> None:
    plan = plan_rows([7], 100, 3)
    assert sorted(len(row) for rank in plan.rows for row in rank) == [0, 0, 1]
    assert plan_rows([], 100, 2).row_count == 2


def test_too_long_a_sequence_names_the_key() -> None:
    with pytest.raises(MuaError, match=r"sequence 1 has 101 tokens.*megatron\.tokens_per_row 100"):
        plan_rows([5, 101], 100, 1)


@pytest.mark.parametrize("size", [0, 3])
def test_a_first_token_cannot_be_trained(size: int) -> None:
    values = np.ones(size, dtype=np.float32)
    sequence = TrainSequence(values.astype(np.int32), values, values, values, values)
    with pytest.raises(MuaError, match=r"sequence 0 .* first token"):
        check_first_tokens([sequence])
