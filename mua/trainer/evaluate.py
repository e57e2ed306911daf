"""Judging the policy while it trains: episodes on held-out tasks, with the weights that are in the engines."""

from __future__ import annotations

from mua.config.schema import ExperimentConfig
from mua.observe.progress import Progress
from mua.rollout.service import RolloutService, require_scored
from mua.types import Trajectory


def judge(config: ExperimentConfig, rollouts: RolloutService, progress: Progress) -> list[Trajectory]:
    """The trajectories of ``config.evaluation`` on the domains of ``environment``.

    Raises :class:`mua.errors.MuaError` when not one of them could be scored.
    """
    chosen = config.evaluation
    total = rollouts.task_count(chosen.split, chosen.tasks) * chosen.samples
    with progress.stage(f"evaluate on {chosen.split}", total=total) as stage:
        trajectories = rollouts.evaluate(
            chosen.split,
            tasks=chosen.tasks,
            samples=chosen.samples,
            temperature=chosen.temperature,
            on_episode=stage.advance,
        )
    require_scored(trajectories)
    return trajectories
