"""A run's checkpoints while they are written in the background: none is removed before its successor is whole.

The policy is a stand-in whose saves become whole when they are finished; real saves in the background are in
``test_megatron_checkpoint.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mua.config.schema import ExperimentConfig
from mua.trainer.run_folder import Run
from tests.unit.test_trainer_bounds import experiment


class StandIn:
    """Saves as the policy does with ``trainer.async_save``: the next call finishes the one before."""

    def __init__(self) -> None:
        self.writing: Path | None = None
        self.states: dict[Path, str] = {}

    def load(self, folder: Path) -> Any:
        return json.loads(self.states[folder])

    def save(self, folder: Path, extra_state: dict[str, Any], *_: Any, **__: Any) -> None:
        self.finish_save()
        self.states[folder] = json.dumps(extra_state)
        self.writing = folder
        folder.with_name(f".{folder.name}.partial").mkdir(parents=True)

    def finish_save(self) -> None:
        if self.writing is not None:
            folder = self.writing.with_name(f".{self.writing.name}.partial").rename(self.writing)
            (folder / "manifest.json").write_text("{}")
            self.writing = None


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    return experiment(tmp_path, steps=4, save_every=10, keep=1, async_save=True)


def test_an_older_checkpoint_stays_until_the_newer_one_is_whole(config: ExperimentConfig) -> None:
    def present() -> list[str]:
        return sorted(path.name for path in (config.output / "checkpoints").iterdir())

    with Run(config, StandIn()) as run:  # type: ignore[arg-type]
        run.save(0)
        assert present() == [".step_00000001.partial"]
        run.save(1)
        assert present() == [".step_00000002.partial", "step_00000001"]
        run.save(2)
        assert present() == [".step_00000003.partial", "step_00000002"]
    assert present() == ["step_00000003"]


def test_what_is_due_every_so_many_steps_is_due_after_the_last_of_them_and_at_the_end(config: ExperimentConfig) -> None:
    with Run(config, StandIn()) as run:  # type: ignore[arg-type]
        assert [[step for step in range(4) if run.due(every, step)] for every in (0, 1, 2, 3)] == [
            [3], [0, 1, 2, 3], [1, 3], [2, 3]
        ]  # fmt: skip


def test_a_run_continues_where_its_last_saved_step_left_the_stream(config: ExperimentConfig) -> None:
    policy = StandIn()
    with Run(config, policy) as run:  # type: ignore[arg-type]
        assert (run.step, run.position) == (0, None)
        for step, next_ordinal in enumerate((3, 7)):
            run.position = {"next": next_ordinal, "waiting": [[2, 1]], "curriculum": []}
            run.log(step, {"rollout/reward/mean": 0.0})
            run.save(step)
    with Run(config, policy) as run:  # type: ignore[arg-type]
        assert (run.step, run.position) == (2, {"next": 7, "waiting": [[2, 1]], "curriculum": []})


def test_an_error_leaves_the_unfinished_one_to_the_end_of_the_policy(config: ExperimentConfig) -> None:
    policy = StandIn()
    with pytest.raises(ZeroDivisionError):
        fail_after_a_save(config, policy)
    assert policy.writing is not None


def fail_after_a_save(config: ExperimentConfig, policy: StandIn) -> None:
    with Run(config, policy) as run:  # type: ignore[arg-type]
        run.save(0)
        raise ZeroDivisionError
