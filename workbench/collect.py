"""Conversations for supervised training: any policy plays the training tasks, what is worth learning from is kept.

::

    plan of episodes ──► played and stored one by one ──► curated (workbench.curate) ──► OUT.jsonl, OUT.report.json
                          OUT.episodes.jsonl, resumable

The episodes are those of ``mua eval``, on the training split and sampled as rollouts are. Nothing is decided while they
are played: the same command with another selection reads the same episodes again and plays none.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mua.config.schema import ExperimentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.rollout.runner import Placed, require_scored
from mua.trainer.evaluation.evaluator import key_of, planned_episodes, play_missing
from mua.trainer.evaluation.store import EpisodeStore, json_digest, policy_digest, policy_of, setting_of
from mua.types import Json, ToolSchema, Trajectory
from mua.utils.atomic import replace_text
from mua.utils.errors import MuaError
from mua.utils.files import PRIVATE
from mua.utils.seeds import derived_seed
from workbench.curate import Candidate, balanced, best_of_each_task, record, refusal


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much to play and to keep."""

    count: int
    """Conversations to write, at most."""
    samples: int = 4
    """Episodes of each task."""
    per_task: int = 1
    """Conversations kept of one task, at most: the best."""
    tasks: int | None = None
    """So many training tasks of each domain, as ``evaluation.tasks`` samples them; None: all."""
    seconds: float | None = None
    """After so long no more is played; what is there is curated, and the same command goes on later."""


def collect(config: ExperimentConfig, out: Path, wanted: Wanted) -> Json:
    """Have the policy of ``config.evaluation.policy`` play, write what is kept to ``out``, and give the report.

    Run again, it continues. Raises :class:`MuaError` when nothing could be scored, or nothing is kept.
    """
    config = _as_played(config, wanted)
    policy, setting = policy_digest(policy_of(config)), json_digest(setting_of(config))
    planned = planned_episodes(config)
    every = _in_order(planned, config.seed)
    with EpisodeStore(out.with_suffix(".episodes.jsonl"), policy=policy, setting=setting) as store:
        successes = Counter(t.success for placed in every if (t := store.get(key_of(placed))) is not None)

        def note(_: Placed, trajectory: Trajectory) -> str:
            successes[trajectory.success] += 1
            return f"{successes[True]} of {successes.total()} successful"

        play_missing(config, every, store, "conversations", seconds=wanted.seconds, note=note)
        played = [(p.task, t) for p in every if (t := store.get(key_of(p))) is not None]
        roles = store.roles
    return _curated(config, out, wanted, played, missing=len(every) - len(played)) | {"roles": roles}


def _as_played(config: ExperimentConfig, wanted: Wanted) -> ExperimentConfig:
    """On the training tasks of ``environment``, sampled as rollouts are."""
    changed: Json = {
        "domains": [], "split": "train", "tasks": wanted.tasks, "samples": wanted.samples,
        "temperature": config.rollout.temperature,
    }  # fmt: skip
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=changed)})


def _in_order(planned: Sequence[tuple[Task, list[Placed]]], seed: int) -> list[Placed]:
    """Every task once before any is played again, in mixed order: a run cut short has a bit of everything."""
    rounds = [list(places) for places in zip(*(places for _, places in planned), strict=True)]
    for number, places in enumerate(rounds):
        random.Random(derived_seed("collect", seed, number)).shuffle(places)
    return list(itertools.chain.from_iterable(rounds))


def _curated(
    config: ExperimentConfig, out: Path, wanted: Wanted, played: Sequence[tuple[Task, Trajectory]], missing: int
) -> Json:
    if not played:
        raise MuaError("not one episode was played in the time that was given", passing=True)
    require_scored([trajectory for _, trajectory in played])
    services = Services.from_config(config.user, config.judge)
    try:
        return _written(config, Selection.from_config(config.environment, services), out, wanted, played, missing)
    finally:
        asyncio.run(services.close())


def _written(
    config: ExperimentConfig, selection: Selection, out: Path, wanted: Wanted,
    played: Sequence[tuple[Task, Trajectory]], missing: int,
) -> Json:  # fmt: skip
    kept, refused = _judged(selection, played)
    best = best_of_each_task(kept, wanted.per_task)
    chosen = list(itertools.islice(balanced(best, config.environment.shares), wanted.count))
    report = {
        "episodes": len(played),
        "not_played": missing,
        "refused": dict(refused.most_common()),
        "kept": len(kept),
        "beyond_per_task": len(kept) - sum(map(len, best)),
        "beyond_count": sum(map(len, best)) - len(chosen),
        "written": len(chosen),
        **_shape(chosen),
    }
    replace_text(out.with_suffix(".report.json"), json.dumps(report, indent=2) + "\n")
    if not chosen:
        raise MuaError(f"none of {len(played)} episodes is a demonstration; {out.with_suffix('.report.json')} says why")
    thinking = config.model.thinking
    records = [record(c, shown_tools(selection, c.task), thinking=thinking) for c in chosen]
    replace_text(out, "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in records), mode=PRIVATE)
    return report


def _judged(selection: Selection, played: Sequence[tuple[Task, Trajectory]]) -> tuple[list[Candidate], Counter[str]]:
    """What is kept, and how many were refused for each reason."""
    kept: list[Candidate] = []
    refused: Counter[str] = Counter()
    for task, trajectory in played:
        names = {tool.name for tool in _tools(selection, task)} if trajectory.success else set()
        if (reason := refusal(trajectory, names)) is None:
            kept.append(Candidate(task, trajectory))
        else:
            refused[reason] += 1
    return kept, refused


def shown_tools(selection: Selection, task: Task) -> list[ToolSchema]:
    """The tools whose schemas a policy sees in its prompt, as in a rollout: with the short prompt none."""
    return _tools(selection, task) if selection.config.prompt == "full" else []


def _tools(selection: Selection, task: Task) -> list[ToolSchema]:
    """The tools a policy is given at the beginning of ``task``."""
    environment = selection.domain(task).environment()
    try:
        environment.reset(task, 0)
        return list(environment.tools())
    finally:
        environment.close()


def _shape(chosen: Sequence[Candidate]) -> Json:
    """What the written conversations are like."""
    if not chosen:
        return {}
    labels = [(c.task.domain, *c.labels) for c in chosen]
    counts = {
        name: dict(sorted(Counter(label[place] for label in labels).items()))
        for place, name in enumerate(("domains", "difficulties", "kinds", "outcomes"))
    }
    turns = fmean(len(c.trajectory.turn_rewards) for c in chosen)
    return {"tasks": len({(c.task.domain, c.task.id) for c in chosen}), **counts, "turns": turns}
