"""Episodes without training, one of them as a conversation a person can read."""

from __future__ import annotations

from mua.algorithms.rollout_metrics import rollout_metrics
from mua.config.schema import ExperimentConfig
from mua.observe.progress import Progress
from mua.observe.safe_output import SafeConsole
from mua.observe.transcript import render_trajectory
from mua.rollout.runner import require_scored
from mua.rollout.service import RolloutService
from mua.store.traces import trace_file, write_traces
from mua.types import Group, Json


def show_rollout(config: ExperimentConfig) -> Json:
    """Roll out ``evaluation.tasks`` tasks (8 by default) of each domain and print the first scored episode.

    All of them go to ``<output>/traces``.
    """
    chosen = config.evaluation
    with Progress(config.observe.progress) as progress, RolloutService(config) as rollouts:
        tasks = rollouts.selection.sampled_tasks(chosen.split, chosen.tasks or 8)
        with progress.stage("episodes", total=len(tasks) * chosen.samples) as stage:
            trajectories = rollouts.evaluate(
                tasks, samples=chosen.samples, temperature=config.rollout.temperature, on_episode=stage.advance
            )
        family = rollouts.family
    path = trace_file(config.output / "traces", 0)
    write_traces(path, trajectories)
    scored = [t for t in require_scored(trajectories) if t.scored]
    console = SafeConsole()
    console.print(render_trajectory(scored[0], family.decode))
    metrics = rollout_metrics([Group(0, "all", trajectories)])
    console.print(f"{len(trajectories)} episodes, success {metrics['rollout/success']:.3f}, traces in {path}")
    return {"episodes": len(trajectories), "traces": str(path), "metrics": metrics}
