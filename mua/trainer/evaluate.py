"""Judging the policy while it trains: episodes on held-out tasks, with the weights that are in the engines.

Two things may be held out: tasks of the domains that are trained on (``evaluation.split``), and whole domains
(``evaluation.domains``). Their numbers are never mixed. Episodes and intervals are those of ``mua eval``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from statistics import fmean

from mua.config.schema import EvaluationConfig, ExperimentConfig
from mua.environment.protocol import Split
from mua.evaluation.summary import interval_of
from mua.observe.progress import Progress
from mua.observe.traces import TraceWriter
from mua.rollout.scored import require_scored
from mua.rollout.service import RolloutService
from mua.types import Trajectory


def judge(
    config: ExperimentConfig, rollouts: RolloutService, progress: Progress, split: Split, step: int
) -> dict[str, float]:
    """The metrics of ``split`` on the domains of ``environment`` and on those that are held out, after ``step`` steps.

    The episodes are left in ``<output>/evaluations/<split>`` (unless ``observe.traces`` is off). Raises
    :class:`mua.errors.RunStopped` when not one episode of the former could be scored.
    """
    chosen, tasks = config.evaluation, rollouts.evaluation_tasks(split)
    with progress.stage(f"evaluate on {split}", total=len(tasks) * chosen.samples) as stage:
        trajectories = rollouts.evaluate(
            tasks, samples=chosen.samples, temperature=chosen.temperature, on_episode=stage.advance
        )
    if config.observe.traces:
        TraceWriter(config.output / "evaluations" / split).write(step, trajectories)
    require_scored([t for t in trajectories if t.domain in config.environment.shares])
    return evaluation_metrics(trajectories, config.environment.shares, split, chosen)


def evaluation_metrics(
    trajectories: Sequence[Trajectory], trained: Collection[str], split: str, config: EvaluationConfig
) -> dict[str, float]:
    """Success with its interval (``evaluation.level``), and the share of unscored episodes.

    ``evaluation/<split>_...`` is over all tasks of the domains that are ``trained`` on, and
    ``evaluation/held_out_<split>_...`` over those of the others; where there are several domains,
    ``evaluation/<domain>/<split>_...`` is of each. A part without a scored episode has no success: the infrastructure's
    faults are no failures of the policy.
    """
    parts = {
        f"evaluation/{split}": [t for t in trajectories if t.domain in trained],
        f"evaluation/held_out_{split}": [t for t in trajectories if t.domain not in trained],
    }
    domains = {t.domain for t in trajectories}
    for domain in sorted(domains) if len(domains) > 1 else ():
        parts[f"evaluation/{domain}/{split}"] = [t for t in trajectories if t.domain == domain]
    return {name: value for prefix, part in parts.items() if part for name, value in _success(prefix, part, config)}


def _success(prefix: str, episodes: Sequence[Trajectory], config: EvaluationConfig) -> Iterable[tuple[str, float]]:
    """The task is the unit: samples of one task are no independent trials, so each task counts once, with its mean."""
    by_task: defaultdict[Hashable, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.scored:
            by_task[episode.domain, episode.task_id].append(float(episode.success))
    yield f"{prefix}_unscored", sum(not episode.scored for episode in episodes) / len(episodes)
    if by_task:
        interval = interval_of(config, [fmean(values) for values in by_task.values()])
        yield f"{prefix}_success", interval.mean
        yield f"{prefix}_success_low", interval.low
        yield f"{prefix}_success_high", interval.high
