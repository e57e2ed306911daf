"""Evaluations: ``mua eval``, which plays what is not played yet and writes what all of it says, and those in training.

Within training the policy is whatever weights are in the engines. Two things may be held out: tasks of the domains that
are trained on (``evaluation.split``), and whole domains (``evaluation.domains``). Their numbers are never mixed.

The episodes are those of training: the same runner, environments, users and state machine; only who plays the policy
differs (:mod:`mua.rollout.agent`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import TypeAlias

from mua.config.schema import ExperimentConfig
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Split, Task
from mua.environment.selection import Selection, environment_of
from mua.observe.progress import Progress
from mua.observe.safe_output import SafeConsole
from mua.rollout.agent import ChatPolicy
from mua.rollout.runner import EpisodeRunner, Placed, evaluation_places, require_scored, without_gc_pauses
from mua.rollout.service import RolloutService
from mua.store.recorder import Recorder
from mua.store.traces import trace_file, write_traces
from mua.trainer.control_tokens import report_untrained
from mua.trainer.evaluation.report import (
    TaskResult,
    console_table,
    draw,
    markdown,
    summarize,
    training_metrics,
    unscored_lines,
)
from mua.trainer.evaluation.store import (
    FILE,
    EpisodeStore,
    Key,
    json_digest,
    policy_digest,
    policy_of,
    recording,
    setting_of,
    task_digest,
)
from mua.types import Json, Trajectory
from mua.utils.atomic import replace_text
from mua.utils.errors import ConfigError, IncompleteEvaluation

log = logging.getLogger(__name__)

RESULT, REPORT = "evaluation.json", "report.md"
_MANIFEST = "manifest.json"
"""By which a checkpoint is told from a model folder (:mod:`mua.megatron.checkpoint_manifest`)."""
OnTrajectory: TypeAlias = Callable[[Placed, Trajectory], None]
"""Called as episodes end, from any thread, one call at a time."""
Roles: TypeAlias = dict[str, float]
"""What users and judges came to, by role and metric."""
Play: TypeAlias = Callable[[ExperimentConfig, Sequence[Placed], OnTrajectory, float | None], Roles]
"""Plays episodes, for so many seconds at most."""


class _TimeIsUp(Exception):
    """The deadline of playing has passed; what ended before is kept."""


def play_on_engine(
    config: ExperimentConfig, episodes: Sequence[Placed], on_trajectory: OnTrajectory, seconds: float | None = None
) -> Roles:
    """A checkpoint, served by engines that are started for the occasion; after ``seconds`` the rest is not played."""
    until = None if seconds is None else monotonic() + seconds

    def interrupt() -> None:
        if until is not None and monotonic() > until:
            raise _TimeIsUp

    try:
        with (
            recording(config) as recorder,
            RolloutService(config, interrupt, recorder=recorder) as rollouts,
            without_gc_pauses(),
        ):
            report_untrained(config.model, rollouts.family)
            with suppress(_TimeIsUp):
                rollouts.each(episodes, temperature=config.evaluation.temperature, on_trajectory=on_trajectory)
            return roles_of(rollouts.metrics())
    except _TimeIsUp:  # before the engines were there
        return {}


def play_at_endpoint(
    config: ExperimentConfig, episodes: Sequence[Placed], on_trajectory: OnTrajectory, seconds: float | None = None
) -> Roles:
    """Whatever answers at an OpenAI-compatible endpoint; after ``seconds`` the rest is not played."""
    endpoint = config.evaluation.policy.endpoint
    assert endpoint is not None, "the configuration was validated"

    async def play(recorder: Recorder | None) -> Roles:
        services = Services.from_config(config.user, config.judge)
        selection = Selection.from_config(config.environment, services)
        client = ChatClient(endpoint, "policy")
        policy = ChatPolicy(client, endpoint.send_reasoning)
        runner = EpisodeRunner(config, selection, None, None, services, policy, recorder=recorder)
        try:
            await runner.start()
            try:
                async with asyncio.timeout(seconds) as deadline:
                    await runner.each(episodes, temperature=config.evaluation.temperature, on_trajectory=on_trajectory)
            except TimeoutError:
                if not deadline.expired():
                    raise
            return roles_of(services.metrics())
        finally:
            await runner.close()
            await services.close()
            await client.close()

    with recording(config) as recorder, without_gc_pauses():
        return asyncio.run(play(recorder))


def evaluate(config: ExperimentConfig) -> Json:
    """Evaluate the policy of ``config.evaluation``, write the results into ``config.output`` and print their table.

    Run again, it continues: what is scored already is not played again. Raises :class:`RunStopped` when not
    one episode could be scored.
    """
    result = evaluated(servable(config))
    SafeConsole().print(console_table(result))
    for line in unscored_lines(result):
        print(line)
    return result


def require_complete(config: ExperimentConfig, results: Sequence[Json]) -> None:
    """Raises :class:`IncompleteEvaluation` where ``results`` lack more than ``evaluation.max_unscored`` allows."""
    most, lost = config.evaluation.max_unscored, [(one["unscored"], one["episodes"]) for one in results]
    if worst := [pair for pair in lost if pair[0] > most * pair[1]]:
        unscored, episodes = max(worst, key=lambda pair: pair[0] / pair[1])
        raise IncompleteEvaluation(
            f"evaluation.max_unscored: {unscored} of {episodes} episodes could not be scored, above {most:g}; the "
            "result is written, with the bounds that they leave open; fix what they ended with, and the same command "
            "plays them again"
        )


def evaluate_in_training(
    config: ExperimentConfig, rollouts: RolloutService, progress: Progress, split: Split, step: int
) -> dict[str, float]:
    """The metrics of ``split`` on the domains of ``environment`` and on those that are held out, after ``step`` steps.

    With ``observe.traces`` the episodes are left in ``<output>/evaluations/<split>`` too. Raises
    :class:`RunStopped` when not one episode of the former could be scored.
    """
    chosen, tasks = config.evaluation, rollouts.evaluation_tasks(split)
    with progress.stage(f"evaluate on {split}", total=len(tasks) * chosen.samples) as stage:
        trajectories = rollouts.evaluate(
            tasks, samples=chosen.samples, temperature=chosen.temperature, on_episode=stage.advance
        )
        found = training_metrics(trajectories, config.environment.shares, split, chosen)
        said = success_of(found, split)
        stage.advance(0, note=said)
    log.info("evaluation on %s after %d steps: %s", split, step, said)
    if config.writes_traces:
        write_traces(trace_file(config.output / "evaluations" / split, step), trajectories)
    require_scored([t for t in trajectories if t.domain in config.environment.shares])
    return found


def success_of(metrics: Mapping[str, float], split: str | None) -> str:
    """The success on ``split`` and its interval in words."""
    names = [f"eval/{split}_success{end}" for end in ("", "_low", "_high")]
    found = [metrics[name] for name in names if name in metrics]
    return "success {:.3f} ({:.3f} to {:.3f})".format(*found) if len(found) == len(names) else "success unknown"


def evaluated(config: ExperimentConfig, play: Play | None = None) -> Json:
    """:func:`evaluate` without a word; ``play`` plays what is missing, by default what the policy's kind asks for."""
    if names := config.evaluation.domains:
        spread = environment_of(names, config.environment, config.evaluation)
        config = config.model_copy(update={"environment": spread})
    policy, setting = policy_of(config), setting_of(config)
    planned = planned_episodes(config)
    with EpisodeStore(config.output / FILE, policy=policy_digest(policy), setting=json_digest(setting)) as store:
        every = [placed for _, places in planned for placed in places]
        play_missing(config, every, store, f"evaluate on {config.evaluation.split}", play=play)
        roles = store.roles
        found = [(task, [store.get(key_of(placed)) for placed in places]) for task, places in planned]
    results = [TaskResult(task, [episode for episode in kept if episode is not None]) for task, kept in found]
    episodes = [episode for result in results for episode in result.episodes]
    require_scored(episodes)
    result = {
        "name": config.name,
        "policy": policy,
        "setting_digest": json_digest(setting),
        **summarize(config.evaluation, results),
        "roles": roles,
        "setting": setting,
    }
    if config.observe.traces is not False:
        write_traces(trace_file(config.output / "traces", 0), episodes)
    folder, outputs = config.output, config.evaluation.outputs
    if "json" in outputs:
        replace_text(folder / RESULT, json.dumps(result, indent=2) + "\n")
    pictures = draw(result, folder) if "plots" in outputs else []
    if "markdown" in outputs:
        replace_text(folder / REPORT, markdown(result, [picture.name for picture in pictures]))
    return result


def servable(config: ExperimentConfig) -> ExperimentConfig:
    """``config`` whose ``model.path``, where it links to a checkpoint (``checkpoints/best``), is that checkpoint.

    Raises :class:`ModelError` for a damaged one, or one of the old form.
    """
    path = config.model.path.resolve()
    if config.evaluation.policy.kind == "endpoint" or not (path / _MANIFEST).is_file():
        return config
    from mua.megatron import checkpoint_manifest  # loads Megatron-Core

    checkpoint_manifest.check_files(path, checkpoint_manifest.read_manifest(path))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def planned_episodes(config: ExperimentConfig) -> list[tuple[Task, list[Placed]]]:
    """Every task of the evaluation with its episodes (see :func:`mua.rollout.runner.evaluation_places`)."""
    chosen = config.evaluation
    services = Services.from_config(config.user, config.judge)
    try:
        tasks = Selection.from_config(config.environment, services).sampled_tasks(chosen.split, chosen.tasks)
    finally:
        asyncio.run(services.close())
    if not tasks:
        names = ", ".join(config.environment.shares)
        raise ConfigError(f"evaluation.split: {chosen.split!r} of {names} has no tasks; choose another split")
    return [(task, evaluation_places(task, chosen.samples)) for task in tasks]


def play_missing(
    config: ExperimentConfig, every: Sequence[Placed], store: EpisodeStore, stage: str, *,
    seconds: float | None = None, note: Callable[[Placed, Trajectory], str] | None = None, play: Play | None = None,
) -> None:  # fmt: skip
    """Play those of ``every`` that ``store`` has no scored result of, in that order, and keep them there.

    ``stage`` names what is under way; ``note``, called after each episode, says what progress shows beside it. After
    ``seconds`` the rest is left for the next call.
    """
    missing = [placed for placed in every if key_of(placed) not in store]
    with (
        Progress(config.observe.progress) as progress,
        # Only what is missing counts, so that the estimate of the time left holds for a continued run too.
        progress.stage(stage, total=len(missing)) as shown,
    ):
        if len(missing) < len(every):
            shown.advance(0, note=f"{len(every) - len(missing)} of {len(every)} were done already")

        def keep(placed: Placed, trajectory: Trajectory) -> None:
            store.add(key_of(placed), trajectory)
            shown.advance(note=None if note is None else note(placed, trajectory))

        if missing:
            of_kind = play_at_endpoint if config.evaluation.policy.kind == "endpoint" else play_on_engine
            store.add_roles((play or of_kind)(config, missing, keep, seconds))
        if note is None:
            kept = [store.get(key_of(placed)) for placed in every]
            scored = [episode.success for episode in kept if episode is not None and episode.scored]
            shown.advance(0, note=f"{sum(scored)} of {len(scored)} scored episodes succeeded")


def key_of(placed: Placed) -> Key:
    """Where the store keeps an episode."""
    return Key(placed.task.domain, placed.task.id, task_digest(placed.task), placed.sample)


def roles_of(metrics: Roles) -> Roles:
    """Those of ``metrics`` that are of users and judges."""
    return {name: value for name, value in metrics.items() if name.startswith(("user/llm/", "judge/llm/"))}
