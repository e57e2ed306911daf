"""Training with GAE and a critic by its command: a warm-up, replayed steps.

Real parts throughout. Does not cover resuming and two ranks by the command (unit/test_trainer_gae.py has both), nor
whether a critic helps to learn.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from e2e_support import DETERMINISTIC, STEPS, metrics_of, mua, replayed

pytestmark = pytest.mark.timeout(900)  # a busy machine; the fixtures' runs count too

GAE = (
    "algorithm.advantage=gae", "algorithm.gae_lambda=0.95", "algorithm.minibatches=3", "critic.warmup_steps=1",
    "critic.optimizer.learning_rate=1.0e-3", *DETERMINISTIC,
)  # fmt: skip
COMPARED = (
    "train/critic/vf_loss", "train/critic/values", "train/critic/returns", "train/critic/vf_clipfrac",
    "train/critic/grad_norm", "train/critic/old_values",
    "train/critic/vf_explained_var", "train/critic/advantage_std",
)  # fmt: skip
OF_POLICY = ("train/loss", "train/grad_norm", "train/logprob")


@pytest.fixture(scope="module")
def straight(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of the uninterrupted run."""
    folder = tmp_path_factory.mktemp("gae")
    mua("train", recipe, f"trainer.steps={STEPS}", *GAE, cwd=folder)
    return folder / "out"


@pytest.mark.slow
def test_the_critic_learns_alone_and_then_with_the_policy(straight: Path) -> None:
    lines = metrics_of(straight)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert not {*OF_POLICY} & lines[0].keys(), "the policy learned during the critic's warm-up"
    assert lines[0]["train/critic/old_values"] == 0, "a new critic says 0"
    for line in lines:
        assert all(math.isfinite(line[name]) for name in COMPARED)
        assert line["train/critic/grad_norm"] > 0
        assert line["train/tokens"] > 0
    assert all(line["train/critic/old_values"] != 0 and line["train/grad_norm"] > 0 for line in lines[1:])
    assert lines[1]["train/train_rollout_logprob_abs_diff"] < 1e-4, "the engines sampled with other weights"


@pytest.mark.slow
def test_a_step_of_both_networks_is_replayed(straight: Path, tmp_path: Path) -> None:
    found = replayed(straight, STEPS - 1, cwd=tmp_path)
    assert {name: len(digests) for name, digests in found["gradients"]["stored"].items()} == {"policy": 3, "critic": 3}


@pytest.mark.grid
def test_the_warm_up_is_replayed(straight: Path, recipe: Path, tmp_path: Path) -> None:
    assert replayed(straight, 0, cwd=tmp_path)["gradients"]["stored"].keys() == {"critic"}
    mua("train", recipe, "trainer.steps=2", "trainer.save_every=2", "megatron.tensor_parallel=2", *GAE, cwd=tmp_path)
    assert replayed(tmp_path / "out", 1, cwd=tmp_path)["gradients"]["stored"].keys() == {"policy", "critic"}
