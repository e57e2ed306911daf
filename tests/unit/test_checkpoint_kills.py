"""A trainer killed at a hundred drawn moments: a checkpoint is whole or not there, and the run goes on from it.

One process that trains and saves, in the foreground and in the background in turns, is killed by SIGKILL and started
again on the same folder. What has a checkpoint's name is read in whole after every kill.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mua.algorithms.losses import CrossEntropyLoss
from mua.megatron.checkpoint import checkpoint_folder, latest_checkpoint, prune_checkpoints
from mua.megatron.checkpoint_manifest import check_files, read_manifest
from tests.megatron_support import backend, make_batch, write_model

KILLS = 100


def train(model: Path, root: Path) -> None:
    """Steps for ever, a checkpoint after each, from the newest one."""
    with backend(model) as built:
        newest = latest_checkpoint(root)
        step = 0 if newest is None else built.load(newest)["next"]
        while True:
            built.train_step(make_batch(seed=step), CrossEntropyLoss())
            step += 1
            built.save(checkpoint_folder(root, step), {"next": step}, background=step % 2 == 0)
            prune_checkpoints(root, 2, writing=checkpoint_folder(root, step))


@pytest.mark.grid
@pytest.mark.timeout(1800)
def test_a_checkpoint_is_whole_or_not_there_whenever_the_trainer_is_killed(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    root, drawn, reached = tmp_path / "checkpoints", random.Random(40), 0
    root.mkdir()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron_support", "mua.trainer.learner"])
    for _ in range(KILLS):
        trainer = context.Process(target=train, args=(tmp_path / "model", root))
        trainer.start()
        before = {path.name for path in root.glob("step_*")}
        while trainer.is_alive() and {path.name for path in root.glob("step_*")} <= before:
            time.sleep(0.01)  # it has loaded what it found, and saves
        time.sleep(drawn.random() * 0.5)
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.join(60)
        assert trainer.exitcode == -signal.SIGKILL
        for folder in root.glob("step_*"):
            check_files(folder, read_manifest(folder))
        newest = latest_checkpoint(root)
        assert newest is not None
        assert read_manifest(newest)["data_position"]["next"] > reached
        reached = read_manifest(newest)["data_position"]["next"]
