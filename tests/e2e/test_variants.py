"""Choices that the other end-to-end runs leave at their defaults, each in a real run of two or three steps.

Covers asynchronous rollouts, several engines, AgentRL's band for tokens of older weights, a KL term to the reference,
several updates of a batch and recomputed log-probabilities. Does not cover whether any of them learns better.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import metrics_of, mua

from mua.store.traces import read_traces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


NARROW = ("algorithm.correction=band", "algorithm.correction_cap=1", "algorithm.correction_decay=5")
"""A fresh token's ratio may leave 1 by a fifth, one of the version before by a thousandth."""


def test_asynchronous_rollouts_stay_within_the_staleness_bound(recipe: Path, tmp_path: Path) -> None:
    mua("train", recipe, "trainer.steps=3", "trainer.max_staleness=1", "engine.count=2", *NARROW, cwd=tmp_path)
    lines = metrics_of(tmp_path / "out")
    stale = [line for line in lines if "train/stale/train_rollout_logprob_abs_diff" in line]
    assert lines[0]["train/tis_masked_fraction"] == 0
    assert any(line["train/tis_masked_fraction"] > 0 for line in stale)
    assert all(line["train/stale/train_rollout_logprob_abs_diff"] > 1e-3 for line in stale)
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["rollout/off_policy_level/max"] <= 1 for line in lines)
    assert any(line["rollout/off_policy_level/max"] == 1 for line in lines), (
        "no group rolled out while the trainer worked"
    )
    assert all(line["engine/serving"] == 2 for line in lines)
    for step in range(3):
        for trajectory in read_traces(tmp_path / "out" / "traces" / f"step_{step:06d}.jsonl"):
            for segment in trajectory.segments:
                assert (segment.version[segment.loss_mask] >= step - 1).all()


def test_kl_term_and_several_updates_of_one_batch(recipe: Path, tmp_path: Path) -> None:
    several = ["algorithm.kl_coefficient=0.05", "algorithm.skip_zero_advantage=false"]
    several += ["algorithm.epochs=2", "algorithm.minibatches=3", "optimizer.learning_rate=1.0e-3"]
    mua("train", recipe, "trainer.steps=2", *several, cwd=tmp_path)
    first, second = metrics_of(tmp_path / "out")
    assert first["train/ppo_kl_k3"] > 0, "the second epoch trains against log-probabilities from before the first"
    assert second["train/ref_kl"] > 1e-7
    assert second["train/kl_loss"] == pytest.approx(0.05 * second["train/ref_kl"], rel=0.2)
    assert first["train/train_rollout_logprob_abs_diff"] < 1e-4
