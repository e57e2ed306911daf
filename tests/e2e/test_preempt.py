"""A signal asks a run to leave: it saves, stops its engines, leaves with status 75, and the same command continues it.

What both commands together leave behind equals the uninterrupted run in deterministic mode, bit for bit. Signals go to
the trainer alone, or to its process group. Not covered here: signals to the engines as well (``tests/slurm``), SIGKILL
(``test_resume.py``).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from e2e_support import (
    DETERMINISTIC,
    STEPS,
    assert_nothing_left,
    assert_same_run,
    finish,
    metrics_of,
    mua,
    running,
    until,
)

pytestmark = pytest.mark.timeout(900)  # a busy machine; the fixtures' runs count too


def _left(err: str, status: int) -> None:
    assert status == 75, err
    assert "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("mua: ")
    assert "the same command continues it" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_rollout_is_given_up_and_the_step_before_it_saved(recipe: Path, trained: Path, tmp_path: Path) -> None:
    # No checkpoint is due before the end: the one of two steps is there because of the signal alone.
    command = ("train", recipe, f"trainer.steps={STEPS}", "rollout.concurrency=1", *DETERMINISTIC)
    output = tmp_path / "out"
    with running(*command, "trainer.save_every=0", cwd=tmp_path) as process:
        until(lambda: len(metrics_of(output)) >= 2, process, "two steps")
        process.send_signal(signal.SIGUSR1)
        status, _, err = finish(process, tmp_path)
    _left(err, status)
    assert_nothing_left(tmp_path)
    steps = len(metrics_of(output))
    assert 2 <= steps < STEPS
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    mua(*command, cwd=tmp_path)
    assert_same_run(output, trained)


@pytest.mark.slow
def test_two_ranks_leave_together_when_the_whole_group_gets_the_signal(recipe: Path, tmp_path: Path) -> None:
    command = ("train", recipe, "trainer.steps=3", "rollout.concurrency=1", "megatron.data_parallel=2", *DETERMINISTIC)
    output = tmp_path / "out"
    with running(*command, cwd=tmp_path) as process:
        until(lambda: metrics_of(output), process, "the first step")
        os.killpg(process.pid, signal.SIGTERM)
        status, _, err = finish(process, tmp_path)
    _left(err, status)
    assert_nothing_left(tmp_path)
    mua(*command, cwd=tmp_path)
    assert [line["step"] for line in metrics_of(output)] == [0, 1, 2]


@pytest.mark.grid
def test_an_evaluation_that_was_given_up_is_made_good(recipe: Path, tmp_path: Path) -> None:
    command = ("train", recipe, "trainer.steps=2", "trainer.evaluate_every=1", "evaluation.samples=8")
    command = (*command, "rollout.concurrency=1", *DETERMINISTIC)
    whole, output = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    mua(*command, cwd=whole)
    with running(*command, cwd=tmp_path) as process:
        said = [tmp_path / "stdout", tmp_path / "stderr"]  # the rollout's line comes at its end
        until(lambda: any("episodes of step 0" in f.read_text() for f in said), process, "the first rollout's end")
        process.send_signal(signal.SIGTERM)
        status, _, err = finish(process, tmp_path)
    _left(err, status)
    assert metrics_of(output) == []
    assert (output / "checkpoints" / "step_00000001").is_dir()
    mua(*command, cwd=tmp_path)
    judged = [
        {k: v for k, v in line.items() if k.startswith(("step", "eval", "reward"))} for line in metrics_of(output)
    ]
    assert judged == [{k: line[k] for k in judged[0]} for line in metrics_of(whole / "out")]


@pytest.mark.slow
def test_fine_tuning_leaves_and_continues_too(recipe: Path, tmp_path: Path) -> None:
    command = ("sft", recipe, "trainer.steps=40", "trainer.save_every=0")
    with running(*command, cwd=tmp_path) as process:
        until(lambda: metrics_of(tmp_path / "out"), process, "the first step")
        process.send_signal(signal.SIGUSR1)
        status, _, err = finish(process, tmp_path)
    _left(err, status)
    mua(*command, cwd=tmp_path)
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == list(range(40))
