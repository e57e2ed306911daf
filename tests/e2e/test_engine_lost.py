"""A run whose engine is killed goes on; one whose engine has used up its restarts saves its steps and says what to do.

What the run and its continuation leave behind equals the undisturbed run, bit for bit. Every moment of a step, and
engines that hang: ``tests/unit/test_engine_recovery.py`` and ``test_engine_faults.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_support import DETERMINISTIC, STEPS, assert_same_run, ended, launcher_in, metrics_of, mua, running, until

from mua.utils.errors import PASSING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine; the fixtures' runs count too


def test_a_lost_engine_costs_a_restart_and_the_last_one_no_step(recipe: Path, trained: Path, tmp_path: Path) -> None:
    command = ("train", recipe, f"trainer.steps={STEPS}", "rollout.concurrency=1", *DETERMINISTIC)
    output = tmp_path / "out"
    with running(*command, "trainer.save_every=0", "engine.max_restarts=1", cwd=tmp_path, own_engine=True) as process:
        until(lambda: metrics_of(output), process, "the first step")
        launcher_in(tmp_path).kill()
        steps = until(lambda: len(metrics_of(output)) >= 2 and len(metrics_of(output)), process, "a step after it")
        assert steps < STEPS
        launcher_in(tmp_path).kill()
        lines = ended(process, tmp_path, PASSING)
    assert "engine.max_restarts = 1" in lines[-1]
    assert "engine-0.log" in lines[-1]
    assert any("the same command continues from" in line for line in lines)
    steps = len(metrics_of(output))
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    mua(*command, cwd=tmp_path)
    assert_same_run(output, trained)
