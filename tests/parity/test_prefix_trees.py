"""Training on prefix trees is training on the sequences: loss, metrics, gradients and log-probabilities.

Real Megatron on gloo, dense and with experts, under every kind of layout. Trajectories share a prompt and first turns,
some are whole prefixes of others, and shared trained tokens carry other weights and advantages in each. Does not cover
the trees themselves (tests/unit/test_megatron_trees.py), speed (tools/bench/prefix_trees.py) or CUDA.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mua.algorithms.losses import PolicyLoss
from mua.megatron import layouts
from mua.types import TrainBatch, TrainSequence
from tests.distributed import run_on_workers
from tests.layout_support import world_of
from tests.megatron_support import assert_gradients_alike, backend, gradients, make_batch, write_model

LOSS = PolicyLoss(0.2, 0.3, 0.0, objective="gspo", entropy_coefficient=0.01)
KEYS = (
    "policy/loss",
    "policy/grad_norm",
    "policy/entropy",
    "policy/tokens",
    "policy/ratio",
    "policy/logprob",
    "policy/ratio_max",
)
LENGTHS = (40, 33, 29, 40, 12, 31, 38, 9, 24, 17)
SHARED = {1: (0, 20), 2: (0, 20), 3: (1, 28), 4: (0, 12), 6: (5, 13), 7: (6, 9), 8: (5, 24)}
"""Sequence -> (another one, how many tokens it begins with that one's)."""


def batch(temperature: float = 0.9) -> TrainBatch:
    """Random sequences of which several begin alike."""
    drawn = make_batch(LENGTHS, temperature=temperature, seed=3)
    sequences: list[TrainSequence] = []
    for index, sequence in enumerate(drawn.sequences):
        ids = sequence.ids.copy()
        if index in SHARED:
            other, length = SHARED[index]
            ids[:length] = sequences[other].ids[:length]
        sequences.append(replace(sequence, ids=ids))
    return replace(drawn, sequences=sequences)


def one_step(folder: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What a rank sees of one step, and of scoring every token before it."""
    with backend(Path(folder), distributed_optimizer=False, max_tokens_per_microbatch=120, **sizes) as built:
        given = batch()
        logprobs = built.log_probabilities(given.sequences, given.temperature)
        metrics = built.train_step(given, LOSS)
        return {"logprobs": logprobs, "metrics": metrics, "gradients": gradients(built)}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Kind of model -> its folder, and what a single process makes of the sequences side by side."""
    found = {}
    for kind, experts in (("dense", {}), ("moe", {"experts": 8})):
        path = tmp_path_factory.mktemp(kind)
        write_model(path, layers=4, **experts)
        (result,) = run_on_workers(1, one_step, str(path), {})
        assert result["metrics"]["policy/merged_share"] == 0
        found[kind] = (path, result)
    return found


ALWAYS = [("dense", "single"), ("dense", "CP2"), ("moe", "DP2 EP2")]
SLOW = [("dense", "PP2 VPP2"), ("dense", "TP2 CP2"), ("dense", "DP2"), ("moe", "CP2 EP2"), ("moe", "TP2 ETP1")]


@pytest.mark.parametrize(("kind", "name"), [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_tree_is_its_sequences(kind: str, name: str, references: dict[str, tuple[Path, Any]]) -> None:
    folder, expected = references[kind]
    sizes = layouts.sizes(name)
    for rank in run_on_workers(world_of(name), one_step, str(folder), sizes | {"merge_prefixes": True}):
        assert rank["metrics"]["policy/merged_share"] > 0.15
        for key in KEYS:
            assert rank["metrics"][key] == pytest.approx(expected["metrics"][key], rel=1e-5, abs=1e-5), key
        for own, wanted in zip(rank["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(own, wanted, atol=2e-5, rtol=0)
        assert_gradients_alike(rank["gradients"], expected["gradients"])
