"""The demonstration's accounting: how many steps of fine-tuning take as long as reinforcement learning took.

Does not cover whole runs of it (``tests/e2e/test_wheel.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mua.observe.metrics_log import METRICS_FILE
from workbench.demo import steps_within


def test_more_fine_tuning_gets_the_time_of_the_learning(tmp_path: Path) -> None:
    lines = [{"step": step, "time/train_seconds": 0.5 if step else 1.5} for step in range(3)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert steps_within(25, tmp_path) == 30
    assert steps_within(25.1, tmp_path) == 31


def test_a_run_without_times_is_no_measure(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 0, "loss": 1.0}\n')
    with pytest.raises(KeyError):
        steps_within(25, tmp_path)
