"""Metrics files, TensorBoard, stage times, memory and the reward curve.

Not covered: which metrics a trainer logs, and what the curve looks like.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from mua.observe.metrics_log import (
    DETAILS_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    MetricsWriter,
    memory_metrics,
    read_metrics,
)


def steps(output: Path) -> list[int]:
    return [line["step"] for line in read_metrics(output / METRICS_FILE)]


def write(output: Path, first: int, last: int, resume_step: int | None = None) -> None:
    with MetricsWriter(output, False, resume_step) as writer:
        for step in range(first, last):
            writer.log(step, {"rollout/reward/mean": step / 10})


def test_a_line_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer.log(3, {"rollout/reward/mean": 0.5, "train/loss": float("nan"), "train/tokens": 2})
    (line,) = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"step": 3, "rollout/reward/mean": 0.5, "train/loss": None, "train/tokens": 2.0}
    assert "NaN" not in line  # which is not JSON
    writer.close()


@pytest.mark.parametrize(
    ("resume_step", "expected"), [(3, [0, 1, 2, 7]), (0, [7]), (None, [0, 1, 2, 3, 4, 7]), (9, [0, 1, 2, 3, 4, 7])]
)
def test_a_resumed_run_drops_what_it_will_write_again(
    tmp_path: Path, resume_step: int | None, expected: list[int]
) -> None:
    write(tmp_path, 0, 5)
    write(tmp_path, 7, 8, resume_step)
    assert steps(tmp_path) == expected


def test_a_line_that_is_written_while_it_is_read_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 0, 3)
    written = (tmp_path / METRICS_FILE).read_bytes()
    for cut in range(len(written)):
        if written[:cut].endswith(b"\n") or not cut:
            continue
        # The end of the file is reached at ``cut``, and the rest is there when the next line is asked for.
        found = written[:cut].splitlines(keepends=True) + written[cut:].splitlines(keepends=True)
        monkeypatch.setattr("mua.observe.metrics_log.open_file", lambda _, found=found: nullcontext(found))
        assert steps(tmp_path) == list(range(written[:cut].count(b"\n"))), cut


def test_evaluations_stand_at_the_steps_that_were_done_and_have_one_strand(tmp_path: Path) -> None:
    def evaluated(first: int, last: int, resume_step: int) -> None:
        with MetricsWriter(tmp_path, True, resume_step) as writer:
            if first == 0:
                writer.log_evaluation(0, {"eval/test_success": 0.0, "eval/validation_success": 0.0})
            for step in range(first, last):
                writer.log(step, {"rollout/reward/mean": step / 10})
                writer.log_evaluation(step + 1, {"eval/validation_success": (step + 1) / 10})

    evaluated(0, 5, 0)
    evaluated(3, 6, 3)
    with MetricsWriter(tmp_path, True, 6) as writer:  # a run that is done, started again
        writer.log_evaluation(6, {"eval/test_success": 1.0})
        writer.log_evaluation(6, {"eval/test_success": 0.5})
    lines = {line["step"]: line for line in read_metrics(tmp_path / EVALUATIONS_FILE)}
    assert [line["eval/validation_success"] for line in lines.values()] == [at / 10 for at in range(7)]
    assert {at for at, line in lines.items() if "eval/test_success" in line} == {0, 6}
    assert lines[6]["eval/test_success"] == 0.5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER))
    events.Reload()
    points = {event.step: round(event.value, 6) for event in events.Scalars("eval/validation_success")}
    assert points == {at: at / 10 for at in range(7)}
    strand = [(event.step, round(event.value, 6)) for event in events.Scalars("rollout/reward/mean")]
    assert strand == [(step, step / 10) for step in range(6)]
    with MetricsWriter(tmp_path, False, 0):
        assert not (tmp_path / EVALUATIONS_FILE).exists()


def test_details_are_dropped_from_where_a_run_goes_on_and_tensorboard_has_them(tmp_path: Path) -> None:
    def some(first: int, resume_step: int) -> None:
        with MetricsWriter(tmp_path, True, resume_step) as writer:
            writer.log_hyperparameters({"seed": 1, "model.path": "m", "trainer.resume": True})
            for step in range(first, first + 3):
                samples = {"rollout/reward/histogram": np.array([0.0, 1.0, step])}
                writer.log_details(step, samples, {"rollout/episodes/failed": "# user: <b>\nno"} if step == 2 else {})

    some(0, 0)
    with (tmp_path / DETAILS_FILE).open("a") as file:
        file.write('{"step": 1, "histo')
    some(2, 2)
    lines = [json.loads(line) for line in (tmp_path / DETAILS_FILE).read_text().splitlines()]
    assert [line.get("step") for line in lines] == [None, 0, 1, None, 2, 3, 4]
    assert sum(lines[1]["histograms"]["rollout/reward/histogram"]["counts"]) == 3
    assert lines[4]["texts"] == {"rollout/episodes/failed": "# user: <b>\nno"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER), {"histograms": 0, "tensors": 0})
    events.Reload()
    assert [event.step for event in events.Histograms("rollout/reward/histogram")] == [0, 1, 2, 3, 4]
    text = events.Tensors("rollout/episodes/failed/text_summary")[-1]
    assert text.tensor_proto.string_val[0] == b"    # user: <b>\n    no"
    assert "_hparams_/session_start_info" in str(events.summary_metadata.keys())


def test_memory_counts_this_process_and_its_children() -> None:
    code = "x = bytearray(50 << 20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        metrics = memory_metrics()
        child.communicate("\n")
    assert metrics["memory/process_gib"] > 0.01
    assert metrics["memory/children_gib"] > 50 / 1024
