"""``python -m tools.demo`` from nothing to its report, with one short step of reinforcement learning and its controls.

Its supervised cold start is whole. Does not cover that the policy learns: README has the figures of whole runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_support import ROOT, assert_nothing_left, environment

pytestmark = [pytest.mark.grid, pytest.mark.timeout(1800)]


def test_the_demonstration_runs_from_nothing_to_its_report(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    small = ["trainer.steps=1", "optimizer.warmup_steps=0", "trainer.evaluate_every=1"]
    small += ["algorithm.groups_per_step=2", "evaluation.tasks=8"]
    command = [sys.executable, "-m", "tools.demo", *small, "--seeds", "5", "--controls"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "transformers loads it: Qwen3ForCausalLM" in done.stdout
    folder = tmp_path / "runs" / "demo"
    (seed,) = json.loads((folder / "summary.json").read_text())["seeds"]
    assert (seed["seed"], seed["steps"]) == (5, 1)
    assert 0 <= seed["sft_success"] <= 1
    assert 0 <= seed["rl_success"] <= 1
    assert seed["controls"].keys() == {"refuse all", "best canned: claim everything", "more SFT", "shuffled rewards"}
    assert all(0 <= mean <= 1 for mean in seed["controls"].values())
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("seed-5/rollout/**/*.jsonl")), "the conversation it prints is kept"
    assert_nothing_left(tmp_path)
