"""Reinforcement learning: tasks become episodes, groups, batches, steps and new weights.

``trainer.max_staleness`` 0 is synchronous training; above it the same loop trains while the next groups roll out
(see :mod:`mua.rollout.scheduler`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from mua.algorithms.adjust import adjusted
from mua.algorithms.batch import make_batches, split_minibatches
from mua.algorithms.filters import filtered
from mua.algorithms.gae import with_gae
from mua.algorithms.losses import PolicyLoss, ValueLoss
from mua.algorithms.metrics import rollout_metrics
from mua.algorithms.shuffle import shuffled
from mua.config.schema import ExperimentConfig
from mua.engine.sync import SyncReport
from mua.environment.protocol import Split
from mua.errors import EngineError, MuaError, Preempted, RunStopped
from mua.evaluation.evaluator import evaluate_in_training
from mua.observe.traces import TraceWriter
from mua.rollout.runner import without_gc_pauses
from mua.rollout.scheduler import RolloutBatch
from mua.rollout.scored import UnscoredEpisodes, too_few_scored, unscored_among
from mua.rollout.service import RolloutService
from mua.trainer.learner import Learner
from mua.trainer.memory_phases import Phases
from mua.trainer.preempt import Preemption
from mua.trainer.rank_processes import check_ranks, ensure_processes, leads
from mua.trainer.run_folder import Run
from mua.types import Group, TrainBatch

_SHOWN = {"reward": "reward/mean", "success": "success"}
"""What the line of progress shows of a step's metrics."""

log = logging.getLogger(__name__)


def train(config: ExperimentConfig, preemption: Preemption | None = None) -> None:
    """Train the policy of ``config`` and leave its Hugging Face folder in ``<output>/hf``.

    Raises :class:`Preempted` on every rank when ``preemption`` is requested before the last step is done; the same
    call continues the run.
    """
    preemption = preemption or Preemption()
    ensure_processes(config.megatron)
    algorithm = config.algorithm
    if leads() and config.trainer.max_staleness and not algorithm.sees_sampler:
        log.warning("algorithm.uncorrected: what older policies sampled is trained on as if it were the policy's own")
    total, critic = _optimizer_steps(config)
    learner = Learner(config, total_steps=total, with_reference=algorithm.kl_coefficient > 0, critic_steps=critic)
    if not leads():
        learner.follow()
        preemption.check()
        return
    with learner, Run(config, learner) as run:
        if config.megatron.offload:
            learner.offload()  # engines take for their cache what is free when they start

        def interrupt() -> None:
            preemption.check()
            check_ranks()

        hosts = learner.engine_hosts()
        with run.saved_on_leaving(), RolloutService(config, interrupt, hosts=hosts, teacher=True) as rollouts:
            with without_gc_pauses():
                loop(config, learner, run, rollouts, preemption)
            learner.save_hf(config.output / "hf")


def _optimizer_steps(config: ExperimentConfig) -> tuple[int, int | None]:
    """Of the policy in the run, and of the critic, if there is one."""
    algorithm, steps = config.algorithm, config.trainer.steps
    each = algorithm.epochs * algorithm.minibatches
    if algorithm.advantage != "gae":
        return steps * each, None
    return (steps - config.critic.warmup_steps) * each, steps * each


def loop(
    config: ExperimentConfig, learner: Learner, run: Run, rollouts: RolloutService, preemption: Preemption
) -> None:
    """The run from ``run.step`` to its end, or to the safe point after ``preemption``."""
    steps = config.trainer.steps
    traces = TraceWriter(config.output / "traces") if config.observe.traces else None
    phases = Phases(config, learner, rollouts)
    phases.sync(run.step)
    if run.unlogged is not None:
        late = run.unlogged | _evaluate(config, run, rollouts, run.step)
        run.evaluated(run.step - 1, late)
        run.log(run.step - 1, late)
    first = _first(config, run, rollouts) if run.step == 0 else {}
    rollouts.schedule(run.step, run.position)
    started = time.perf_counter()
    with run.progress.stage("train", total=steps - run.step) as progress:
        for step in range(run.step, steps):
            preemption.check()
            rollout_batch, few = _roll_out(config, run, rollouts, step, preemption, traces)
            with run.timer.stage("train"), phases.training():
                metrics = learn(config, learner, [] if few is not None else rollout_batch.usable, version=step)
            evaluated = config.trainer.evaluate_every > 0 and run.due(config.trainer.evaluate_every, step)
            best, leaving = False, None
            try:
                if not preemption.requested:  # the same signal may have ended the engines
                    with run.timer.stage("sync"):
                        metrics |= _sync_metrics(phases.sync(step + 1))
                if evaluated:
                    preemption.check()
                    metrics |= _evaluate(config, run, rollouts, step + 1)
                    best = run.evaluated(step, metrics)
            except (Preempted, EngineError, RunStopped) as error:
                leaving = error
            metrics |= _of_rollouts(config, rollout_batch, step, traces) | rollouts.metrics() | phases.take()
            before, started = started, time.perf_counter()
            metrics |= _speed(metrics, started - before)
            # A step counts as done once its checkpoint is there; what it leaves behind must be there before.
            metrics |= first if step == 0 else {}
            run.position = rollouts.position
            if leaving is not None and evaluated:
                run.completed(step, unlogged=metrics)
            else:
                run.log(step, metrics)
            if leaving is not None:
                preemption.check()
                raise leaving
            if run.learned and (best or run.due(config.trainer.save_every, step)):
                with phases.saving():
                    run.save(step)
            rollouts.release()
            progress.advance(note=progress_note(metrics, rollout_batch.groups, few))
    hand_over(config, learner, run, rollouts, phases)


def progress_note(metrics: Mapping[str, float], groups: Sequence[Group], few: UnscoredEpisodes | None) -> str:
    """What the line of progress says of a step. Without a scored episode there is no reward, and none is shown."""
    words = [f"{name} {metrics[key]:.3f}" for name, key in _SHOWN.items() if key in metrics]
    if (failed := unscored_among([t for group in groups for t in group.trajectories])) is not None:
        words.append(failed.note() + (", trained on nothing" if few is not None else ""))
    return ", ".join(words)


def hand_over(config: ExperimentConfig, learner: Learner, run: Run, rollouts: RolloutService, phases: Phases) -> None:
    """Have ``learner`` have the policy that ``trainer.export`` chooses, and report on it."""
    step, folder = run.handed_over()
    if folder is not None:
        learner.load(folder)
        log.info("handing over the policy of %s", folder)
    if (split := config.evaluation.report_split) is None:
        return
    if folder is not None:
        phases.sync(config.trainer.steps + 1)
    run.report.final(step, _evaluate(config, run, rollouts, step, split))


def _first(config: ExperimentConfig, run: Run, rollouts: RolloutService) -> dict[str, float]:
    """What the policy reaches before the first step, as metrics of that step and in the report."""
    found: dict[str, float] = {}
    if config.trainer.evaluate_first:
        found |= _evaluate(config, run, rollouts, 0)
    if (split := config.evaluation.report_split) is not None:
        own = found if found and split == config.evaluation.split else _evaluate(config, run, rollouts, 0, split)
        run.report.first(own)
        found |= own
    return {f"initial_{name}": value for name, value in found.items()}


def learn(config: ExperimentConfig, learner: Learner, groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """All optimizer steps on one batch of groups; their metrics, averaged over the steps.

    ``version`` is the policy's before them.
    """
    algorithm = config.algorithm
    if algorithm.shuffle_rewards:
        groups = shuffled(groups, version)
    groups, taken = filtered(groups, algorithm)
    parts = split_minibatches(groups, min(algorithm.minibatches, len(groups))) if groups else []
    batches, found = _prepared(config, learner, parts, version)
    if not batches:  # every group agreed with itself or was filtered out: nothing pulls the policy anywhere
        return {"tokens": 0.0} | taken | found
    steps = [_update(config, learner, batch, version) for _ in range(algorithm.epochs) for batch in batches]
    return _mean(steps) | taken | found


def _prepared(
    config: ExperimentConfig, learner: Learner, parts: Sequence[Sequence[Group]], version: int
) -> tuple[list[TrainBatch], dict[str, float]]:
    """The batch of each optimizer step, with all its losses are decided by, and what there is to say about them."""
    algorithm, found = config.algorithm, dict[str, float]()
    made = make_batches(parts, algorithm, config.rollout.temperature)
    batches = [learner.with_logprobs(batch, old=algorithm.recomputes) for batch in made if batch.sequences]
    if algorithm.advantage == "gae":
        batches, found = with_gae([learner.with_values(batch) for batch in batches], algorithm)
    done = [adjusted(batch, algorithm, version) for batch in batches]
    return [batch for batch, _ in done if batch.sequences], found | _mean([metrics for _, metrics in done])


def _update(config: ExperimentConfig, learner: Learner, batch: TrainBatch, version: int) -> dict[str, float]:
    """One optimizer step of the critic, if there is one, and of the policy, unless the critic still learns alone."""
    metrics = {"tokens": batch.denominators["tokens"]}
    if config.algorithm.advantage == "gae":
        metrics |= learner.train_values(batch, ValueLoss(config.critic.value_clip))
        if version < config.critic.warmup_steps:
            return metrics
    return metrics | learner.train_step(batch, PolicyLoss.from_config(config.algorithm))


def _roll_out(
    config: ExperimentConfig, run: Run, rollouts: RolloutService, step: int, preemption: Preemption,
    traces: TraceWriter | None,
) -> tuple[RolloutBatch, UnscoredEpisodes | None]:  # fmt: skip
    """The episodes of ``step``, and what was wrong where too few could be scored to train on them.

    Traces of a step that stops the run are written, to be looked into.
    """
    algorithm = config.algorithm
    expected = None if algorithm.refill.on else algorithm.groups_per_step * algorithm.group_size
    with run.timer.stage("rollout"), run.progress.stage(f"episodes of step {step}", total=expected) as progress:
        try:
            rollout_batch = rollouts.take(on_episode=progress.advance)
        except MuaError:
            preemption.check()  # the signal that asks to leave may have ended the engines before
            raise
    ended = [t for group in rollout_batch.groups for t in group.trajectories]
    few = too_few_scored(ended, config.trainer.min_scored_share)
    try:
        run.scored(step, few)
    except RunStopped:
        if traces is not None:
            traces.write(step, ended)
        preemption.check()
        raise
    return rollout_batch, few


def _of_rollouts(
    config: ExperimentConfig, rollout_batch: RolloutBatch, step: int, traces: TraceWriter | None
) -> dict[str, float]:
    """Metrics of a step's episodes, which are left as traces."""
    if traces is not None:
        traces.write(step, (t for group in rollout_batch.groups for t in group.trajectories))
    return rollout_metrics(rollout_batch.groups, divide_by_std=config.algorithm.divide_by_std, version=step)


def _evaluate(
    config: ExperimentConfig, run: Run, rollouts: RolloutService, step: int, split: Split | None = None
) -> dict[str, float]:
    """Metrics of the policy after ``step`` steps on ``split``, by default that of the configuration."""
    with run.timer.stage("evaluate"):
        return evaluate_in_training(config, rollouts, run.progress, split or config.evaluation.split, step)


def _sync_metrics(synced: SyncReport) -> dict[str, float]:
    return {
        "sync/bytes": float(synced.bytes),
        "sync/bytes_moved": float(synced.moved),
        "sync/bytes_needed": float(synced.needed),
        "sync/tensors": float(synced.tensors),
        "sync/buckets": float(synced.buckets),
        "sync/version": float(synced.version),
        "sync/seconds": synced.seconds,
        "sync/pause_seconds": synced.pause_seconds,
        "sync/assemble_seconds": synced.assemble_seconds,
        "sync/load_seconds": synced.load_seconds,
        "sync/overlap_seconds": synced.overlap_seconds,
        "sync/gigabytes_per_second": synced.bytes / max(synced.seconds, 1e-9) / 1e9,
    }


def _speed(metrics: dict[str, float], seconds: float) -> dict[str, float]:
    return {
        "speed/step_seconds": seconds,
        "speed/sampled_tokens_per_second": metrics["engine/sampled_tokens"] / seconds,
        "speed/trained_tokens_per_second": metrics["tokens"] / seconds,
    }


def _mean(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each metric's mean over the steps that have it."""
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}


def check_sync(config: ExperimentConfig) -> None:
    """Sync the trainer's weights into the engines and prove tensor by tensor that they arrived.

    Raises :class:`EngineError` naming the tensors that differ.
    """
    ensure_processes(config.megatron)
    learner = Learner(config, total_steps=config.trainer.steps)
    if not leads():
        learner.follow()
        return
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
