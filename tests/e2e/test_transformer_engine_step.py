"""Reinforcement learning on Transformer Engine's layers with a real engine, on the CPU with the stand-in of tests/te.

Two steps of ``mua train`` with a weight sync between them: what the engine sampled with and what the trainer computes
for the same ids must be the same policy, before and after an update. Not covered: a GPU, and more than one rank
(tests/parity/test_transformer_engine.py trains the layouts).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import metrics_of, mua
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine; the fixtures' runs count too


def test_engine_and_fused_layers_are_one_policy_after_an_update(recipe: Path, tuned: Path, tmp_path: Path) -> None:
    mua(
        "train", recipe, "trainer.steps=2", "trainer.save_every=0", "megatron.implementation=transformer_engine",
        "optimizer.learning_rate=1.0e-2", cwd=tmp_path, module="tests.te_command",
    )  # fmt: skip
    lines = metrics_of(tmp_path / "out")
    assert len(lines) == 2
    for line in lines:
        assert 0 < line["mismatch/logprob_difference"] < 1e-4
        assert line["mismatch/logprob_difference_max"] < 1e-3
        assert line["engine/sync/bytes"] > 0
        assert line["policy/grad_norm"] > 0
    before, after = load_file(tuned / "hf" / "model.safetensors"), load_file(tmp_path / "out/hf/model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before if "norm" in name)  # fused norms learn too
