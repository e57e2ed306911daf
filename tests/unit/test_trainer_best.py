"""The best checkpoint by validation: chosen, kept beside the newest, found again after a kill, handed over; the report.

Loop, output folder and checkpoint folders are real; the policy is a number that counts its updates, and how often an
evaluation succeeds is a script of that number. Real checkpoints are pruned in test_megatron_checkpoint.py; a whole run
whose best is converted and evaluated is in tests/e2e/test_best.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mua.config.schema import ExperimentConfig
from mua.environment.protocol import Task
from mua.megatron.checkpoint import best_checkpoint
from mua.observe.metrics_log import read_metrics
from mua.rollout.runner import Position, RolloutBatch
from mua.store.traces import read_traces
from mua.trainer.run_folder import Run
from mua.types import Group, Outcome, Trajectory
from mua.utils.errors import EngineError, MuaError
from tests.unit.test_trainer_bounds import ALL, StandIn, experiment, rollouts, train

TASKS = 10


class Evaluated:
    """Engines whose policy succeeds in so many of ten tasks as ``script`` says of the weights in them."""

    def __init__(self, script: Callable[[int, str], int]) -> None:
        self.script = script
        self.updates = 0
        self.versions: list[int] = []
        self.played: list[tuple[str, int]] = []
        """Split and weights of each evaluation."""
        self.service = rollouts(ALL)
        self.service.update_weights.side_effect = self._update
        self.service.evaluation_tasks.side_effect = lambda split: [Task("t", "help_desk", split, {})] * TASKS
        self.service.evaluate.side_effect = self._evaluate
        self.service.take.side_effect = lambda **_: RolloutBatch(
            [Group(0, "task", ALL)], [Group(0, "task", ALL)], 0, Position()
        )

    def _update(self, weights: int, version: int) -> Any:
        from mua.engine.weight_transfer import SyncReport

        self.updates = weights
        self.versions.append(version)
        return SyncReport(0, 0, 0, 0.0, 0.0, version)

    def _evaluate(self, tasks: Sequence[Task], **_: Any) -> list[Trajectory]:
        split = tasks[0].split
        self.played.append((split, self.updates))
        good = self.script(self.updates, split)
        return [
            Trajectory(f"t{i}", i, 0, [], [0.0], 0.0, i < good, Outcome.USER_STOP, domain="help_desk")
            for i in range(TASKS)
        ]


class Counted(StandIn):
    """Feeds its number of updates; may die in the middle of a step."""

    dies_at = -1

    def weights(self) -> int:  # type: ignore[override]
        return self.updates

    def train_step(self, *arguments: Any, **named: Any) -> dict[str, float]:
        if self.updates + 1 == self.dies_at:
            raise KeyboardInterrupt
        return super().train_step(*arguments, **named)


def config(output: Path, report: str | None = None, **trainer: Any) -> ExperimentConfig:
    return experiment(output, report=report, **{"save_every": 1, "keep": 1, "evaluate_every": 2} | trainer)


PEAK = {2: 3, 4: 7, 6: 7, 8: 5}
"""Tasks solved after so many steps: best after 4, and again after 6."""


def peaked(weights: int, split: str) -> int:
    return PEAK.get(weights, 1) + (split == "test")


def continued(chosen: ExperimentConfig, dies_at: int | None = None, engines: Evaluated | None = None) -> Counted:
    """The policy of a run, or of a part of one that is killed in the middle of an update."""
    policy = Counted()
    if dies_at is None:
        train(chosen, policy, (engines or Evaluated(peaked)).service)
        return policy
    policy.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        train(chosen, policy, Evaluated(peaked).service)
    return policy


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def test_the_best_stays_beside_the_newest(tmp_path: Path) -> None:
    policy = continued(config(tmp_path))
    assert policy.updates == 8  # the last is what the run hands over unless it is told otherwise
    assert names(tmp_path) == ["best", "step_00000004", "step_00000008"]
    assert best_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step_00000004"
    state = json.loads((tmp_path / "checkpoints" / "best" / "manifest.json").read_text())
    assert (state["step"], state["weights"], state["best"]) == (4, 4, {"step": 4, "success": 0.7})


@pytest.mark.parametrize("dies_at", [3, 6])
def test_a_killed_run_finds_its_best_again(tmp_path: Path, dies_at: int) -> None:
    continued(config(tmp_path), dies_at)
    policy = continued(config(tmp_path, export="best"))
    assert policy.updates == 4
    assert names(tmp_path) == ["best", "step_00000004", "step_00000008"]


@pytest.mark.parametrize("moment", ["saved, link not yet set", "link of a step that the run forgot"])
def test_the_state_decides_and_not_the_link(tmp_path: Path, moment: str) -> None:
    continued(config(tmp_path), 5)
    link = tmp_path / "checkpoints" / "best"
    link.unlink()
    if moment.startswith("link"):
        link.symlink_to("step_00000007")
    with Run(config(tmp_path), Counted()):  # type: ignore[arg-type]
        assert link.readlink() == Path("step_00000004")


def test_an_evaluation_that_a_new_start_makes_up_for_may_be_the_best(tmp_path: Path) -> None:
    engines, done = Evaluated(peaked), []

    def fails(tasks: Sequence[Task], **_: Any) -> list[Trajectory]:
        done.append(engines.updates)
        if engines.updates == 4:
            raise EngineError("engine.max_restarts")
        return engines._evaluate(tasks)

    engines.service.evaluate.side_effect = fails
    with pytest.raises(EngineError):
        continued(config(tmp_path), engines=engines)
    assert names(tmp_path) == ["best", "step_00000002", "step_00000004"]
    continued(config(tmp_path))
    assert names(tmp_path) == ["best", "step_00000004", "step_00000008"]
    lines = {line["step"]: line["eval/validation_success"] for line in read_metrics(tmp_path / "evaluations.jsonl")}
    assert lines == {2: 0.3, 4: 0.7, 6: 0.7, 8: 0.5}


@pytest.mark.parametrize(("export", "step", "success"), [("best", 4, 0.8), ("last", 8, 0.6)])
def test_the_report_is_of_the_first_policy_and_of_the_one_handed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], export: str, step: int, success: float
) -> None:
    engines = Evaluated(peaked)
    policy = continued(config(tmp_path, "test", export=export), engines=engines)
    assert policy.updates == step
    validation = [("validation", weights) for weights in (2, 4, 6, 8)]
    assert engines.played == [("test", 0), *validation, ("test", step)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["split"], report["final"]["export"]) == ("test", export)
    assert (report["first"]["step"], report["final"]["step"]) == (0, step)
    assert (report["first"]["eval/test_success"], report["final"]["eval/test_success"]) == (0.2, success)
    curves = {line["step"]: line for line in read_metrics(tmp_path / "evaluations.jsonl")}
    name = "eval/test_success"
    assert {at: line[name] for at, line in curves.items() if name in line} == {0: 0.2, step: success}
    assert list(curves) == [0, 2, 4, 6, 8]
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert not [name for line in lines for name in line if name.startswith("eval/")]
    assert f"report on test, final policy (step {step}): success {success:.3f} (" in capsys.readouterr().out
    assert len(list(read_traces(tmp_path / "evaluations" / "test"))) == 2 * TASKS


def test_a_run_that_continues_keeps_the_report_of_its_first_policy(tmp_path: Path) -> None:
    continued(config(tmp_path, "test"), 5)
    engines = Evaluated(peaked)
    continued(config(tmp_path, "test"), engines=engines)
    assert [weights for split, weights in engines.played if split == "test"] == [8]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["first"]["eval/test_success"], report["final"]["eval/test_success"]) == (0.2, 0.6)
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(MuaError, match="not a report of a run; remove it"):
        continued(config(tmp_path, "test"), engines=engines)
