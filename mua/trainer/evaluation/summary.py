"""From episodes to the numbers of a report: of all tasks, of each domain, difficulty and kind.

Every mean is a mean over tasks of the task's mean over its scored episodes. Unscored episodes (the infrastructure's
faults) enter no number but their own count: they are no failures of the policy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from mua.config.schema import EvaluationConfig
from mua.environment.protocol import Task
from mua.trainer.evaluation.estimators import (
    MAX_K,
    Interval,
    bootstrap,
    effective_turns,
    pass_at,
    pass_hat,
    time_weighted_reward,
)
from mua.trainer.evaluation.identity import task_digest
from mua.types import Json, Provenance, Trajectory

_SEED = 20
"""Of every bootstrap, so that the same episodes give the same report."""
_ERRORS = 10
"""Unscored episodes that are named."""
_ORDER = {"easy": "0", "medium": "1", "hard": "2"}
_PER_EPISODE = ("tool_calls", "malformed", "user_actions")
_USAGE = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")


@dataclass(frozen=True, slots=True)
class TaskResult:
    """All episodes of one task."""

    task: Task
    episodes: Sequence[Trajectory]

    @property
    def scored(self) -> list[Trajectory]:
        return [episode for episode in self.episodes if episode.scored]

    @property
    def successes(self) -> int:
        return sum(episode.success for episode in self.scored)

    @property
    def success(self) -> float:
        """Share of the scored episodes, of which there must be one."""
        return self.mean(lambda episode: episode.success)

    def mean(self, value: Callable[[Trajectory], float]) -> float:
        """Over the scored episodes, of which there must be one."""
        return fmean(map(value, self.scored))

    def label(self, name: str) -> str:
        """``kind`` or ``difficulty`` of the task, "-" where it has none."""
        return str(self.task.data.get(name, "-"))

    def as_json(self) -> Json:
        """What a comparison with another run needs."""
        return {
            "domain": self.task.domain,
            "task": self.task.id,
            "digest": task_digest(self.task),
            "kind": self.label("kind"),
            "difficulty": self.label("difficulty"),
            "episodes": len(self.scored),
            "unscored": len(self.episodes) - len(self.scored),
            "successes": self.successes,
            "reward": self.mean(lambda episode: episode.reward) if self.scored else None,
        }


def summarize(config: EvaluationConfig, results: Sequence[TaskResult]) -> Json:
    """The report's content. Sections without a scored episode hold their counts alone."""
    domains = _split_by(results, lambda result: result.task.domain)
    sections = {
        name: {
            **_section(config, members),
            "difficulties": _successes(config, members, "difficulty"),
            "kinds": _successes(config, members, "kind"),
        }
        for name, members in domains.items()
    }
    scored = [[result.success for result in members if result.scored] for members in domains.values()]
    lost = [
        {"domain": result.task.domain, "task": result.task.id, "outcome": str(episode.outcome), "error": episode.error}
        for result in results
        for episode in result.episodes
        if not episode.scored
    ]
    return {
        "split": config.split,
        "samples": config.samples,
        "temperature": config.temperature,
        "level": config.level,
        **_section(config, results),
        # Each domain counts alike however many tasks it has; None where one has none scored.
        "domain_mean": fmean(map(fmean, scored)) if scored and all(scored) else None,
        "domains": sections,
        "difficulties": _successes(config, results, "difficulty"),
        "kinds": {
            f"{name}: {kind}" if len(sections) > 1 else kind: success
            for name, section in sections.items()
            for kind, success in section["kinds"].items()
        },
        "errors": lost[:_ERRORS],
        "per_task": [result.as_json() for result in results],
    }


def _split_by(results: Iterable[TaskResult], key: Callable[[TaskResult], str]) -> dict[str, list[TaskResult]]:
    parts: defaultdict[str, list[TaskResult]] = defaultdict(list)
    for result in results:
        parts[key(result)].append(result)
    return dict(sorted(parts.items(), key=lambda item: _ORDER.get(item[0], item[0])))


def _successes(config: EvaluationConfig, results: Sequence[TaskResult], label: str) -> dict[str, Json]:
    parts = _split_by(results, lambda result: result.label(label))
    return {name: _section(config, members)["success"] for name, members in parts.items()}


def _section(config: EvaluationConfig, results: Sequence[TaskResult]) -> Json:
    episodes = [episode for result in results for episode in result.episodes]
    scored = [result for result in results if result.scored]
    counts = {
        "tasks": len(results),
        "episodes": len(episodes),
        "unscored": sum(not episode.scored for episode in episodes),
        "outcomes": dict(sorted(Counter(str(episode.outcome) for episode in episodes).items())),
    }
    if not scored:
        return {**counts, "success": None}
    success = interval_of(config, [result.success for result in scored])
    reward = interval_of(config, [result.mean(lambda episode: episode.reward) for result in scored])
    return {
        **counts,
        "success": success._asdict() | {"episodes": sum(len(result.scored) for result in scored)},
        "reward": reward._asdict(),
        "pass_hat": _passes(config, scored, pass_hat),
        "pass_at": _passes(config, scored, pass_at),
        **_shapes(scored),
    }


def _passes(
    config: EvaluationConfig, scored: Sequence[TaskResult], estimate: Callable[[int, int, int], float]
) -> dict[str, Json]:
    """The estimate for every k that some task has enough episodes for, over those tasks."""
    found = {}
    for k in range(1, min(config.samples, MAX_K) + 1):
        enough = [result for result in scored if len(result.scored) >= k]
        if enough:
            values = [estimate(len(result.scored), result.successes, k) for result in enough]
            found[str(k)] = interval_of(config, values)._asdict() | {"tasks": len(enough)}
    return found


def interval_of(config: EvaluationConfig, values: Sequence[float]) -> Interval:
    """Mean over tasks of a value of each, with its interval: the one way of every evaluation to compute it."""
    return bootstrap(values, level=config.level, resamples=config.resamples, seed=_SEED)


def _shapes(scored: Sequence[TaskResult]) -> Json:
    """Turns, tokens, tools and seconds of an episode."""

    def mean(value: Callable[[Trajectory], float]) -> float:
        return fmean(result.mean(value) for result in scored)

    def metric(name: str) -> float:
        return mean(lambda episode: episode.metrics.get(name, 0.0))

    def tokens(kind: Provenance) -> float:
        return mean(lambda episode: sum(int((part.provenance == kind).sum()) for part in episode.segments))

    names = sorted({name for result in scored for episode in result.scored for name in episode.metrics})
    metrics = {name: metric(name) for name in names}
    by_kind = {kind.name.lower(): tokens(kind) for kind in Provenance}
    return {
        "turns": mean(lambda episode: len(episode.turn_rewards)),
        "effective_turns": mean(lambda episode: effective_turns(episode.turn_rewards)),
        "time_weighted_reward": mean(lambda episode: time_weighted_reward(episode.turn_rewards)),
        "tokens": by_kind if any(by_kind.values()) else {},
        "usage": {name: metrics[name] for name in _USAGE if name in metrics},
        "counts": {name: metrics.get(name, 0.0) for name in _PER_EPISODE},
        "cost": {name: value for name, value in metrics.items() if name.endswith("cost")},
        "seconds": {n.removeprefix("seconds/"): value for n, value in metrics.items() if n.startswith("seconds/")},
    }


def training_metrics(
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
    metrics: dict[str, float] = {}
    for prefix, episodes in parts.items():
        # The task is the unit: samples of one task are no independent trials, so each task counts once, with its mean.
        by_task: defaultdict[Hashable, list[float]] = defaultdict(list)
        for episode in episodes:
            if episode.scored:
                by_task[episode.domain, episode.task_id].append(float(episode.success))
        if episodes:
            metrics[f"{prefix}_unscored"] = sum(not episode.scored for episode in episodes) / len(episodes)
        if by_task:
            interval = interval_of(config, [fmean(values) for values in by_task.values()])
            bounds = {"success": interval.mean, "success_low": interval.low, "success_high": interval.high}
            metrics |= {f"{prefix}_{name}": value for name, value in bounds.items()}
    return metrics
