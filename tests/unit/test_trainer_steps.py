"""The order of a training step, and what its optimizer steps are taken on: epochs, minibatches, versions, temperature.

The policy is a table of logits that really learns by the configured loss, the engines sample from a copy of it that is
as old as the last weights they were given; loop, batches and losses are the real ones. Megatron as the policy is in
test_trainer_gae.py, whole runs with a real engine are under tests/e2e.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mua.algorithms.losses import LossFunction, TokenTensors, finish_metrics
from mua.config.schema import ExperimentConfig, RolloutConfig
from mua.engine.weight_transfer import SyncReport
from mua.observe.timeline import Timeline
from mua.rollout.runner import Position, RolloutBatch
from mua.trainer import rl
from mua.trainer.preempt import Preemption
from mua.trainer.run_folder import Run
from mua.types import Group, Outcome, Segment, TrainBatch, Trajectory
from mua.utils.errors import ConfigError, EngineError
from tests.segments import segment_of
from tests.tokens_fixtures import chat_family

VOCABULARY = 7
TEMPERATURE = 0.5


def config_of(output: Path, **algorithm: Any) -> ExperimentConfig:
    chosen = {"groups_per_step": 4, "group_size": 2, "epochs": 3, "minibatches": 2} | algorithm
    return ExperimentConfig.model_validate(
        {
            "name": "steps", "output": output, "model": {"path": "m"}, "environment": {"name": "help_desk"},
            "rollout": {"temperature": TEMPERATURE}, "algorithm": chosen,
            "critic": {"warmup_steps": 2 if chosen.get("advantage") == "gae" else 0},
            "trainer": {"steps": 3, "save_every": 1}, "observe": {"tensorboard": False, "progress": False},
        }
    )  # fmt: skip


class Table:
    """A policy that says each token with a probability of its own, whatever came before; notes what is done to it."""

    watches_gradients = False

    def __init__(self, events: list[str] | None = None) -> None:
        self.logits = torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64).requires_grad_()
        self.events = [] if events is None else events
        self.steps: list[dict[str, float]] = []
        """Metrics of each optimizer step."""
        self.trained: Counter[int] = Counter()
        """By a group's ordinal (which stands in its first tokens) how many optimizer steps saw it."""
        self.value_steps = 0
        self.skipped: Counter[str] = Counter()

    def log_probabilities(self, ids: np.ndarray, temperature: float) -> torch.Tensor:
        return torch.log_softmax(self.logits / temperature, 0)[torch.from_numpy(ids).long()]

    def with_logprobs(self, batch: TrainBatch, *, old: bool) -> TrainBatch:
        if not old:  # the only optimizer step on a batch takes them from its own forward pass
            return batch
        with torch.no_grad():
            found = [self.log_probabilities(s.ids, batch.temperature).numpy().astype(np.float32) for s in batch]
        return replace(batch, sequences=[replace(s, old_logprobs=v) for s, v in zip(batch, found, strict=True)])

    def train_step(self, batch: TrainBatch, loss: LossFunction, *, keep: bool = False) -> dict[str, float]:
        self.events.append("train")
        self.kept_logprobs = None
        if keep:
            found = [self.log_probabilities(s.ids, batch.temperature).detach().numpy() for s in batch]
            self.kept_logprobs = [
                np.where(s.trained, v, 0).astype(np.float32) for s, v in zip(batch, found, strict=True)
            ]
        self.trained.update({int(s.ids[0]) for s in batch})
        parts = [torch.from_numpy(np.concatenate([part(s)[s.trained] for s in batch])) for part in _PARTS]
        logprobs = torch.cat([self.log_probabilities(s.ids[s.trained], batch.temperature) for s in batch]).float()
        terms = loss(logprobs, torch.zeros_like(logprobs), TokenTensors(*parts))
        terms.loss.backward()
        with torch.no_grad():
            assert self.logits.grad is not None
            self.logits -= 0.5 * self.logits.grad
            self.logits.grad.zero_()
        self.steps.append(finish_metrics(terms.sums, terms.maxima))
        return self.steps[-1]

    def with_values(self, batch: TrainBatch) -> TrainBatch:
        return replace(batch, sequences=[replace(s, values=np.zeros(len(s), np.float32)) for s in batch])

    def train_values(self, batch: TrainBatch, loss: object) -> dict[str, float]:
        self.value_steps += 1
        return {}

    def skip_steps(self, steps: dict[str, int]) -> None:
        self.skipped.update(steps)

    def weights(self) -> torch.Tensor:
        return self.logits.detach().clone()

    def give_back(self) -> None:
        pass

    def save(self, folder: Path, state: object, *_: object, **__: object) -> None:
        self.events.append("save")


_PARTS = (
    lambda s: s.weights,
    lambda s: s.advantages,
    lambda s: s.behavior_logprobs,
    lambda s: s.old_logprobs,
)


def sampled(table: Table, ordinal: int, sample: int, version: int) -> Trajectory:
    """Two tokens of a prompt (the first one is the group's ordinal), then four that ``table`` sampled."""
    ids = np.array([ordinal % VOCABULARY, 0, *((ordinal + sample + np.arange(4)) % VOCABULARY)], np.int32)
    mask = np.arange(len(ids)) > 1
    with torch.no_grad():
        logprobs = table.log_probabilities(ids, TEMPERATURE).numpy()
    segment = segment_of(mask, ids=ids, logprobs=logprobs, version=version)
    reward = float(sample)
    return Trajectory("t", ordinal, sample, [segment], [reward], reward, sample > 0, Outcome.USER_STOP)


def groups_of(table: Table, version: int = 0, count: int = 4) -> list[Group]:
    return [Group(i, "t", [sampled(table, i, sample, version) for sample in range(2)]) for i in range(count)]


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 1), (1, 2), (3, 2), (2, 9)])
def test_every_group_is_trained_once_an_epoch(tmp_path: Path, epochs: int, minibatches: int) -> None:
    config, table = config_of(tmp_path, epochs=epochs, minibatches=min(minibatches, 4)), Table()
    rl.learn(config, table, groups_of(table), version=0)  # type: ignore[arg-type]
    assert table.trained == dict.fromkeys(range(4), epochs)
    assert len(table.steps) == epochs * min(minibatches, 4)
    # What the schedule of the learning rate counts to is what the run takes.
    assert config.optimizer_steps == (config.trainer.steps * len(table.steps), None)


def test_the_ratio_is_to_the_policy_before_the_steps_first_update(tmp_path: Path) -> None:
    table = Table()
    found = rl.learn(config_of(tmp_path, minibatches=1), table, groups_of(table), version=0)  # type: ignore[arg-type]
    distances = [step["train/ratio_max"] for step in table.steps]
    assert distances[0] == pytest.approx(1.0, abs=1e-6)
    assert 1.0001 < distances[1] < distances[2]
    assert found["train/ratio_max"] == distances[2]
    assert found["train/tokens"] == sum(step["train/tokens"] for step in table.steps)


def test_metrics_of_updates_of_unequal_size_are_joined_by_tokens(tmp_path: Path) -> None:
    table = Table()
    groups = groups_of(table)
    for member in groups[0].trajectories:  # the first minibatch is shorter
        member.segments[0] = Segment(*(getattr(member.segments[0], name)[:3] for name in Segment.__slots__[:5]))
    found = rl.learn(config_of(tmp_path, epochs=1), table, groups, version=0)  # type: ignore[arg-type]
    first, second = table.steps
    assert (first["train/tokens"], second["train/tokens"]) == (10, 16)
    for name in ("train/logprob", "train/ppo_kl_k3", "train/pg_clipfrac_low", "train/token_mult_prob_error"):
        assert found[name] == pytest.approx((10 * first[name] + 16 * second[name]) / 26)
    assert found["train/ratio_max"] == max(first["train/ratio_max"], second["train/ratio_max"])
    assert found["train/fresh/tokens"] == 26


def test_log_probabilities_are_at_the_temperature_of_sampling(tmp_path: Path) -> None:
    table = Table()
    found = rl.learn(config_of(tmp_path), table, groups_of(table), version=0)  # type: ignore[arg-type]
    assert found["train/train_rollout_logprob_abs_diff_max"] == pytest.approx(0.0, abs=1e-6)


def test_the_critic_learns_alone_for_as_many_steps_as_it_is_given(tmp_path: Path) -> None:
    config = config_of(tmp_path, advantage="gae")
    taken = []
    for version in range(4):
        table = Table()
        rl.learn(config, table, groups_of(table), version=version)  # type: ignore[arg-type]
        assert table.value_steps == 6
        taken.append(len(table.steps))
    assert taken == [0, 0, 6, 6]
    assert config.optimizer_steps == ((3 - 2) * 6, 3 * 6)


@pytest.mark.parametrize(
    ("equal", "skipped", "updates"),
    [({0, 1, 2, 3}, 6, 0), ({0, 1}, 3, 3), ({0}, 0, 6)],
    ids=["all groups agree", "those of a minibatch", "one"],
)
@pytest.mark.parametrize("skip", [True, False], ids=["skipped", "filtered"])
def test_a_step_takes_its_places_in_the_schedule_whether_or_not_it_moves_weights(
    tmp_path: Path, equal: set[int], skipped: int, updates: int, skip: bool
) -> None:
    how: dict[str, Any] = {"skip_zero_advantage": True} if skip else {"filters": [{"kind": "range"}]}
    table, config = Table(), config_of(tmp_path, **how)
    groups = groups_of(table)
    for group in groups:
        for member in group.trajectories if group.ordinal in equal else ():
            member.reward, member.turn_rewards = 1.0, [1.0]
    rl.learn(config, table, groups, version=0)  # type: ignore[arg-type]
    if not skip and equal != {0, 1, 2, 3}:  # what is left is cut anew, into as many minibatches
        skipped, updates = 0, 6
    assert (table.skipped["policy"], len(table.steps)) == (skipped, updates)


def test_a_step_without_episodes_advances_only_what_would_have_learned(tmp_path: Path) -> None:
    for advantage, version, expected in (
        ("grpo", 0, {"policy": 6}), ("gae", 0, {"critic": 6}), ("gae", 2, {"policy": 6, "critic": 6}),
    ):  # fmt: skip
        table = Table()
        rl.learn(config_of(tmp_path, advantage=advantage), table, [], version=version)  # type: ignore[arg-type]
        assert dict(table.skipped) == expected


class Engines:
    """The rollout side: samples with the weights it was given last, and says in which order it was asked."""

    released = False
    engines_up = 1
    family = chat_family("qwen3", False)
    position: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.table = Table()
        self.version = -1

    def schedule(self, step: int, position: object) -> None:
        self.events.append("schedule")

    def update_weights(self, weights: Any, version: int) -> SyncReport:
        self.events.append(f"weights {version}")
        self.table.logits, self.version = weights, version
        return SyncReport(0, 0, 0, 0.0, 0.0, version)

    def wait_for_engines(self) -> None:
        pass

    def take(self, on_episode: object) -> RolloutBatch:
        self.events.append("take")
        groups = groups_of(self.table, self.version)
        return RolloutBatch(groups, groups, 0, Position())

    def release(self) -> None:
        self.events.append("release")

    def metrics(self) -> dict[str, float]:
        return {"engine/sampled_tokens": 32.0}


def test_a_step_is_rolled_out_trained_synchronized_and_only_then_the_next_may_start(tmp_path: Path) -> None:
    events: list[str] = []
    config, table, engines = config_of(tmp_path, epochs=1, minibatches=1), Table(events), Engines(events)
    with Run(config, table) as run:  # type: ignore[arg-type]
        rl.Training(config, table, run, engines, Preemption()).loop()  # type: ignore[arg-type]
    steps = [["take", "train", f"weights {version}", "save", "release"] for version in (1, 2, 3)]
    assert events == ["weights 0", "schedule", *(event for step in steps for event in step)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    # Every token came from the weights that its step trains: none older by its number, none by its values.
    assert [line["rollout/off_policy_level/max"] for line in lines] == [0.0] * 3
    assert [line["train/train_rollout_logprob_abs_diff_max"] for line in lines] == pytest.approx([0.0] * 3, abs=1e-6)
    assert [line["engine/sync/version"] for line in lines] == [1.0, 2.0, 3.0]
    assert torch.equal(engines.table.logits, table.logits.detach())


def test_asynchronous_engines_get_new_groups_before_the_step_is_written(tmp_path: Path) -> None:
    """No memory moves between the sync and the next step's training, so that they need not wait for a checkpoint."""
    events: list[str] = []
    config = config_of(tmp_path, epochs=1, minibatches=1, allow_off_policy=True)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_staleness": 1})})
    table, engines = Table(events), Engines(events)
    with Run(config, table) as run:  # type: ignore[arg-type]
        rl.Training(config, table, run, engines, Preemption()).loop()  # type: ignore[arg-type]
    steps = [["take", "train", f"weights {version}", "release", "save"] for version in (1, 2, 3)]
    assert events == ["weights 0", "schedule", *(event for step in steps for event in step)]


def test_a_delay_of_the_trainer_is_booked_where_it_happens(tmp_path: Path) -> None:
    """Time is a counter, and each part of a step lets its own number of seconds pass."""
    now, events = [0.0], list[str]()

    def slow(part: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return part(*args, **kwargs)

        return slowed

    config, table, engines = config_of(tmp_path, epochs=1, minibatches=1), Table(events), Engines(events)
    for who, name, seconds in (
        (engines, "take", 1.0), (table, "with_logprobs", 2.0), (table, "train_step", 4.0),
        (engines, "update_weights", 8.0), (engines, "metrics", 16.0), (table, "save", 32.0),
    ):  # fmt: skip
        setattr(who, name, slow(getattr(who, name), seconds))
    with Run(config, table) as run:  # type: ignore[arg-type]
        run.timeline = Timeline(lambda: now[0])
        rl.Training(config, table, run, engines, Preemption()).loop()  # type: ignore[arg-type]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    names = ("wait", "logprobs", "optimizer", "sync", "records", "checkpoint", "batch", "memory", "evaluate", "rest")
    booked = [[line[f"time/{name}_seconds"] for name in names] for line in lines]
    # A step's checkpoint comes after its line, so that it is in the next one.
    assert booked == [[1, 2, 4, 8, 16, saved, 0, 0, 0, 0] for saved in (0, 32, 32)]
    assert [line["time/step_seconds"] for line in lines] == [31, 63, 63]


class LostAtTheSync(Engines):
    """No engine is left for the weights of version 2."""

    def update_weights(self, weights: Any, version: int) -> SyncReport:
        if version == 2:
            raise EngineError("engine.max_restarts")
        return super().update_weights(weights, version)


def test_a_step_whose_weights_no_engine_takes_is_logged_and_saved(tmp_path: Path) -> None:
    events: list[str] = []
    config, table, engines = config_of(tmp_path, epochs=1, minibatches=1), Table(events), LostAtTheSync(events)
    run = Run(config, table)  # type: ignore[arg-type]
    with pytest.raises(EngineError), run, run.saved_on_leaving():
        rl.Training(config, table, run, engines, Preemption()).loop()  # type: ignore[arg-type]
    assert events[-6:] == ["weights 1", "save", "release", "take", "train", "save"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]


@pytest.mark.parametrize(
    ("setting", "of"),
    [
        ({"top_p": 0.9}, "softmax(logits / temperature)"),
        ({"top_k": 20}, "softmax(logits / temperature)"),
        ({"min_p": 0.05}, "softmax(logits / temperature)"),
        ({"presence_penalty": 0.5}, "softmax((logits - penalties) / temperature)"),
        ({"frequency_penalty": -0.5}, "softmax((logits - penalties) / temperature)"),
    ],
)
def test_sampling_that_the_trainer_does_not_reproduce_is_refused_unless_it_is_meant(
    setting: dict[str, float], of: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ((name, value),), config = setting.items(), config_of(tmp_path)
    rl.check_sampling(config.rollout)
    refused = config.model_copy(update={"rollout": RolloutConfig(**setting)})
    with pytest.raises(
        ConfigError, match=rf"^rollout\.{name} {value:g}: .*set rollout\.allow_truncated_sampling to true"
    ) as error:
        rl.train(refused)
    assert f"log-probabilities are of {of}." in str(error.value)
    rl.check_sampling(RolloutConfig(**setting, allow_truncated_sampling=True))
    assert f"rollout.{name} {value:g}" in caplog.text
    assert RolloutConfig(**setting).sampling(0.7) == {"temperature": 0.7, **setting, "logprobs_of": of}
