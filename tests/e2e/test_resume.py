"""kill -9 at an awkward moment, the same command again: the run ends as if nothing had happened, bit for bit.

The trainer's process group is killed; its engine must notice by itself. Compared with the uninterrupted run in
deterministic mode: final weights, the stream of tasks, the lines of metrics. Not covered: a machine that loses power
(the files' flushing), several trainer processes.
"""

from __future__ import annotations

import re
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from e2e_support import (
    DETERMINISTIC,
    GROUPS,
    SIZE,
    STEPS,
    assert_gone,
    assert_nothing_left,
    assert_same_run,
    finish,
    kill_group,
    metrics_of,
    running,
    shared_memory,
    until,
)

pytestmark = pytest.mark.timeout(900)  # a busy machine; the fixtures' runs count too

_EPISODE = re.compile(r"Prefill batch, #new-seq: \d+, #new-token: [1-9]\d")
Moment = Callable[[Path], bool]


def during_the_rollout_of_step_2(output: Path) -> bool:
    """The engine works on an episode's prompt after the checkpoint of two steps is there."""
    if not (output / "checkpoints" / "step_00000002").is_dir():
        return False
    log = output / "logs" / "engine-0.log"
    seen = len(_EPISODE.findall(log.read_text(errors="replace")))
    time.sleep(0.05)
    return len(_EPISODE.findall(log.read_text(errors="replace"))) > seen


def a_group_of_step_2_has_ended(output: Path) -> bool:
    """It is in the store, and the step is not done."""
    if not (output / "checkpoints" / "step_00000002").is_dir():
        return False
    with closing(sqlite3.connect(f"file:{output / 'store.sqlite'}?mode=ro", uri=True)) as store:
        ended = "SELECT count(*) FROM trajectories WHERE round = 0 AND ordinal = ? AND scored"
        return bool(store.execute(ended, (2 * GROUPS,)).fetchone()[0] == SIZE)


def while_saving(output: Path) -> bool:
    """A later checkpoint than the first is being assembled under its hidden name."""
    return any((output / "checkpoints" / f".step_0000000{step}.partial").is_dir() for step in (2, 3))


def right_after_saving_step_2(output: Path) -> bool:
    """The checkpoint has just got its name."""
    return (output / "checkpoints" / "step_00000002").is_dir()


def before_the_first_checkpoint(output: Path) -> bool:
    """One step was trained, and nothing of it is saved."""
    return bool(metrics_of(output)) and not (output / "checkpoints" / "step_00000001").exists()


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(before_the_first_checkpoint, marks=pytest.mark.grid),
        pytest.param(while_saving, marks=pytest.mark.grid),
        pytest.param(right_after_saving_step_2, marks=pytest.mark.grid),
        pytest.param(during_the_rollout_of_step_2, marks=pytest.mark.grid),
        pytest.param(a_group_of_step_2_has_ended, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_as_if_nothing_had_happened(
    recipe: Path, trained: Path, tmp_path: Path, moment: Moment
) -> None:
    # One episode at a time: the deterministic engine must not care, and the rollout takes long enough to be hit.
    command = ("train", recipe, f"trainer.steps={STEPS}", "rollout.concurrency=1", "store.write_seconds=0.05")
    command += DETERMINISTIC
    output = tmp_path / "out"
    with running(*command, cwd=tmp_path) as process:
        until(lambda: moment(output), process, moment.__name__)
        process.send_signal(signal.SIGSTOP)  # the moment must not pass while we look at what is in use
        used = shared_memory(tmp_path)
        kill_group(process)
    done = len(metrics_of(output))
    assert 0 < done < STEPS
    assert_nothing_left(tmp_path)
    assert_gone(used)

    with running(*command, cwd=tmp_path, fresh=True) as process:
        status, _, err = finish(process, tmp_path)
    assert status == 0, err
    assert_same_run(output, trained)
    if moment is a_group_of_step_2_has_ended:
        with closing(sqlite3.connect(output / "store.sqlite")) as store:
            took = store.execute("SELECT trajectory_id FROM uses WHERE step = 2 AND part = 2").fetchall()
        assert any(name.split("/")[1] == "1" for (name,) in took), "what had ended was not rolled out again"
    assert_nothing_left(tmp_path)
