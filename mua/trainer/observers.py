"""What looks at a step once it is trained: records, metrics, alarms and hooks. The loop knows none of them.

    synced(version, metrics)         the engines have the weights
    evaluated(version, metrics)      held-out figures of the policy
    stepped(done)                    all of a step; an observer adds its own figures to ``done.metrics``

They are called in order, so that an observer sees the figures of those before it.

The record of the run is one of them (:class:`RunRecord`). A step is written in one transaction: its row, the groups it
took, and what its loss read of every segment. A checkpoint gets its name only when all steps before it are in the
store. So a run that is killed anywhere has a store with every step of its newest checkpoint, and perhaps some after it;
the next start counts these as lost (:func:`mua.store.queries.lost_step`) and makes them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig
from mua.observe.diagnosis.verdict import Alarms
from mua.observe.metrics_log import METRICS_FILE, read_metrics, without_evaluation
from mua.observe.provenance import provenance
from mua.observe.timeline import Timeline, TrainerPhase, episode_metrics, overlap_efficiency, trainer_metrics
from mua.rollout.runner import UnscoredEpisodes, too_few_scored
from mua.rollout.service import RolloutService
from mua.store.blobs import pack_arrays
from mua.store.retention import pruning
from mua.store.tables import steps, tasks, uses, versions
from mua.store.traces import trace_file, write_traces
from mua.store.writer import Insert, Update, Write
from mua.trainer.control_tokens import control_token_metrics
from mua.trainer.evaluation.store import recording
from mua.trainer.memory_phases import Phases
from mua.types import Float32Array, Group, Json, TrainBatch, TrainSequence, Trajectory
from mua.utils.hooks import call_hook, check_number, wrong_result

log = logging.getLogger(__name__)
_SHOWN = {"reward": "rollout/reward/mean", "success": "rollout/success"}
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
        words = [f"{name} {self.metrics[key]:.3f}" for name, key in _SHOWN.items() if key in self.metrics]
        if (failed := too_few_scored(self.trajectories, 1.0)) is not None:
            lost = f"{failed.unscored} of {failed.total} episodes failed, most as {failed.outcome}"
            words.append(lost + (", trained on nothing" if self.few is not None else ""))
        return ", ".join(words)


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
        self._traces = config.output / "traces" if config.writes_traces else None

    def write_traces(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Also of a step that stops the run, to be looked into."""
        if self._traces is not None:
            write_traces(trace_file(self._traces, step), trajectories)

    def stepped(self, done: DoneStep) -> None:
        """See :class:`Observer`."""
        with self._timeline.phase(TrainerPhase.RECORDS):
            self.write_traces(done.step, done.trajectories)
            done.metrics |= rollout_metrics(done.groups, divide_by_std=self._divide_by_std, version=done.step)
            segments = [segment for trajectory in done.trajectories for segment in trajectory.segments]
            streams = ((segment.ids, segment.logprobs, segment.loss_mask) for segment in segments)
            done.metrics |= control_token_metrics("rollout", self._rollouts.family, streams)
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
            "time/trained_tokens_per_second": done.metrics["train/tokens"] / step,
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


LOSS_ARRAYS = (
    "weights", "advantages", "old_logprobs", "reference_logprobs", "values", "returns",
)  # fmt: skip
"""Of what the loss read of a segment, what is not the segment's own."""
DIGESTS_OF = {"policy": "gradients", "critic": "critic_gradients"}
"""Where ``steps.details`` has the digests of a network's gradients, one an optimizer step."""

OWN_LOGPROBS = "update_logprobs"
"""The trainer's own log-probabilities, as the update found them; where they were not computed before it."""


class RunRecord(Observer):
    """One start of a run in its store. Use as a context manager."""

    def __init__(self, config: ExperimentConfig, from_step: int, changes: Sequence[str] = ()) -> None:
        """``from_step`` is the next step to take: what an earlier start wrote of it and later ones is lost. ``changes``
        to the configuration since then stand in the details of the first step."""
        self._config, self._changes = config, [f"since step {from_step}: {change}" for change in changes]
        made = provenance(config)
        del made["config"]  # which stands in a column of its own
        self._open = recording(config, made, from_step=from_step)
        recorder = self._open.__enter__()
        assert recorder is not None, "the configuration wants a store"
        self.recorder, self.writer, self.run, self.part = recorder, recorder.writer, recorder.run_id, recorder.part
        self._figures: dict[str, float] = {}
        self._of_versions: dict[int, dict[str, float]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def synced(self, version: int, metrics: Mapping[str, float]) -> None:
        """The engines have the policy ``version``."""
        row = {"run_id": self.run, "version": version, "part": self.part, "synced_at": time.time()}
        self._of_versions[version] = dict(metrics)
        self.writer.put([Insert(versions, [row | {"metrics": dict(metrics)}], "replace")])

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Held-out figures of the policy ``version``, which the engines have had in this start of the run."""
        self._of_versions[version] = known = self._of_versions.get(version, {}) | dict(metrics)
        where = {"run_id": self.run, "version": version, "part": self.part}
        self.writer.put([Update(versions, where, {"metrics": dict(known)})])

    def stepped(self, done: DoneStep) -> None:
        """The step is done; adds what writing took, under ``rollout/store/``."""
        step, groups, usable, learned, metrics = done.step, done.groups, done.usable, done.learned, done.metrics
        of = {(g.ordinal, t.sample): self.recorder.key(g.ordinal, t.sample).trajectory_id
              for g in groups for t in g.trajectories}  # fmt: skip
        chosen = {group.ordinal for group in usable}
        m = self._config.megatron
        details = {
            "groups": [
                [g.ordinal, g.task_id, [of[g.ordinal, t.sample] for t in g.trajectories], g.ordinal in chosen]
                for g in groups
            ],
            "updates": [batch.denominators for batch in learned.batches],
            "layout": (  # which the bits of a gradient depend on
                f"tp{m.tensor_parallel} pp{m.pipeline_parallel} cp{m.context_parallel} ep{m.expert_parallel} "
                f"world{m.world_size}"
            ),
        }  # fmt: skip
        if self._changes:
            details["changes"], self._changes = self._changes, []
        details |= {DIGESTS_OF[network]: digests for network, digests in learned.digests.items()}
        row = {
            "run_id": self.run, "step": step, "part": self.part, "state": "done", "version": step,
            "metrics": without_evaluation(metrics),
            "denominators": learned.batches[0].denominators if learned.batches else {},
            "gradient": next(iter(learned.digests.get("policy", [])), None), "details": details,
            "started_at": done.began, "ended_at": time.time(),
        }  # fmt: skip
        lengths = {
            (g.ordinal, t.sample, number): len(segment)
            for g in groups for t in g.trajectories for number, segment in enumerate(t.segments)
        }  # fmt: skip

        def made() -> list[Write]:
            taken: list[Write] = [
                Update(tasks, {"run_id": self.run, "round": 0, "ordinal": group.ordinal},
                       {"state": "taken", "taken_step": step})
                for group in groups
            ]  # fmt: skip
            rows = []
            for epoch in range(learned.epochs):
                for minibatch, (batch, logprobs) in enumerate(learned.read()):
                    for position, (sequence, own) in enumerate(zip(batch, logprobs, strict=True)):
                        assert sequence.origin is not None, "sequences of trajectories say where they come from"
                        ordinal, sample, number = sequence.origin
                        arrays = None if epoch else pack_arrays(read_by_loss(sequence, lengths[sequence.origin], own))
                        rows.append({
                            "run_id": self.run, "step": step, "part": self.part, "epoch": epoch,
                            "trajectory_id": of[ordinal, sample], "segment": number, "minibatch": minibatch,
                            "position": position, "source": None, "tokens": int(sequence.trained.sum()),
                            "arrays": arrays,
                        })  # fmt: skip
            return [Insert(steps, [row]), *([Insert(uses, rows)] if rows else []), *taken]

        size = sum(4 * len(LOSS_ARRAYS) * len(s) for batch in learned.batches for s in batch)
        self.writer.put(made, size + 4096)
        # What writing took since the step before: CPU of the writer's thread, what others waited for room in its queue.
        spent, before = self.writer.figures, self._figures
        self._figures = {
            "rollout/store/cpu_seconds": spent.cpu_seconds, "rollout/store/waited_seconds": spent.blocked_seconds,
            "rollout/store/bytes": float(spent.bytes), "rollout/store/rows": float(spent.rows),
        }  # fmt: skip
        metrics |= {name: value - before.get(name, 0.0) for name, value in self._figures.items()}

    def before_checkpoint(self) -> None:
        """Everything so far is in the store. Raises where it does not come there in ``store.flush_seconds``."""
        self.writer.flush(self._config.store.flush_seconds)

    def after_checkpoint(self, step: int, folder: Path) -> None:
        """The state after ``step`` is in ``folder``."""
        where = {"run_id": self.run, "version": step + 1, "part": self.part}
        writes: list[Write] = [Update(versions, where, {"checkpoint": folder.name})]
        self.writer.put([*writes, *pruning(self.run, self._config.store, self._config.output)])


def read_by_loss(sequence: TrainSequence, length: int, own: Float32Array | None = None) -> Json:
    """What the loss read of a segment of ``length`` tokens: 0 after its last trained token. ``own`` are the
    log-probabilities that it computed itself."""
    found: dict[str, Any] = {}
    for name in (*LOSS_ARRAYS, OWN_LOGPROBS):
        array = own if name == OWN_LOGPROBS else getattr(sequence, name)
        if array is None or (name == "old_logprobs" and array is sequence.behavior_logprobs):
            continue
        whole = np.zeros(length, np.float32)
        whole[: len(array)] = np.where(sequence.trained, array, 0.0) if name != "weights" else array
        found[name] = whole
    return found
