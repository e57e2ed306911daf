"""Judging a policy: episodes on held-out tasks, success with a confidence interval, by kind of task."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from mua.algorithms.metrics import mean_confidence_interval
from mua.config.schema import ExperimentConfig
from mua.environment.selection import Selection
from mua.observe.progress import Progress
from mua.observe.traces import TraceWriter
from mua.rollout.service import RolloutService, report, require_scored
from mua.types import Trajectory


def evaluate(config: ExperimentConfig) -> None:
    """Evaluate ``model.path``; prints a table and writes ``<output>/evaluation.json`` and a trace."""
    with Progress(config.observe.progress) as progress, RolloutService(config) as rollouts:
        trajectories = judge(config, rollouts, progress)
    if config.observe.traces:
        TraceWriter(config.output / "traces").write(0, trajectories)
    result = summarize(config, trajectories)
    (config.output / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    Console().print(_table(result))


def judge(config: ExperimentConfig, rollouts: RolloutService, progress: Progress) -> list[Trajectory]:
    """The trajectories of ``config.evaluation``; raises :class:`MuaError` when not one of them could be scored."""
    chosen = config.evaluation
    total = min(chosen.tasks or 1 << 60, rollouts.task_count(chosen.split)) * chosen.samples
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


def summarize(config: ExperimentConfig, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Success with its 95 % interval, in all and by kind of task."""
    tasks = Selection.from_config(config.environment).tasks(config.evaluation.split)
    kinds = {t.id: str(t.data.get("kind", "all")) for t in tasks}
    by_kind: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_kind[kinds[trajectory.task_id]].append(trajectory)
    return {
        "split": config.evaluation.split,
        "temperature": config.evaluation.temperature,
        "episodes": len(trajectories),
        "unscored": sum(not t.scored for t in trajectories),
        "success": _interval(trajectories),
        "kinds": {kind: _interval(members) for kind, members in sorted(by_kind.items())},
    }


def _interval(trajectories: Sequence[Trajectory]) -> dict[str, float] | None:
    scored = report(trajectories)
    if not scored:
        return None
    interval = mean_confidence_interval(scored)
    return {"mean": interval.mean, "low": interval.low, "high": interval.high, "episodes": len(scored)}


def _table(result: dict[str, Any]) -> Table:
    table = Table("kind", "episodes", "success", "95 % interval", title=f"success on {result['split']}")
    for kind, interval in [*result["kinds"].items(), ("all", result["success"])]:
        if interval is not None:
            bounds = f"{interval['low']:.3f} to {interval['high']:.3f}"
            table.add_row(kind, str(interval["episodes"]), f"{interval['mean']:.3f}", bounds)
    return table
