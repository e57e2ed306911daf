"""Runs that end before their last step, each with one clear line, after saving what there is.

The loop, the output folder, traces and metrics are real; policy and engines are stand-ins that give what a test says.
An update whose gradient is really not finite is in ``test_trainer_sft_run.py``; users that really do not answer are in
``tests/e2e/test_bad_input.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from disk_support import largest_file

from mua.config.schema import ExperimentConfig
from mua.engine.weight_transfer import SyncReport
from mua.observe.metrics_log import read_metrics
from mua.rollout.runner import Position, RolloutBatch, require_scored
from mua.rollout.service import RolloutService
from mua.store.traces import read_traces
from mua.trainer.learner import Learner
from mua.trainer.preempt import Preemption
from mua.trainer.rl import Training
from mua.trainer.run_folder import Run
from mua.types import Group, Outcome, TrainBatch, Trajectory
from mua.utils.errors import DiskError, RunStopped, exit_status
from tests.segments import segment_of
from tests.tokens_fixtures import chat_family

STEPS, SIZE = 8, 4


def episode(sample: int, outcome: Outcome = Outcome.USER_STOP, *, passing: bool = True) -> Trajectory:
    if not outcome.scored:
        said = f"{outcome} of {sample}"
        return Trajectory("task", 0, sample, [], [], 0.0, False, outcome, error=said, passing=passing)
    segment = segment_of([False, True, True], logprobs=0.0)
    reward = float(sample % 2)
    return Trajectory("task", 0, sample, [segment], [reward], reward, bool(reward), outcome)


class StandIn:
    """A policy whose updates have metrics by the script and whose checkpoints are their states."""

    watches_gradients = False

    def __init__(self, skipped: Sequence[float] = ()) -> None:
        self.skipped = list(skipped)
        self.updates = 0

    def give_back(self) -> None:
        pass

    def watch_gradients(self) -> None:
        pass

    def with_logprobs(self, batch: TrainBatch, *, old: bool) -> TrainBatch:
        return batch

    kept_logprobs = None

    def train_step(self, batch: TrainBatch, loss: object, *, keep: bool = False) -> dict[str, float]:
        self.updates += 1
        return {
            "train/loss": 1.0,
            "train/grad_norm": 1.0,
            "train/skipped": self.skipped.pop(0) if self.skipped else 0.0,
        }

    def skip_steps(self, steps: dict[str, int]) -> None:
        pass

    def weights(self) -> None:
        pass

    def save(self, folder: Path, extra_state: dict[str, Any], *_: Any, **__: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps(extra_state | {"weights": self.updates}))

    def load(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        self.updates = state["weights"]
        return state


def experiment(
    output: Path, engine: dict[str, Any] | None = None, report: str | None = None, **trainer: Any
) -> ExperimentConfig:
    return ExperimentConfig(
        name="run", output=output, model={"path": "model"}, environment={"name": "help_desk"},
        trainer={"steps": STEPS, "save_every": 0, **trainer}, algorithm={"group_size": SIZE, "groups_per_step": 1},
        evaluation={"report_split": report}, engine=engine or {},
        observe={"tensorboard": False, "progress": False, "traces": True},
    )  # fmt: skip


def rollouts(*steps: Sequence[Trajectory]) -> Any:
    """Engines and episodes: what each step gets; the last repeats."""

    def groups() -> Iterator[RolloutBatch]:
        for step in range(STEPS):
            group = Group(step, "task", list(steps[min(step, len(steps) - 1)]))
            yield RolloutBatch([group], [group], 0, Position(step + 1))

    taken = groups()
    service = mock.create_autospec(RolloutService, instance=True)
    service.family = chat_family("qwen3", False)
    service.released, service.position = False, {"next": 0, "waiting": [], "curriculum": []}
    service.update_weights.side_effect = lambda weights, version: SyncReport(0, 0, 0, 0.0, 0.0, version)
    service.metrics.return_value = {"engine/sampled_tokens": 1.0}
    service.take.side_effect = lambda **_: next(taken)
    return service


def train(config: ExperimentConfig, policy: StandIn, service: Any) -> None:
    stand_in: Learner = policy  # type: ignore[assignment]
    with Run(config, stand_in) as run, run.saved_on_leaving():
        Training(config, stand_in, run, service, Preemption()).loop()


def saved(output: Path) -> dict[str, int]:
    """The steps and updates of each checkpoint."""
    found = {p.parent.name: json.loads(p.read_text()) for p in sorted(output.glob("checkpoints/*/manifest.json"))}
    return {name: state["weights"] for name, state in found.items() if state["step"] == int(name.removeprefix("step_"))}


ALL = [episode(sample) for sample in range(SIZE)]


@pytest.mark.parametrize(
    ("outcome", "passing", "status"),
    [(Outcome.USER_ERROR, False, 2), (Outcome.TIMEOUT, True, 75)],
)
def test_too_few_scored_episodes_end_the_run_before_it_trains_on_them(
    tmp_path: Path, outcome: Outcome, passing: bool, status: int
) -> None:
    few = [episode(0), *(episode(sample, outcome, passing=passing) for sample in range(1, SIZE))]
    policy = StandIn()
    with pytest.raises(RunStopped) as error:
        train(experiment(tmp_path, max_unscored_steps=1), policy, rollouts(ALL, ALL, few))
    assert str(error.value).startswith(
        f"step 2: only 1 of 4 episodes could be scored, and trainer.min_scored_share is 0.5; most of the others ended "
        f"as {outcome}: {outcome} of 3; "
    )
    assert ("user.llm" if outcome is Outcome.USER_ERROR else "raise the deadline") in str(error.value)
    assert exit_status(error.value) == status
    assert saved(tmp_path) == {"step_00000002": 2}
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]
    # What it did not train on can be looked into.
    assert [t.outcome for t in read_traces(tmp_path / "traces" / "step_000002.jsonl")] == [t.outcome for t in few]


NONE = [episode(sample, Outcome.JUDGE_ERROR) for sample in range(SIZE)]


@pytest.mark.parametrize(("steps", "bound", "done"), [(8, 3, 2), (1, 5, 0)])
def test_a_run_whose_every_episode_failed_does_not_end_well(tmp_path: Path, steps: int, bound: int, done: int) -> None:
    """However short it is: nothing is saved, nothing is trained, and no line has a reward."""
    policy = StandIn()
    config = experiment(tmp_path, min_scored_share=0.0, max_unscored_steps=bound, steps=steps, save_every=1)
    with pytest.raises(RunStopped, match=rf"step {done}: not one of 4 episodes could be scored; most ended as judge_"):
        train(config, policy, rollouts(NONE))
    assert (saved(tmp_path), policy.updates) == ({}, 0)
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [line["step"] for line in lines] == list(range(done))
    for line in lines:
        assert not [name for name in line if name.startswith("reward") or name == "success"]
        assert (line["rollout/trajectories/unscored"], line["rollout/outcome/judge_error"]) == (1.0, 1.0)


def test_a_step_that_nobody_could_score_trains_on_nothing_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = StandIn()
    train(experiment(tmp_path, max_unscored_steps=2), policy, rollouts(NONE, ALL, NONE, ALL, NONE, ALL))
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert ["rollout/success" in line for line in lines] == [False, True, False, True, False, True, True, True]
    assert (policy.updates, saved(tmp_path)) == (5, {"step_00000008": 5})
    assert "step 0 trains on nothing: not one of 4 episodes could be scored; most ended as judge_error" in caplog.text
    assert "check that judge.llm answers" in caplog.text


def test_steps_in_a_row_are_counted_over_a_new_start(tmp_path: Path) -> None:
    """What continues after the bound does not get as many failed steps again."""
    config = experiment(tmp_path, max_unscored_steps=3)
    with pytest.raises(RunStopped, match=r"step 3: .*\(3 such steps in a row, trainer.max_unscored_steps\)"):
        train(config, StandIn(), rollouts(ALL, NONE))
    assert saved(tmp_path) == {"step_00000003": 1}
    with pytest.raises(RunStopped, match=r"step 3: .*\(3 such steps in a row"):
        train(config, StandIn(), rollouts(NONE))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_fault_that_does_not_pass_is_not_tried_again_nor_any_of_a_deterministic_run(
    tmp_path: Path, deterministic: bool
) -> None:
    refused = [episode(sample, Outcome.USER_ERROR, passing=False) for sample in range(SIZE)]
    config = experiment(tmp_path, {"deterministic": deterministic}, deterministic=deterministic, max_unscored_steps=5)
    with pytest.raises(RunStopped, match="step 1: not one of 4") as error:
        train(config, StandIn(), rollouts(ALL, NONE if deterministic else refused))
    assert exit_status(error.value) == (75 if deterministic else 2)
    assert saved(tmp_path) == {"step_00000001": 1}


def test_the_commonest_fault_decides_what_is_said() -> None:
    lost = [episode(0, Outcome.TIMEOUT), episode(1, Outcome.USER_ERROR, passing=False), episode(2, Outcome.TIMEOUT)]
    with pytest.raises(RunStopped, match=r"ended as timeout: timeout of 2; raise the deadline that is named") as error:
        require_scored([*lost, episode(3, Outcome.USER_ERROR)])
    assert error.value.passing


def test_updates_that_change_nothing_end_the_run_after_the_last_is_saved(tmp_path: Path) -> None:
    policy = StandIn(skipped=[1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    with pytest.raises(RunStopped) as error:
        train(experiment(tmp_path, max_skipped_steps=3), policy, rollouts(ALL))
    assert str(error.value).startswith(
        "trainer.max_skipped_steps: the gradient norm of the last 3 steps with an update, to step 5, was not finite"
    )
    assert str(tmp_path / "metrics.jsonl") in str(error.value)
    assert exit_status(error.value) == 2
    assert saved(tmp_path) == {"step_00000006": 6}
    assert [line["train/skipped"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 1, 0, 1, 1, 1]


def test_some_skipped_minibatches_and_steps_without_an_update_end_nothing(tmp_path: Path) -> None:
    with Run(experiment(tmp_path, max_skipped_steps=2), StandIn()) as run:  # type: ignore[arg-type]
        for step, metrics in enumerate(
            [
                {"train/skipped": 0.5},
                {"train/skipped": 1.0},
                {"train/tokens": 0.0},
                {"train/skipped": 0.9},
                {"train/skipped": 1.0},
                {},
            ]
        ):
            run.log(step, metrics)
        with pytest.raises(RunStopped):
            run.log(6, {"train/skipped": 0.0, "train/critic/skipped": 1.0})


def test_an_evaluation_without_a_scored_episode_saves_the_step_before_it(tmp_path: Path) -> None:
    service = rollouts(ALL)
    service.evaluation_tasks.return_value = []
    service.evaluate.return_value = [episode(0, Outcome.USER_ERROR)]
    service.evaluate.return_value[0].domain = "help_desk"
    with pytest.raises(RunStopped, match="not one of 1 episodes could be scored"):
        train(experiment(tmp_path, evaluate_every=2), StandIn(), service)
    assert saved(tmp_path) == {"step_00000002": 2}  # the weights and the step agree; its evaluation is still due
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0]


def test_a_full_disk_ends_the_run_with_its_file_and_keeps_what_was_saved(tmp_path: Path) -> None:
    config = experiment(tmp_path, save_every=1)
    with largest_file(6000), pytest.raises(DiskError) as error:  # some lines of metrics
        train(config, StandIn(), rollouts(ALL))
    assert str(error.value).startswith(f"{tmp_path}/metrics.jsonl: cannot be written: File too large; make room")
    lines = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert 0 < len(lines) < STEPS
    assert list(saved(tmp_path)) == [f"step_{step + 1:08d}" for step in lines]
