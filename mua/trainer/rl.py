"""Reinforcement learning: tasks become episodes, groups, batches, steps and new weights.

    task ──► slots ──► episodes ──► groups ──► batch ──► optimizer steps ──► weights
    stream   of bounded   samples     graded    with      of the critic        │
      ▲      staleness    of a task   together  losses    and the policy       │ sync, one version on
      │                                                                        ▼
      └── a slot comes free when the engines have the weights ◄──────────── engines, which are evaluated
          that were trained on its group                                   where it is due

``trainer.max_staleness`` 0 is synchronous training; above it the same loop trains while the next groups roll out
(see :mod:`mua.rollout.scheduler`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import yaml

from mua.algorithms.batch import adjusted, make_batches, split_minibatches
from mua.algorithms.filters import filtered, shuffled
from mua.algorithms.gae import with_gae
from mua.algorithms.losses import PolicyLoss, ValueLoss
from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.load import dump_config
from mua.config.schema import ExperimentConfig, RolloutConfig
from mua.engine.allocator import refuse_expandable_segments
from mua.engine.placement import check_trainer_machine, local_ranks, visible_gpus
from mua.environment.protocol import Split
from mua.observe.diagnosis.alarms import Alarms
from mua.observe.metrics_log import METRICS_FILE, read_metrics
from mua.observe.timeline import Timeline, TrainerPhase, episode_metrics, overlap_efficiency, trainer_metrics
from mua.rollout.runner import without_gc_pauses
from mua.rollout.scheduler import RolloutBatch
from mua.rollout.scored import UnscoredEpisodes, too_few_scored, unscored_among
from mua.rollout.service import RolloutService
from mua.store.traces import TraceWriter
from mua.trainer.evaluation.evaluator import evaluate_in_training
from mua.trainer.learner import Learner
from mua.trainer.memory_phases import Phases
from mua.trainer.preempt import Preemption
from mua.trainer.rank_processes import become_rank, check_ranks, leads
from mua.trainer.run_folder import Run
from mua.trainer.run_record import Learned, RunRecord
from mua.types import Group, TrainBatch
from mua.utils.errors import ConfigError, EngineError, MuaError, Preempted, RunStopped

_SHOWN = {"reward": "reward/mean", "success": "reward/success"}
"""What the line of progress shows of a step's metrics."""

log = logging.getLogger(__name__)


def train(config: ExperimentConfig, preemption: Preemption | None = None) -> None:
    """Train the policy of ``config`` and leave its Hugging Face folder in ``<output>/hf``.

    Raises :class:`Preempted` on every rank when ``preemption`` is requested before the last step is done; the same
    call continues the run.
    """
    preemption = preemption or Preemption()
    check_reproduced(config.rollout)
    refuse_expandable_segments(config.engine)
    become_rank(config)
    check_trainer_machine(config, local_ranks(), visible_gpus())
    algorithm = config.algorithm
    if leads() and config.placement == "separate" and not config.trainer.max_staleness:
        log.warning(
            "placement separate with trainer.max_staleness 0: trainer and engines take turns, so that the GPUs of one "
            "side always wait; set it to 1 or more, or placement to colocated"
        )
    older = config.trainer.max_staleness + algorithm.refill.carry_versions
    if leads() and older and not algorithm.sees_sampler:
        log.warning("algorithm.uncorrected: what older policies sampled is trained on as if it were the policy's own")
    total, critic = optimizer_steps(config)
    learner = Learner(config, total_steps=total, with_reference=algorithm.kl_coefficient > 0, critic_steps=critic)
    if not leads():
        learner.follow()
        preemption.check()
        return
    with learner, Run(config, learner) as run, recorded(config, run) as record:
        if config.trainer.deterministic and record is not None:
            learner.watch_gradients()
        if config.megatron.offload:
            learner.offload()  # engines take for their cache what is free when they start
        else:
            learner.give_back()

        def interrupt() -> None:
            preemption.check()
            check_ranks()

        hosts = learner.engine_hosts()
        with run.saved_on_leaving():
            recorder = None if record is None else record.recorder
            with (
                RolloutService(config, interrupt, hosts=hosts, teacher=True, recorder=recorder) as rollouts,
                without_gc_pauses(),
            ):
                Training(config, learner, run, rollouts, preemption, record).loop()
            run.export(run.handed_over()[0])  # the engines have left, and their memory is free


@contextmanager
def recorded(config: ExperimentConfig, run: Run) -> Iterator[RunRecord | None]:
    """The store's record of this start of ``run``; None where the configuration wants no store."""
    if not config.store.enabled:
        yield None
        return
    with RunRecord(config, run.step) as record:
        run.store = record
        yield record


def check_reproduced(rollout: RolloutConfig) -> None:
    """Raises :class:`ConfigError` where the policy samples from another distribution than the trainer computes, unless
    ``rollout.unreproduced`` allows it; then it is logged."""
    if not (what := rollout.other_distribution):
        return
    if not rollout.unreproduced:
        raise ConfigError(
            f"{what}. Switch it off for training (mua eval may have it), or set rollout.unreproduced to true; "
            "docs/algorithms.md says what becomes of the ratios"
        )
    log.warning("%s (rollout.unreproduced)", what)


def optimizer_steps(config: ExperimentConfig) -> tuple[int, int | None]:
    """Of the policy in the run, and of the critic, if there is one."""
    return config.optimizer_steps


class Training:
    """One run: the loop, and the parts of a step in their order."""

    def __init__(
        self,
        config: ExperimentConfig,
        learner: Learner,
        run: Run,
        rollouts: RolloutService,
        preemption: Preemption,
        record: RunRecord | None = None,
    ) -> None:
        self._record_of_run = record
        self._config, self._learner, self._run, self._rollouts = config, learner, run, rollouts
        self._preemption = preemption
        self._phases = Phases(config, learner, rollouts, run.timeline)
        self._traces = TraceWriter(config.output / "traces") if config.writes_traces else None
        path = config.output / METRICS_FILE
        self._alarms = Alarms(yaml.safe_load(dump_config(config)), list(read_metrics(path)) if path.exists() else [])

    def loop(self) -> None:
        """The run from its next step to its end, or to the safe point after it was asked to leave."""
        config, run, rollouts = self._config, self._run, self._rollouts
        self._begin()
        with run.progress.stage("train", total=config.trainer.steps - run.step) as progress:
            for step in range(run.step, config.trainer.steps):
                self._preemption.check()
                began, learned = time.time(), Learned(keeps_logprobs=self._record_of_run is not None)
                rollout_batch, few = self._roll_out(step)
                with self._phases.training():
                    usable = [] if few is not None else rollout_batch.usable
                    metrics = learn(config, self._learner, usable, version=step, timeline=run.timeline, learned=learned)
                evaluates = config.trainer.evaluate_every > 0 and run.due(config.trainer.evaluate_every, step)
                best, leaving = self._sync_and_evaluate(step, metrics, evaluates)
                metrics |= self._record(step, rollout_batch.groups)
                if self._record_of_run is not None:
                    self._record_of_run.stepped(step, rollout_batch.groups, usable, learned, began, metrics)
                metrics |= self._speed(metrics)
                if self._record_of_run is not None:
                    metrics |= self._record_of_run.metrics()
                for alarm in self._alarms.look(step, metrics):
                    log.warning("alarm after step %d: %s", step, alarm)
                run.position = rollouts.position
                # A step counts as done once its checkpoint is there; what it leaves behind must be there before.
                if leaving is not None and evaluates:
                    run.completed(step, unlogged=metrics)
                else:
                    run.log(step, metrics)
                run.log_episodes(step, rollout_batch.groups)
                if leaving is not None:
                    self._preemption.check()
                    raise leaving
                if run.learned and (best or run.due(config.trainer.save_every, step)):
                    with self._phases.saving():
                        run.save(step)
                if not config.trainer.max_staleness:
                    rollouts.release()
                progress.advance(note=progress_note(metrics, rollout_batch.groups, few))
        self._hand_over()

    def _begin(self) -> None:
        """The engines have the weights, the first groups roll out; what the policy reaches before the first step.

        The evaluation that the run before this one owed its last step is made up for.
        """
        config, run = self._config, self._run
        synced = self._phases.sync(run.step)
        if self._record_of_run is not None:
            self._record_of_run.synced(run.step, synced.metrics())
        if run.unlogged is not None:
            late = run.unlogged | self._evaluate(run.step)
            run.evaluated(run.step - 1, late)
            run.log(run.step - 1, late)
        found: dict[str, float] = {}
        if run.step == 0 and config.trainer.evaluate_first:
            found |= self._evaluate(0)
        if run.step == 0 and (split := config.evaluation.report_split) is not None:
            own = found if found and split == config.evaluation.split else self._evaluate(0, split)
            run.report.first(own)
            found |= own
        if found:
            run.log_evaluation(0, found)
        self._rollouts.schedule(run.step, run.position)
        run.timeline.take()  # what went before the first step is no part of it

    def _roll_out(self, step: int) -> tuple[RolloutBatch, UnscoredEpisodes | None]:
        """The episodes of ``step``, and what was wrong where too few could be scored to train on them.

        Traces of a step that stops the run are written, to be looked into.
        """
        run, algorithm = self._run, self._config.algorithm
        expected = None if algorithm.refill.on else algorithm.groups_per_step * algorithm.group_size
        with run.progress.stage(f"episodes of step {step}", total=expected) as progress:
            try:
                with run.timeline.phase(TrainerPhase.WAIT):
                    rollout_batch = self._rollouts.take(on_episode=progress.advance)
            except MuaError:
                self._preemption.check()  # the signal that asks to leave may have ended the engines before
                raise
        ended = [t for group in rollout_batch.groups for t in group.trajectories]
        few = too_few_scored(ended, self._config.trainer.min_scored_share)
        try:
            run.scored(step, few)
        except RunStopped:
            if self._traces is not None:
                self._traces.write(step, ended)
            self._preemption.check()
            raise
        return rollout_batch, few

    def _sync_and_evaluate(
        self, step: int, metrics: dict[str, float], evaluates: bool
    ) -> tuple[bool, Preempted | EngineError | RunStopped | None]:
        """Give the engines the weights of ``step``, evaluate them where that is due, and add both to ``metrics``.

        Whether no policy was better before, and what ends the run, if anything does, once the step is recorded.
        """
        try:
            if not self._preemption.requested:  # the same signal may have ended the engines
                synced = self._phases.sync(step + 1).metrics()
                metrics |= synced
                if self._record_of_run is not None:
                    self._record_of_run.synced(step + 1, synced)
                if self._config.trainer.max_staleness:  # no memory moves: engines work while the trainer writes
                    self._rollouts.release()
            if evaluates:
                self._preemption.check()
                metrics |= self._evaluate(step + 1)
                return self._run.evaluated(step, metrics), None
        except (Preempted, EngineError, RunStopped) as error:
            return False, error
        return False, None

    def _record(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Write the step's traces; metrics of its episodes and engines."""
        with self._run.timeline.phase(TrainerPhase.RECORDS):
            if self._traces is not None:
                self._traces.write(step, (t for group in groups for t in group.trajectories))
            of_episodes = rollout_metrics(groups, divide_by_std=self._config.algorithm.divide_by_std, version=step)
            return of_episodes | episode_metrics(groups) | self._rollouts.metrics() | self._phases.take()

    def _speed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Where the time since the last call went, and how many tokens were made and used in it."""
        seconds = self._run.timeline.take()
        step = sum(seconds.values())
        generating = metrics.get("time/engine_generating_seconds", 0.0)
        return trainer_metrics(seconds) | {
            "time/overlap_efficiency": overlap_efficiency(seconds, generating),
            "time/step_seconds": step,
            "time/sampled_tokens_per_second": metrics["engine/sampled_tokens"] / step,
            "time/trained_tokens_per_second": metrics["policy/tokens"] / step,
        }

    def _evaluate(self, step: int, split: Split | None = None) -> dict[str, float]:
        """Metrics of the policy after ``step`` steps on ``split``, by default that of the configuration."""
        split = split or self._config.evaluation.split
        with self._run.timeline.phase(TrainerPhase.EVALUATE):
            found = evaluate_in_training(self._config, self._rollouts, self._run.progress, split, step)
        if self._record_of_run is not None:
            self._record_of_run.evaluated(step, found)
        return found

    def _hand_over(self) -> None:
        """Have the learner have the policy that ``trainer.export`` chooses, and report on it."""
        step, folder = self._run.handed_over()
        if folder is not None:
            with self._phases.beside_engines():
                self._learner.load(folder)
            log.info("handing over the policy of %s", folder)
        if (split := self._config.evaluation.report_split) is None:
            return
        if folder is not None:
            self._phases.sync(self._config.trainer.steps + 1)
        found = self._evaluate(step, split)
        self._run.log_evaluation(step, found)
        self._run.report.final(step, found)


def progress_note(metrics: Mapping[str, float], groups: Sequence[Group], few: UnscoredEpisodes | None) -> str:
    """What the line of progress says of a step. Without a scored episode there is no reward, and none is shown."""
    words = [f"{name} {metrics[key]:.3f}" for name, key in _SHOWN.items() if key in metrics]
    if (failed := unscored_among([t for group in groups for t in group.trajectories])) is not None:
        words.append(failed.note() + (", trained on nothing" if few is not None else ""))
    return ", ".join(words)


def learn(
    config: ExperimentConfig,
    learner: Learner,
    groups: Sequence[Group],
    *,
    version: int,
    timeline: Timeline | None = None,
    learned: Learned | None = None,
) -> dict[str, float]:
    """All optimizer steps on one batch of groups; their metrics, averaged over the steps.

    ``version`` is the policy's before them. ``timeline`` gets the phases, ``learned`` what the losses read.
    """
    timeline = timeline or Timeline()
    learned = learned or Learned()
    with timeline.phase(TrainerPhase.BATCH):
        metrics = _learn(config, learner, groups, version, timeline, learned)
        learned.digests = learner.gradient_digests() if learned.batches and learner.watches_gradients else {}
        return metrics


def _learn(
    config: ExperimentConfig,
    learner: Learner,
    groups: Sequence[Group],
    version: int,
    timeline: Timeline,
    learned: Learned,
) -> dict[str, float]:
    algorithm = config.algorithm
    if algorithm.shuffle_rewards:
        groups = shuffled(groups, version)
    groups, found = filtered(groups, algorithm)
    parts = split_minibatches(groups, min(algorithm.minibatches, len(groups))) if groups else []
    made = make_batches(parts, algorithm, config.rollout.temperature)
    with timeline.phase(TrainerPhase.LOGPROBS):
        batches = [learner.with_logprobs(batch, old=algorithm.recomputes) for batch in made if batch.sequences]
        if algorithm.advantage == "gae":
            batches = [learner.with_values(batch) for batch in batches]
    if algorithm.advantage == "gae":
        batches, of_values = with_gae(batches, algorithm)
        found |= of_values
    done = [adjusted(batch, algorithm, version) for batch in batches]
    found |= _mean([metrics for _, metrics in done])
    batches = [batch for batch, _ in done if batch.sequences]
    if not batches:  # every group agreed with itself or was filtered out: nothing pulls the policy anywhere
        return {"policy/tokens": 0.0} | found
    learned.batches, learned.epochs = batches, algorithm.epochs
    steps = []
    trains = algorithm.advantage != "gae" or version >= config.critic.warmup_steps
    keeps = learned.keeps_logprobs and trains and not algorithm.recomputes
    with timeline.phase(TrainerPhase.OPTIMIZER):
        for epoch in range(algorithm.epochs):
            for batch in batches:
                keep = keeps and epoch == 0
                steps.append(_update(config, learner, batch, version, keep))
                if epoch == 0:
                    learned.logprobs.append(learner.kept_logprobs if keep else None)
    return _mean(steps) | found


def _update(
    config: ExperimentConfig, learner: Learner, batch: TrainBatch, version: int, keep: bool
) -> dict[str, float]:
    """One optimizer step of the critic, if there is one, and of the policy, unless the critic still learns alone."""
    metrics = {"policy/tokens": batch.denominators["tokens"]}
    if config.algorithm.advantage == "gae":
        metrics |= learner.train_values(batch, ValueLoss(config.critic.value_clip))
        if version < config.critic.warmup_steps:
            return metrics
    return metrics | learner.train_step(batch, PolicyLoss.from_config(config.algorithm), keep=keep)


def _mean(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each metric's mean over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def check_sync(config: ExperimentConfig) -> dict[str, float]:
    """Sync the trainer's weights into the engines and prove tensor by tensor that they arrived.

    Raises :class:`EngineError` naming the tensors that differ.
    """
    refuse_expandable_segments(config.engine)
    become_rank(config)
    check_trainer_machine(config, local_ranks(), visible_gpus())
    learner = Learner(config, total_steps=config.trainer.steps)
    if not leads():
        learner.follow()
        return {}
    with learner, RolloutService(config, hosts=learner.engine_hosts()) as rollouts:
        synced = rollouts.update_weights(learner.weights(), version=1)
        different = rollouts.verify_weights(learner.weights())
    if different:
        shown = ", ".join(different[:8]) + (f" and {len(different) - 8} more" if len(different) > 8 else "")
        raise EngineError(
            f"the engine's weights differ from the trainer's in {len(different)} tensors: {shown}", passing=False
        )
    print(
        f"sync: {synced.tensors} tensors, {synced.bytes} bytes in {synced.buckets} buckets and {synced.seconds:.2f} s; "
        "every tensor in every engine equals the trainer's"
    )
    return {"tensors": synced.tensors, "bytes": synced.bytes, "buckets": synced.buckets, "seconds": synced.seconds}
