"""What a step's rollouts looked like, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from mua.algorithms.advantage import group_relative_advantages
from mua.algorithms.diversity import diversity
from mua.types import Group, Outcome, Provenance, Trajectory

_COUNTED = {
    "tool_calls/": "env/tool_calls/",
    "tool_errors/": "env/tool_errors/",
    "context/": "rollout/context/",
    "gateway/": "rollout/gateway/",
}
"""Counts of an episode, and what they are in the metrics of a step."""


def rollout_metrics(
    groups: Sequence[Group], *, divide_by_std: bool = True, version: int | None = None
) -> dict[str, float]:
    """Metrics of the trajectories of one step.

    Rewards, turns, tokens and tools are over scored trajectories, outcomes and attempts over all. ``version``
    is the policy version about to be trained, from which ``version_lag`` (of sampled tokens) counts; None takes
    the newest version seen. Quantities without a single member (no scored trajectory, say) are left out rather
    than reported as 0.
    """
    everyone = [t for group in groups for t in group.trajectories]
    scored = [t for group in groups for t in group.scored]
    metrics: dict[str, float] = {}
    if everyone:
        counts, attempts = Counter(t.outcome for t in everyone), [t.attempts for t in everyone]
        metrics = {f"rollout/outcome/{kind}": counts[kind] / len(everyone) for kind in Outcome} | {
            "rollout/trajectories/count": float(len(everyone)),
            "rollout/trajectories/unscored": sum(not t.scored for t in everyone) / len(everyone),
            "rollout/attempts/mean": float(np.mean(attempts)),
            "rollout/attempts/max": float(max(attempts)),
        }
        # Faults of users by kind, of attempts that were retried too, and flags.
        metrics |= _totals(everyone, {"user_faults/": "user/faults/", "user_flags/": "user/flags/"})
    if scored:
        # A trajectory that never called a tool counts as 0.
        counted = _totals(scored, _COUNTED)
        metrics |= (
            {f"rollout/{name}": value for name, value in _rewards(scored).items()}
            | _shapes(scored)
            | {name: count / len(scored) for name, count in counted.items()}
        )
        metrics |= _tools_used(scored) | diversity(scored) | _length_correlation(scored)
        metrics |= _by_domain(groups) | _group_shares([g for g in groups if g.scored], divide_by_std)
        versions = [s.version[s.loss_mask] for t in scored for s in t.segments]
        sampled = np.concatenate(versions or [np.zeros(0, np.int32)])
        if len(sampled):
            lag = (sampled.max() if version is None else version) - sampled
            metrics |= {
                "rollout/off_policy_level/mean": float(lag.mean()),
                "rollout/off_policy_level/max": float(lag.max()),
            }
    return metrics


def _totals(trajectories: Sequence[Trajectory], kinds: Mapping[str, str]) -> dict[str, float]:
    """Counts of trajectories, added up, under the names of a step; those that did not occur are left out.

    ``kinds`` says for the beginning of a count's name what it is in a step's.
    """
    totals: Counter[str] = Counter()
    for trajectory in trajectories:
        totals.update({name: value for name, value in trajectory.metrics.items() if name.startswith(tuple(kinds))})
    ended = {name: next(kind for kind in kinds if name.startswith(kind)) for name in sorted(totals)}
    return {kinds[kind] + name.removeprefix(kind): float(totals[name]) for name, kind in ended.items()}


def _tools_used(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Share of episodes that called each tool."""
    used = Counter(
        name.removeprefix("tool_calls/")
        for trajectory in scored
        for name, count in trajectory.metrics.items()
        if name.startswith("tool_calls/") and count
    )
    return {f"env/tool_used/{name}": used[name] / len(scored) for name in sorted(used)}


def _length_correlation(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Pearson's, of reward and sampled tokens; nothing where either does not vary."""
    rewards = np.array([t.reward for t in scored])
    lengths = np.array([t.sampled_tokens for t in scored], np.float64)
    if not rewards.std() or not lengths.std():
        return {}
    return {"rollout/reward/length_correlation": float(np.corrcoef(rewards, lengths)[0, 1])}


def _rewards(scored: Sequence[Trajectory]) -> dict[str, float]:
    rewards = np.array([t.reward for t in scored])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "success": float(np.mean([t.success for t in scored])),
    }


def _by_domain(groups: Sequence[Group]) -> dict[str, float]:
    """Each domain's share of the trajectories, faults, rewards, turns, tokens and groups without a difference, in runs
    over several."""
    metrics: dict[str, float] = {}
    everyone = [t for group in groups for t in group.trajectories]
    names = {t.domain for t in everyone}
    for name in sorted(names) if len(names) > 1 else ():
        members = [t for t in everyone if t.domain == name]
        found = {"share": len(members) / len(everyone)}
        if scored := [t for t in members if t.scored]:
            of_groups = ([t.reward for t in group.scored if t.domain == name] for group in groups)
            found |= _rewards(scored) | {
                "turns": float(np.mean([len(t.turn_rewards) for t in scored])),
                "sampled_tokens": float(np.mean([t.sampled_tokens for t in scored])),
                "zero_std": float(np.mean([max(r) == min(r) for r in of_groups if r])),
            }
        found["unscored"] = 1 - len(scored) / len(members)
        metrics |= {f"rollout/domain/{name}/{key}": value for key, value in found.items()}
    return metrics


def _shapes(scored: Sequence[Trajectory]) -> dict[str, float]:
    turns = [len(t.turn_rewards) for t in scored]
    segments = [len(t.segments) for t in scored]
    lengths = [len(s) for t in scored for s in t.segments]
    provenance = np.zeros(len(Provenance), dtype=np.int64)
    for segment in (s for t in scored for s in t.segments):
        provenance += np.bincount(segment.provenance, minlength=len(Provenance))
    contexts = [kind for kind in Provenance if kind is not Provenance.SAMPLED]
    return {f"rollout/tokens/{kind.name.lower()}": float(provenance[kind]) / len(scored) for kind in contexts} | {
        "rollout/response_len/mean": float(provenance[Provenance.SAMPLED]) / len(scored),
        "rollout/tokens/segment_max": float(max(lengths, default=0)),
        "rollout/turns/mean": float(np.mean(turns)),
        "rollout/turns/max": float(max(turns)),
        "rollout/turns/cut_by_time": float(np.mean([t.metrics.get("cut_by_time", 0.0) for t in scored])),
        "rollout/segments/mean": float(np.mean(segments)),
        "rollout/segments/max": float(max(segments)),
    }


def _group_shares(groups: Sequence[Group], divide_by_std: bool) -> dict[str, float]:
    """Shares of the groups that have a scored member."""
    rewards = [[t.reward for t in group.scored] for group in groups]
    advantages = np.concatenate([group_relative_advantages(r, divide_by_std=divide_by_std) for r in rewards])
    return {
        "rollout/groups/count": float(len(groups)),
        "rollout/groups/zero_std": float(np.mean([max(r) == min(r) for r in rewards])),
        "rollout/groups/solve_all": float(np.mean([all(t.success for t in g.scored) for g in groups])),
        "rollout/groups/solve_none": float(np.mean([not any(t.success for t in g.scored) for g in groups])),
        "rollout/advantage/abs_mean": float(np.abs(advantages).mean()),
    }
