"""A signal asks a run to leave: it saves, stops its engines, leaves with status 75, and the same command continues it.

What both commands together leave behind equals the uninterrupted run in deterministic mode, bit for bit. Signals go to
the trainer alone, or to its process group. Not covered here: signals to the engines as well (``tests/slurm``), SIGKILL
(``test_resume.py``).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_support import DETERMINISTIC, STEPS, assert_same_run, ended, evaluations_of, metrics_of, mua, running, until

pytestmark = pytest.mark.timeout(900)  # a busy machine; the fixtures' runs count too


def leave(
    command: tuple[str | Path, ...], cwd: Path, look: Callable[[], object], number: int, group: bool = False
) -> None:
    """Send the signal once ``look`` sees something; the command must say that the same one continues it."""
    with running(*command, cwd=cwd) as process:
        until(look, process, "the moment")
        (os.killpg if group else os.kill)(process.pid, number)
        last = ended(process, cwd, 75)[-1]
    assert last.startswith("mua: ")
    assert "the same command continues it" in last


@pytest.mark.slow
def test_a_rollout_is_given_up_and_the_step_before_it_saved(recipe: Path, trained: Path, tmp_path: Path) -> None:
    # No checkpoint is due before the end: the one of two steps is there because of the signal alone.
    command = ("train", recipe, f"trainer.steps={STEPS}", "rollout.concurrency=1", *DETERMINISTIC)
    output = tmp_path / "out"
    leave((*command, "trainer.save_every=0"), tmp_path, lambda: len(metrics_of(output)) >= 2, signal.SIGUSR1)
    steps = len(metrics_of(output))
    assert 2 <= steps < STEPS
    assert [folder.name for folder in (output / "checkpoints").iterdir()] == [f"step_{steps:08d}"]
    mua(*command, cwd=tmp_path)
    assert_same_run(output, trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "settings", "number", "group"),
    [
        ("train", ("rollout.concurrency=1", "megatron.data_parallel=2", *DETERMINISTIC), signal.SIGTERM, True),
        ("sft", ("trainer.save_every=0",), signal.SIGUSR1, False),
    ],
    ids=["two ranks leave together when the whole group gets the signal", "fine-tuning"],
)
def test_a_run_leaves_and_continues(
    recipe: Path, tmp_path: Path, verb: str, settings: tuple[str, ...], number: int, group: bool
) -> None:
    steps = 3 if verb == "train" else 40
    command = (verb, recipe, f"trainer.steps={steps}", *settings)
    leave(command, tmp_path, lambda: metrics_of(tmp_path / "out"), number, group)
    mua(*command, cwd=tmp_path)
    assert [line["step"] for line in metrics_of(tmp_path / "out")] == list(range(steps))


@pytest.mark.grid
def test_an_evaluation_that_was_given_up_is_made_good(recipe: Path, tmp_path: Path) -> None:
    command = ("train", recipe, "trainer.steps=2", "trainer.evaluate_every=1", "evaluation.samples=8")
    command = (*command, "rollout.concurrency=1", *DETERMINISTIC)
    whole, output = tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    mua(*command, cwd=whole)
    said = [tmp_path / "stdout", tmp_path / "stderr"]  # the rollout's line comes at its end
    leave(command, tmp_path, lambda: any("episodes of step 0" in f.read_text() for f in said), signal.SIGTERM)
    assert metrics_of(output) == []
    assert (output / "checkpoints" / "step_00000001").is_dir()
    mua(*command, cwd=tmp_path)
    judged = [{k: v for k, v in line.items() if k.startswith(("step", "reward"))} for line in metrics_of(output)]
    assert judged == [{k: line[k] for k in judged[0]} for line in metrics_of(whole / "out")]
    assert evaluations_of(output) == evaluations_of(whole / "out") != {}
