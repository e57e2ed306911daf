"""Steps of learning with a critic, from groups to optimizer steps, with the real trainer on one process.

Rollouts are made up: the whole command, with an engine, is in tests/e2e/test_critic.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mua.config.schema import ExperimentConfig
from mua.megatron.checkpoint import checkpoint_folder
from mua.trainer.learner import Learner
from mua.trainer.rl import learn
from mua.types import Group, Outcome, Trajectory
from tests.megatron_support import VOCAB, exported, write_model
from tests.segments import segment_of


def config_of(folder: Path) -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "name": "gae",
            "output": folder / "out",
            "model": {"path": folder / "model", "dtype": "float32", "max_length": 128},
            "environment": {"name": "help_desk"},
            "rollout": {"max_tokens": 64},
            "algorithm": {
                "advantage": "gae", "gae_lambda": 0.9, "groups_per_step": 2, "group_size": 2, "minibatches": 2,
            },
            "critic": {"warmup_steps": 1, "optimizer": {"learning_rate": 1e-2}},
            "megatron": {"max_tokens_per_microbatch": 64, "threads": 1},
            "optimizer": {"learning_rate": 1e-2},
            "trainer": {"steps": 5},
        }
    )  # fmt: skip


def trajectory(ordinal: int, sample: int) -> Trajectory:
    """Two segments of two turns each; the reward comes last and differs between samples."""
    random = np.random.default_rng([ordinal, sample])
    segments = []
    for first in (0, 2):
        turn = np.array([0, 0, 0, 0, 1, 1, 1, 1]) + first
        ids = random.integers(0, VOCAB, 8)
        segments.append(segment_of([0, 0, 1, 1, 0, 1, 1, 1], ids=ids, logprobs=-4.6, turn=turn))
    rewards = [0.0, 0.0, 0.0, float(sample) + 0.5]
    return Trajectory("t", ordinal, sample, segments, rewards, sum(rewards), bool(sample), Outcome.USER_STOP)


def test_the_critic_learns_first_and_then_both(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    config = config_of(tmp_path)
    groups = [Group(i, "t", [trajectory(i, sample) for sample in range(2)]) for i in range(2)]
    with Learner(config, total_steps=8, critic_steps=10) as learner:
        before = exported(learner)
        warm = learn(config, learner, groups, version=0)
        assert all(np.array_equal(values, before[name]) for name, values in exported(learner).items())
        assert "train/grad_norm" not in warm
        # A critic that says 0 everywhere explains nothing; with lambda below 1 returns decay towards it.
        assert warm["train/critic/old_values"] == 0
        assert warm["train/critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-9)
        assert warm["train/critic/grad_norm"] > 0
        assert warm["train/tokens"] == 40
        later = [learn(config, learner, groups, version=version) for version in range(1, 5)]
        assert not any(np.array_equal(values, before[name]) for name, values in exported(learner).items())
    assert all(step["train/grad_norm"] > 0 and step["train/critic/grad_norm"] > 0 for step in later)
    assert later[-1]["train/critic/vf_explained_var"] > 0.3
    assert later[0]["train/advantage_abs"] == pytest.approx(0.8, abs=0.3), "advantages are whitened over the step"


def groups_of(step: int) -> list[Group]:
    return [Group(i, "t", [trajectory(i, sample) for sample in range(2)]) for i in range(2 * step, 2 * step + 2)]


def learned(folder: Path, last: int, *, source: Path | None = None, saved: Path | None = None) -> Any:
    """Metrics of the steps up to ``last`` (from a checkpoint's on), and the weights."""
    config = config_of(folder)
    with Learner(config, total_steps=8, critic_steps=10) as learner:
        first = 0 if source is None else learner.load(source)["step"]
        history = [learn(config, learner, groups_of(step), version=step) for step in range(first, last)]
        if saved is not None:
            learner.save(saved, {"step": last})
        return [{name: v for name, v in step.items() if "seconds" not in name} for step in history], exported(learner)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    straight, final = learned(tmp_path, 4)
    checkpoint = checkpoint_folder(tmp_path, 2)
    first, _ = learned(tmp_path, 2, saved=checkpoint)
    rest, resumed = learned(tmp_path, 4, source=checkpoint)
    assert [*first, *rest] == straight
    assert all(np.array_equal(resumed[name], values) for name, values in final.items())
