"""The wheel, installed away from the repository: a new user's first commands, and the demonstration to its report.

Does not cover that requirements install from an index (``make setup`` does that) or that the policy learns: README has
the figures of whole runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e_support import assert_nothing_left

from tools import wheel_check


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> wheel_check.Installed:
    work = tmp_path_factory.mktemp("wheel")
    return wheel_check.install(wheel_check.build(work), work)


@pytest.mark.slow
def test_a_new_user_needs_the_wheel_alone(installed: wheel_check.Installed) -> None:
    wheel_check.new_user(installed)


@pytest.mark.grid
@pytest.mark.timeout(3600)
def test_the_demonstration_runs_from_nothing_to_its_report(installed: wheel_check.Installed, tmp_path: Path) -> None:
    here = wheel_check.Installed(installed.venv, tmp_path)
    small = ["trainer.steps=1", "optimizer.warmup_steps=0", "trainer.evaluate_every=1"]
    small += ["algorithm.groups_per_step=2", "evaluation.tasks=8"]
    said = here.run("mua", "demo", *small, "--seeds", "5", "--controls")
    assert "transformers loads it: Qwen3ForCausalLM" in said
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
