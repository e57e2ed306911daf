"""What looks at a step once it is trained: records, metrics, alarms and hooks. The loop knows none of them.

    synced(version, metrics)         the engines have the weights
    evaluated(version, metrics)      held-out figures of the policy
    stepped(done)                    all of a step; an observer adds its own figures to ``done.metrics``

They are called in order, so that an observer sees the figures of those before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.observe.diagnosis.verdict import Alarms
from mua.observe.metrics_log import METRICS_FILE, read_metrics
from mua.observe.timeline import Timeline, TrainerPhase, episode_metrics, overlap_efficiency, trainer_metrics
from mua.rollout.scored import UnscoredEpisodes, unscored_among
from mua.rollout.service import RolloutService
from mua.store.traces import TraceWriter
from mua.trainer.memory_phases import Phases
from mua.types import Float32Array, Group, TrainBatch, Trajectory
from mua.utils.hooks import call_hook, check_number, wrong_result

log = logging.getLogger(__name__)
_SHOWN = {"reward": "reward/mean", "success": "reward/success"}
"""What the line of progress shows of a step's metrics."""


class Learned:
    """What the optimizer steps of one step read; :func:`mua.trainer.rl.learn` fills it in."""

    def __init__(self, *, keeps_logprobs: bool = False) -> None:
        """``keeps_logprobs``: whether somebody wants the log-probabilities that losses computed themselves."""
        self.keeps_logprobs = keeps_logprobs
        self.batches: list[TrainBatch] = []
        self.logprobs: list[list[Float32Array] | None] = []
        """Of each batch's first update, of each sequence float32 ``[T]``; None where they were there before."""
        self.epochs = 0
        self.digests: dict[str, list[str]] = {}
        """Of the gradients of each network's optimizer steps; none where they are not watched."""

    def read(self) -> Iterator[tuple[TrainBatch, Sequence[Float32Array | None]]]:
        """Each batch with the log-probabilities of its sequences."""
        for batch, logprobs in zip(self.batches, self.logprobs or [None] * len(self.batches), strict=True):
            yield batch, logprobs or [None] * len(batch.sequences)


@dataclass
class DoneStep:
    """One step of the loop, filled in as it goes on."""

    step: int
    groups: Sequence[Group]
    """All that were rolled out for it."""
    usable: Sequence[Group]
    """Those of them that were to train."""
    few: UnscoredEpisodes | None
    """What was wrong where too few episodes could be scored to train on any."""
    learned: Learned
    began: float = field(default_factory=time.time)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of all groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    @property
    def note(self) -> str:
        """What the line of progress says. Without a scored episode there is no reward, and none is shown."""
        return progress_note(self.metrics, self.groups, self.few)


class Observer:
    """Looks at what the loop does; does nothing by itself."""

    def synced(self, version: int, metrics: Mapping[str, float]) -> None:
        """The engines have the policy ``version``."""

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Held-out figures of the policy ``version``."""

    def stepped(self, done: DoneStep) -> None:
        """A step is done but for its log line and its checkpoint."""


class RolloutObserver(Observer):
    """Traces of the episodes, and figures of episodes, engines and memory."""

    def __init__(self, config: ExperimentConfig, rollouts: RolloutService, phases: Phases, timeline: Timeline) -> None:
        self._divide_by_std = config.algorithm.divide_by_std
        self._rollouts, self._phases, self._timeline = rollouts, phases, timeline
        self._traces = TraceWriter(config.output / "traces") if config.writes_traces else None

    def write_traces(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Also of a step that stops the run, to be looked into."""
        if self._traces is not None:
            self._traces.write(step, trajectories)

    def stepped(self, done: DoneStep) -> None:
        """See :class:`Observer`."""
        with self._timeline.phase(TrainerPhase.RECORDS):
            self.write_traces(done.step, done.trajectories)
            done.metrics |= rollout_metrics(done.groups, divide_by_std=self._divide_by_std, version=done.step)
            done.metrics |= episode_metrics(done.groups) | self._rollouts.metrics() | self._phases.take()


class SpeedObserver(Observer):
    """Where the time since the last step went, and how many tokens were sampled and trained in it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def stepped(self, done: DoneStep) -> None:
        """See :class:`Observer`."""
        seconds = self._timeline.take()
        step = sum(seconds.values())
        generating = done.metrics.get("time/engine_generating_seconds", 0.0)
        done.metrics |= trainer_metrics(seconds) | {
            "time/overlap_efficiency": overlap_efficiency(seconds, generating),
            "time/step_seconds": step,
            "time/sampled_tokens_per_second": done.metrics["engine/sampled_tokens"] / step,
            "time/trained_tokens_per_second": done.metrics["policy/tokens"] / step,
        }


class AlarmObserver(Observer):
    """Warns of what the metrics show to be wrong."""

    def __init__(self, config: ExperimentConfig) -> None:
        path = config.output / METRICS_FILE
        before = list(read_metrics(path)) if path.exists() else []
        self._alarms = Alarms(yaml.safe_load(dump_config(config)), before)

    def stepped(self, done: DoneStep) -> None:
        """See :class:`Observer`."""
        for alarm in self._alarms.look(done.step, done.metrics):
            log.warning("alarm after step %d: %s", done.step, alarm)


class HookObserver(Observer):
    """The hook ``trainer.after_step``."""

    def __init__(self, path: str) -> None:
        self._path = path

    def stepped(self, done: DoneStep) -> None:
        """See :class:`Observer`. Raises :class:`mua.utils.errors.MuaError` for what are no new metrics."""
        key, path = "trainer.after_step", self._path
        found = call_hook(key, path, done.step, dict(done.metrics), list(done.groups))
        if found is None:
            return
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise wrong_result(key, path, f"gave {type(found).__name__}")
        if taken := sorted(found.keys() & done.metrics.keys()):
            raise wrong_result(key, path, f"gave {taken[0]!r}, which is a metric already")
        done.metrics |= {name: check_number(key, path, value) for name, value in found.items()}


def progress_note(metrics: Mapping[str, float], groups: Sequence[Group], few: UnscoredEpisodes | None) -> str:
    """See :attr:`DoneStep.note`."""
    words = [f"{name} {metrics[key]:.3f}" for name, key in _SHOWN.items() if key in metrics]
    if (failed := unscored_among([t for group in groups for t in group.trajectories])) is not None:
        words.append(failed.note() + (", trained on nothing" if few is not None else ""))
    return ", ".join(words)
