"""The control experiment of the whole loop: with learning rate 0, engine and trainer must agree on every token.

Five steps, a weight sync after each. Any fault in tokens, positions, masks, temperature, resharding or sync shows as a
difference between the log-probabilities the engine sampled with and those the trainer computes for the same ids.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import metrics_of, mua
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine; the fixtures' runs count too

STEPS = 5


def test_engine_and_trainer_agree_on_every_token(recipe: Path, tuned: Path, tmp_path: Path) -> None:
    mua(
        "train", recipe, f"trainer.steps={STEPS}", "trainer.save_every=0", "optimizer.learning_rate=0",
        "optimizer.weight_decay=0.1", "rollout.temperature=0.7", "algorithm.groups_per_step=4", cwd=tmp_path,
    )  # fmt: skip
    lines = metrics_of(tmp_path / "out")
    assert len(lines) == STEPS
    for line in lines:
        assert 0 < line["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert line["train/train_rollout_logprob_abs_diff_max"] < 1e-3
        assert line["train/tokens"] > 8 * 4  # all groups were measured, also those without an advantage
        assert line["engine/sync/bytes"] > 0
        assert line["train/grad_norm"] > 0
    before, after = load_file(tuned / "hf" / "model.safetensors"), load_file(tmp_path / "out/hf/model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].numpy().tobytes() == after[name].numpy().tobytes(), name
