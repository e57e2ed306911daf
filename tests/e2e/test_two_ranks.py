"""One command trains on two processes: ``megatron.data_parallel=2`` starts them itself and changes no number.

Compared with the same steps on one process, both in deterministic mode, and a step is replayed. A mistake stays one
line and status 2, and Ctrl-C or a rank that is killed leave none behind.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from e2e_support import DETERMINISTIC, ended, metrics_of, mua, processes_in, refused, replayed, running, until

pytestmark = pytest.mark.timeout(900)  # a busy machine; the fixtures' runs count too

STEPS = 2
SAME = (
    "rollout/reward/mean",
    "train/loss",
    "train/grad_norm",
    "train/entropy",
    "train/tokens",
    "train/logprob",
    "rollout/advantage/abs_mean",
)


@pytest.mark.slow
def test_two_ranks_train_like_one(recipe: Path, trained: Path, tmp_path: Path) -> None:
    mua("train", recipe, f"trainer.steps={STEPS}", "megatron.data_parallel=2", *DETERMINISTIC, cwd=tmp_path)
    lines = metrics_of(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line, single in zip(lines, metrics_of(trained), strict=False):
        assert line["train/num_microbatches"] >= 2
        assert {name: line[name] for name in SAME} == pytest.approx(
            {name: single[name] for name in SAME}, rel=1e-4, abs=1e-6
        )
    assert (tmp_path / "out" / "hf" / "model.safetensors").is_file()
    assert replayed(tmp_path / "out", STEPS - 1, cwd=tmp_path)["layout"].endswith("world2")


@pytest.mark.slow
def test_a_mistake_is_one_line_with_two_ranks_too(recipe: Path, tmp_path: Path) -> None:
    line = refused("train", recipe, "megatron.data_parallel=2", "environment.name=help_dsk", cwd=tmp_path)
    assert "did you mean 'help_desk'?" in line


@pytest.mark.slow
def test_a_rank_that_is_killed_is_a_fault_that_passes(recipe: Path, tmp_path: Path) -> None:
    command = ("sft", recipe, "trainer.steps=999", "megatron.data_parallel=2")
    with running(*command, cwd=tmp_path) as process:
        until(lambda: metrics_of(tmp_path / "out"), process, "a step")
        (other,) = [p for p in processes_in(tmp_path) if p.environ().get("RANK") == "1"]
        other.kill()
        last = ended(process, tmp_path, 75)[-1]
    assert last.startswith("mua: rank 1 ended with status -9; look at its log (")


@pytest.mark.slow
def test_ctrl_c_ends_both_ranks(recipe: Path, tmp_path: Path) -> None:
    with running("train", recipe, "trainer.steps=99", "megatron.data_parallel=2", cwd=tmp_path) as process:
        # The awkward moment: both ranks are in the middle of collectives, and rank 0 leaves them.
        saving = (tmp_path / "out" / "checkpoints").glob
        until(lambda: any(saving(".step_*.partial")), process, "a checkpoint that is being written")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        assert ended(process, tmp_path, 130, seconds=60)[-1] == "mua: interrupted"
