"""Reinforcement learning: tasks become episodes, groups, batches, steps and new weights.

    task ──► slots ──► episodes ──► groups ──► batch ──► optimizer steps ──► weights
    stream   of bounded   samples     graded    with      of the critic        │
      ▲      staleness    of a task   together  losses    and the policy       │ sync, one version on
      │                                                                        ▼
      └── a slot comes free when the engines have the weights ◄──────────── engines, which are evaluated
          that were trained on its group                                   where it is due

``trainer.max_staleness`` 0 is synchronous training; above it the same loop trains while the next groups roll out
(see :mod:`mua.rollout.runner`).

The walk of a token from the engine to the loss, file by file; :mod:`mua.algorithms.batch` draws its second half::

    1  engine/sglang_client.py   ids and log-probabilities of one turn      Generation
    2  engine/pool.py            from the engine that was picked
    3  rollout/agent.py          the policy's turn in an episode            TokenPolicy
    4  tokens/conversation.py    joined with what others wrote              Segment
    5  rollout/episode.py        the whole conversation and its reward      EpisodeResult
    6  rollout/runner.py         after retries; groups that are fresh       Trajectory, Group, RolloutBatch
    7  rollout/service.py        handed to this loop
    8  trainer/rl.py             cut into minibatches
    9  algorithms/batch.py       filtered, with weights and advantages      TrainBatch
    10 to 15                     planned, packed, sent to ranks, scored     LossTerms
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext

from mua.algorithms.batch import adjust_batch, filter_groups, make_batches, shuffle_rewards, split_minibatches
from mua.algorithms.gae import estimate_advantages
from mua.algorithms.losses import PolicyLoss, ValueLoss
from mua.config.schema import ExperimentConfig, RolloutConfig
from mua.engine.cluster import check_trainer_machine, local_ranks, visible_gpus
from mua.engine.server import refuse_expandable_segments
from mua.environment.protocol import Split
from mua.observe.catalog import join_updates
from mua.observe.timeline import Timeline, TrainerPhase
from mua.rollout.runner import too_few_scored, without_gc_pauses
from mua.rollout.service import RolloutService
from mua.trainer.control_tokens import report_untrained
from mua.trainer.evaluation.evaluator import evaluate_in_training
from mua.trainer.learner import Learner
from mua.trainer.memory_phases import Phases
from mua.trainer.observers import (
    AlarmObserver,
    DoneStep,
    HookObserver,
    Learned,
    Observer,
    RolloutObserver,
    RunRecord,
    SpeedObserver,
)
from mua.trainer.preempt import Preemption
from mua.trainer.ranks import check_ranks, init_distributed, is_rank0
from mua.trainer.run_folder import Run
from mua.types import Group, TrainBatch
from mua.utils.errors import ConfigError, EngineError, MuaError, Preempted, RunStopped
from mua.utils.hooks import check_hooks

log = logging.getLogger(__name__)


def train(config: ExperimentConfig, preemption: Preemption = Preemption()) -> None:
    """Train the policy of ``config`` and leave its Hugging Face folder in ``<output>/hf``.

    Raises :class:`Preempted` on every rank when ``preemption`` is requested before the last step is done; the same
    call continues the run.
    """
    check_sampling(config.rollout)
    _start(config)
    algorithm = config.algorithm
    if is_rank0() and config.placement == "separate" and not config.trainer.max_staleness:
        log.warning(
            "placement separate with trainer.max_staleness 0: trainer and engines take turns, so that the GPUs of one "
            "side always wait; set it to 1 or more, or placement to colocated"
        )
    older = config.trainer.max_staleness + algorithm.refill.carry_versions
    if is_rank0() and older and not algorithm.sees_sampler:
        log.warning(
            "algorithm.allow_off_policy: what older policies sampled is trained on as if it were the policy's own"
        )
    if is_rank0() and algorithm.idle:
        log.info("algorithm: %s bound nothing: one update per batch has a ratio of 1", ", ".join(algorithm.idle))
    learner = Learner.for_rl(config)
    if not is_rank0():
        learner.worker_loop()
        preemption.check()
        return
    with (
        learner,
        Run(config, learner) as run,
        RunRecord(config, run.step, run.changes) if config.store.enabled else nullcontext() as record,
    ):
        run.store = record
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
                report_untrained(config.model, rollouts.family)
                Training(config, learner, run, rollouts, preemption, record).loop()
            run.export(run.handed_over()[0])  # the engines have left, and their memory is free


def _start(config: ExperimentConfig) -> None:
    """Every rank is there, once nothing is known that would fail later."""
    check_hooks(config)
    refuse_expandable_segments(config.engine)
    init_distributed(config)
    check_trainer_machine(config, local_ranks(), visible_gpus())


def check_sampling(rollout: RolloutConfig) -> None:
    """Raises :class:`ConfigError` where the policy samples from another distribution than the trainer computes, unless
    ``rollout.allow_truncated_sampling`` allows it; then it is logged."""
    if not (what := rollout.other_distribution):
        return
    if not rollout.allow_truncated_sampling:
        raise ConfigError(
            f"{what}. Switch it off for training (mua eval may have it), or set rollout.allow_truncated_sampling to "
            "true; docs/algorithms.md says what becomes of the ratios"
        )
    log.warning("%s (rollout.allow_truncated_sampling)", what)


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
        self._config, self._learner, self._run, self._rollouts = config, learner, run, rollouts
        self._preemption = preemption
        self._phases = Phases(config, learner, rollouts, run.timeline)
        self._episodes = RolloutObserver(config, rollouts, self._phases, run.timeline)
        self._records = [] if record is None else [record]
        hook = config.trainer.after_step
        self._observers: list[Observer] = [
            self._episodes,
            *self._records,
            SpeedObserver(run.timeline),
            *([] if hook is None else [HookObserver(hook)]),
            AlarmObserver(config),
        ]

    def loop(self) -> None:
        """The run from its next step to its end, or to the safe point after it was asked to leave."""
        config, run = self._config, self._run
        self._begin()
        with run.progress.stage("train", total=config.trainer.steps - run.step) as progress:
            for step in range(run.step, config.trainer.steps):
                self._preemption.check()
                done = self._generate(step)
                with self._phases.training():
                    done.metrics |= learn(
                        config, self._learner, done.usable, version=step, timeline=run.timeline, learned=done.learned
                    )
                best, leaving = self._sync_and_evaluate(done)
                for observer in self._observers:
                    observer.stepped(done)
                self._log(done, leaving)
                if run.learned and (best or run.due(config.trainer.save_every, step)):
                    with self._phases.saving():
                        run.save(step)
                if not config.trainer.max_staleness:
                    self._rollouts.release()
                progress.advance(note=done.note)
        self._hand_over()

    def _begin(self) -> None:
        """The engines have the weights, the first groups roll out; what the policy reaches before the first step.

        The evaluation that the run before this one owed its last step is made up for.
        """
        config, run = self._config, self._run
        self._sync(run.step)
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

    def _generate(self, step: int) -> DoneStep:
        """The episodes of ``step``, none of which train where too few could be scored.

        Traces of a step that stops the run are written, to be looked into.
        """
        run, algorithm, began = self._run, self._config.algorithm, time.time()
        expected = None if algorithm.refill.on else algorithm.groups_per_step * algorithm.group_size
        with run.progress.stage(f"episodes of step {step}", total=expected) as progress:
            try:
                with run.timeline.phase(TrainerPhase.WAIT):
                    batch = self._rollouts.take(on_episode=progress.advance)
            except MuaError:
                self._preemption.check()  # the signal that asks to leave may have ended the engines before
                raise
        few = too_few_scored([t for g in batch.groups for t in g.trajectories], self._config.trainer.min_scored_share)
        learned = Learned(keeps_logprobs=bool(self._records))
        done = DoneStep(step, batch.groups, [] if few is not None else batch.usable, few, learned, began)
        try:
            run.scored(step, few)
        except RunStopped:
            self._episodes.write_traces(step, done.trajectories)
            self._preemption.check()
            raise
        return done

    def _sync(self, version: int) -> dict[str, float]:
        """Give the engines the learner's weights."""
        found = self._phases.sync(version).metrics()
        for observer in self._observers:
            observer.synced(version, found)
        return found

    def _sync_and_evaluate(self, done: DoneStep) -> tuple[bool, Preempted | EngineError | RunStopped | None]:
        """Give the engines the weights of the step, evaluate them where that is due, and add both to its metrics.

        Whether no policy was better before, and what ends the run, if anything does, once the step is recorded.
        """
        try:
            if not self._preemption.requested:  # the same signal may have ended the engines
                done.metrics |= self._sync(done.step + 1)
                if self._config.trainer.max_staleness:  # no memory moves: engines work while the trainer writes
                    self._rollouts.release()
            if self._evaluates(done.step):
                self._preemption.check()
                done.metrics |= self._evaluate(done.step + 1)
                return self._run.evaluated(done.step, done.metrics), None
        except (Preempted, EngineError, RunStopped) as error:
            return False, error
        return False, None

    def _evaluates(self, step: int) -> bool:
        every = self._config.trainer.evaluate_every
        return every > 0 and self._run.due(every, step)

    def _evaluate(self, step: int, split: Split | None = None) -> dict[str, float]:
        """Metrics of the policy after ``step`` steps on ``split``, by default that of the configuration."""
        split = split or self._config.evaluation.split
        with self._run.timeline.phase(TrainerPhase.EVALUATE):
            found = evaluate_in_training(self._config, self._rollouts, self._run.progress, split, step)
        for observer in self._observers:
            observer.evaluated(step, found)
        return found

    def _log(self, done: DoneStep, leaving: Preempted | EngineError | RunStopped | None) -> None:
        """Log the step, and raise what ends the run.

        A step counts as done once its checkpoint is there; what it leaves behind must be there before.
        """
        run = self._run
        run.position = self._rollouts.position
        if leaving is not None and self._evaluates(done.step):
            run.completed(done.step, unlogged=done.metrics)
        else:
            run.log(done.step, done.metrics)
        run.log_episodes(done.step, done.groups)
        if leaving is not None:
            self._preemption.check()
            raise leaving

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


def learn(
    config: ExperimentConfig,
    learner: Learner,
    groups: Sequence[Group],
    *,
    version: int,
    timeline: Timeline | None = None,
    learned: Learned | None = None,
) -> dict[str, float]:
    """All optimizer steps on one batch of groups; their metrics, joined as the catalog says of each.

    ``version`` is the policy's before them. ``timeline`` gets the phases, ``learned`` what the losses read.
    """
    timeline = timeline or Timeline()
    learned = learned or Learned()
    algorithm, has_critic = config.algorithm, config.algorithm.advantage == "gae"
    trains = not has_critic or version >= config.critic.warmup_steps  # the critic may learn alone at first
    learning = [name for name, learns in (("policy", trains), ("critic", has_critic)) if learns]
    with timeline.phase(TrainerPhase.BATCH):
        batches, found = _make_batches(config, learner, groups, version, timeline)
        missing = algorithm.epochs * (algorithm.minibatches - len(batches))
        if missing:  # updates without anything to learn from have their places in the schedule all the same
            learner.skip_steps(dict.fromkeys(learning, missing))
        if not batches:  # every group agreed with itself or was filtered out: nothing pulls the policy anywhere
            return {"train/tokens": 0.0} | found
        learned.batches, learned.epochs = batches, algorithm.epochs
        metrics = _take_steps(config, learner, learning, timeline, learned)
        learned.digests = learner.gradient_digests() if learner.watches_gradients else {}
        return metrics | found


def _make_batches(
    config: ExperimentConfig, learner: Learner, groups: Sequence[Group], version: int, timeline: Timeline
) -> tuple[list[TrainBatch], dict[str, float]]:
    """What the optimizer steps of one step train on, and how it came to be."""
    algorithm = config.algorithm
    if algorithm.shuffle_rewards:
        groups = shuffle_rewards(groups, version)
    groups, found = filter_groups(groups, algorithm)
    parts = split_minibatches(groups, min(algorithm.minibatches, len(groups))) if groups else []
    made = make_batches(parts, algorithm, config.rollout.temperature)
    with timeline.phase(TrainerPhase.LOGPROBS):
        batches = [learner.with_logprobs(batch, old=algorithm.recomputes) for batch in made if batch.sequences]
        if algorithm.advantage == "gae":
            batches = [learner.with_values(batch) for batch in batches]
    if algorithm.advantage == "gae":
        batches, of_values = estimate_advantages(batches, algorithm)
        found |= of_values
    done = [adjust_batch(batch, algorithm, version) for batch in batches]
    sizes = [{"train/tokens": batch.denominators["tokens"]} for batch in batches]
    joined = join_updates([size | metrics for size, (_, metrics) in zip(sizes, done, strict=True)])
    joined.pop("train/tokens", None)  # which the updates themselves count
    return [batch for batch, _ in done if batch.sequences], found | joined


def _take_steps(
    config: ExperimentConfig, learner: Learner, learning: Sequence[str], timeline: Timeline, learned: Learned
) -> dict[str, float]:
    """The optimizer steps of the networks that are ``learning``, the policy and the critic or one of them."""
    algorithm, steps, trains = config.algorithm, [], "policy" in learning
    with timeline.phase(TrainerPhase.OPTIMIZER):
        for epoch, batch in itertools.product(range(algorithm.epochs), learned.batches):
            keep = learned.keeps_logprobs and trains and not algorithm.recomputes and epoch == 0
            metrics = {"train/tokens": batch.denominators["tokens"]}
            if "critic" in learning:
                metrics |= learner.train_values(batch, ValueLoss(config.critic.value_clip))
            if trains:
                metrics |= learner.train_step(batch, PolicyLoss(algorithm), keep=keep)
            if epoch == 0:
                learned.logprobs.append(learner.kept_logprobs if keep else None)
            steps.append(metrics)
    return join_updates(steps)


def check_sync(config: ExperimentConfig) -> dict[str, float]:
    """Sync the trainer's weights into the engines and prove tensor by tensor that they arrived.

    Raises :class:`EngineError` naming the tensors that differ.
    """
    _start(config)
    learner = Learner(config, total_steps=config.trainer.steps)
    if not is_rank0():
        learner.worker_loop()
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
