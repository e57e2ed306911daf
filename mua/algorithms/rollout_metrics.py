"""What a step's rollouts looked like, in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mua.algorithms.advantage import agree, group_relative_advantages
from mua.types import Group, Outcome, Provenance, Trajectory

GRAM = 4
_PRIME = np.uint64(0x9E3779B97F4A7C15)
"""Odd, with evenly spread bits: base of a polynomial hash of four ids in 64 bits, which different ones hardly share."""
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
        used = Counter(
            name.removeprefix("tool_calls/")
            for trajectory in scored
            for name, count in trajectory.metrics.items()
            if name.startswith("tool_calls/") and count
        )
        metrics |= {f"env/tool_used/{name}": used[name] / len(scored) for name in sorted(used)}  # share of episodes
        metrics |= diversity(scored)
        rewards, lengths = np.array([(t.reward, t.sampled_tokens) for t in scored], np.float64).T
        if rewards.std() and lengths.std():
            metrics["rollout/reward/length_correlation"] = float(np.corrcoef(rewards, lengths)[0, 1])
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
            of_domain = (group for group in groups if any(t.domain == name for t in group.scored))
            of_groups = ([t.reward for t in group.acted if t.domain == name] for group in of_domain)
            found |= _rewards(scored) | {
                "turns": float(np.mean([len(t.turn_rewards) for t in scored])),
                "sampled_tokens": float(np.mean([t.sampled_tokens for t in scored])),
                "zero_std": float(np.mean([agree(r) for r in of_groups])),
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
    """Shares of the groups that have a scored member; rewards are compared where members sampled something."""
    rewards = [[t.reward for t in group.acted] for group in groups]
    advantages = np.concatenate([group_relative_advantages(r, divide_by_std=divide_by_std) for r in rewards])
    return {
        "rollout/groups/count": float(len(groups)),
        "rollout/groups/zero_std": float(np.mean([agree(r) for r in rewards])),
        "rollout/groups/solve_all": float(np.mean([all(t.success for t in g.scored) for g in groups])),
        "rollout/groups/solve_none": float(np.mean([not any(t.success for t in g.scored) for g in groups])),
    } | ({"rollout/advantage/abs_mean": float(np.abs(advantages).mean())} if len(advantages) else {})


def diversity(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Shares of what is distinct, under ``rollout/diversity/``; nothing of what nobody said.

    ``distinct_4grams`` of all runs of four sampled tokens within a turn (distinct-n: Li et al. 2016, arXiv:1510.03055),
    ``unique_turns`` of all turns, ``unique_episodes`` of all episodes, each as the sampled tokens.
    """
    grams: list[npt.NDArray[np.uint64]] = []
    turns: list[bytes] = []
    episodes: list[bytes] = []
    for trajectory in trajectories:
        own: list[bytes] = []
        for segment in trajectory.segments:
            chosen = np.flatnonzero(segment.loss_mask)
            ids, turn = segment.ids[chosen], segment.turn[chosen]
            for part in np.split(ids, np.flatnonzero(np.diff(turn)) + 1) if len(ids) else ():
                own.append(part.tobytes())
                wide, hashed = part.astype(np.uint64), np.zeros(max(0, len(part) - GRAM + 1), np.uint64)
                for place in range(GRAM):
                    hashed = hashed * _PRIME + wide[place : place + len(hashed)]
                grams.append(hashed)
        turns += own
        episodes += [b"|".join(own)] if own else []
    shares = {"unique_turns": turns, "unique_episodes": episodes}
    found = {name: len(set(members)) / len(members) for name, members in shares.items() if members}
    every = np.sort(np.concatenate(grams or [np.zeros(0, np.uint64)]))  # np.unique hashes: 14 times as long
    if len(every):
        found["distinct_4grams"] = (1 + int(np.count_nonzero(every[1:] != every[:-1]))) / len(every)
    return {f"rollout/diversity/{name}": share for name, share in found.items()}
