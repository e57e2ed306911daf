"""How micro-batches are divided for context parallelism: every position and every scored token on exactly one rank.

That training on the parts gives what training on the whole gives is shown in ``tests/parity/test_megatron_layouts.py``.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mua.config.schema import MegatronConfig
from mua.megatron import microbatch
from mua.megatron.microbatch import MicroBatch, micro_batch
from mua.megatron.packing import Alignment
from mua.types import TrainSequence
from tests.megatron_support import make_batch

sizes = st.sampled_from([1, 2, 3, 4])
many_lengths = st.lists(st.integers(1, 40), max_size=8)


def on_rank(rank: int, size: int, sequences: list[TrainSequence], alignment: Alignment, scoring: bool) -> MicroBatch:
    with mock.patch.object(microbatch, "parallel_state") as state:
        state.get_context_parallel_world_size.return_value = size
        state.get_context_parallel_rank.return_value = rank
        return micro_batch(sequences, alignment, scoring=scoring)


@given(lengths=many_lengths, size=sizes, tensor=sizes, scoring=st.booleans())
def test_every_scored_token_belongs_to_the_one_rank_that_predicts_it(
    lengths: list[int], size: int, tensor: int, scoring: bool
) -> None:
    sequences = make_batch(lengths).sequences
    alignment = Alignment.of(MegatronConfig(context_parallel=size, tensor_parallel=tensor))
    flat = np.concatenate([np.zeros(0, np.int32), *(sequence.ids for sequence in sequences)])
    weights = np.concatenate([np.zeros(0, np.float32), *(sequence.weights for sequence in sequences)])
    places = np.concatenate([np.zeros(0, np.int64), *(np.arange(length) for length in lengths)])
    found: list[int] = []
    for rank in range(size):
        batch = on_rank(rank, size, sequences, alignment, scoring)
        scored, predictors = batch.scored.numpy(), batch.predictors.numpy()
        assert batch.ids.shape[1] % tensor == 0
        assert batch.packing.positions is not None
        assert np.array_equal(batch.targets.numpy(), flat[scored])
        assert np.array_equal(batch.ids.numpy()[0, predictors], flat[scored - 1])
        assert np.array_equal(batch.packing.positions.numpy()[predictors], places[scored] - 1)
        if batch.tokens is not None:
            assert np.array_equal(batch.tokens.weights.numpy(), weights[scored])
        found += scored.tolist()
    assert sorted(found) == np.flatnonzero(places > 0 if scoring else weights != 0).tolist()
