"""A run whose engine is killed goes on; one whose engine has used up its restarts saves its steps and says what to do.

What the run and its continuation leave behind equals the undisturbed run, bit for bit. Every moment of a step, and
engines that hang: ``tests/unit/test_engine_recovery.py`` and ``test_engine_faults.py``.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from e2e_support import (
    DETERMINISTIC,
    STEPS,
    assert_nothing_left,
    assert_same_run,
    finish,
    metrics_of,
    mua,
    processes_in,
    running,
    until,
)

from mua.errors import PASSING

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine; the fixtures' runs count too


def launcher_in(folder: Path) -> psutil.Process:
    """SGLang's HTTP process: the guardian's command line holds its own behind that of the guardian."""
    (found,) = [process for process in processes_in(folder) if process.cmdline()[1:3] == ["-m", "sglang.launch_server"]]
    return found


def test_a_lost_engine_costs_a_restart_and_the_last_one_no_step(recipe: Path, trained: Path, tmp_path: Path) -> None:
    command = ("train", recipe, f"trainer.steps={STEPS}", "rollout.concurrency=1", *DETERMINISTIC)
    output = tmp_path / "out"
    with running(*command, "trainer.save_every=0", "engine.max_restarts=1", cwd=tmp_path, own_engine=True) as process:
        until(lambda: metrics_of(output), process, "the first step")
        launcher_in(tmp_path).kill()
        steps = until(lambda: len(metrics_of(output)) >= 2 and len(metrics_of(output)), process, "a step after it")
        assert steps < STEPS
        launcher_in(tmp_path).kill()
        status, _, err = finish(process, tmp_path)
    assert status == PASSING
    assert "Traceback" not in err
    assert "engine.max_restarts = 1" in err.splitlines()[-1]
    assert "engine-0.log" in err.splitlines()[-1]
    assert "the same command continues from" in err
    assert_nothing_left(tmp_path)
    steps = len(metrics_of(output))
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    mua(*command, cwd=tmp_path)
    assert_same_run(output, trained)
