"""Which trajectories train: an ordered pipeline over groups, and shaping of their rewards and scores.

Filters see scored trajectories only; whatever they take out is in no group statistics either, so that it cannot shift
the baseline of those that stay. They run in the order of ``algorithm.filters``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mua.algorithms.credit import Floats
from mua.algorithms.faults import malformed_turns, repeated_turns
from mua.config.schema import (
    AlgorithmConfig,
    BalanceFilter,
    GroupFilter,
    MinimumTurnsFilter,
    OverlongFilter,
    RangeFilter,
    ShapingConfig,
)
from mua.types import Group, Outcome, Trajectory

_OVERLONG = frozenset({Outcome.LENGTH, Outcome.MAX_TURNS})


def filtered(groups: Sequence[Group], config: AlgorithmConfig) -> tuple[list[Group], dict[str, float]]:
    """The groups that are left, without their unscored members, and what share of trajectories each filter took.

    A group that is left without members is dropped. Deterministic: what is drawn depends on the group's ordinal alone.
    """
    kept = [replace(group, trajectories=group.scored) for group in groups if group.scored]
    before, taken = sum(len(group.trajectories) for group in kept), Counter[str]()
    for chosen in config.filters:
        passed = [_passed(group, chosen) for group in kept]
        taken[chosen.kind] += sum(len(g.trajectories) - len(p) for g, p in zip(kept, passed, strict=True))
        kept = [replace(g, trajectories=p) for g, p in zip(kept, passed, strict=True) if p]
    shares = {f"filters/{kind}": count / before for kind, count in taken.items()} if before else {}
    return kept, shares | ({"filters/groups_kept": len(kept) / len(groups)} if groups and config.filters else {})


def _passed(group: Group, chosen: GroupFilter) -> list[Trajectory]:
    if isinstance(chosen, RangeFilter):
        return _in_range(group.trajectories, chosen)
    if isinstance(chosen, BalanceFilter):
        return _balanced(group, chosen)
    if isinstance(chosen, MinimumTurnsFilter):
        return [t for t in group.trajectories if not t.success or len(t.turn_rewards) >= chosen.turns]
    return _without_overlong(group, chosen)


def _in_range(members: list[Trajectory], chosen: RangeFilter) -> list[Trajectory]:
    rewards = [t.reward for t in members]
    spread = max(rewards) - min(rewards)
    return members if spread > 0 and spread >= chosen.minimum else []


def _balanced(group: Group, chosen: BalanceFilter) -> list[Trajectory]:
    """At most so many more of either kind than there are of the rarer one (AgentRL: one wrong, two right)."""
    right = [t for t in group.trajectories if t.success]
    wrong = [t for t in group.trajectories if not t.success]
    rarer = min(len(right), len(wrong))
    draw = random.Random(group.ordinal)
    kept = {id(t) for t in _at_most(right, rarer + chosen.extra_right, draw)}
    kept |= {id(t) for t in _at_most(wrong, rarer + chosen.extra_wrong, draw)}
    return [t for t in group.trajectories if id(t) in kept]


def _at_most(members: list[Trajectory], count: int, draw: random.Random) -> list[Trajectory]:
    return members if len(members) <= count else draw.sample(members, count)


def _without_overlong(group: Group, chosen: OverlongFilter) -> list[Trajectory]:
    overlong = [t for t in group.trajectories if t.outcome in _OVERLONG and not t.success]
    reserved = {id(t) for t in _at_most(overlong, chosen.keep, random.Random(group.ordinal))}
    dropped = {id(t) for t in overlong} - reserved
    return [t for t in group.trajectories if id(t) not in dropped]


def penalised(trajectory: Trajectory, shaping: ShapingConfig) -> Trajectory:
    """``trajectory`` with the penalties of its malformed and repeated turns in its turn rewards and its reward."""
    if not (shaping.malformed_turn or shaping.repeated_turn) or not trajectory.sampled_tokens:
        return trajectory
    malformed, repeated = malformed_turns(trajectory.messages), repeated_turns(trajectory.messages)
    penalties = [
        shaping.malformed_turn * m + shaping.repeated_turn * r for m, r in zip(malformed, repeated, strict=True)
    ]
    rewards = [reward - penalty for reward, penalty in zip(trajectory.turn_rewards, penalties, strict=True)]
    return replace(trajectory, turn_rewards=rewards, reward=trajectory.reward - sum(penalties))


def capped(advantages: Floats, trajectory: Trajectory, shaping: ShapingConfig) -> Floats:
    """``advantages`` of the trajectory's turns, ``[T]``, at most 0 where a turn was malformed or repeated.

    AgentRL's treatment of such turns: what was discouraged stays so, and their rewards are left alone.
    """
    if not shaping.cap_faulty_turns or not trajectory.sampled_tokens:
        return advantages
    faulty = np.array(malformed_turns(trajectory.messages)) | np.array(repeated_turns(trajectory.messages))
    return np.where(faulty, np.minimum(advantages, 0.0), advantages)


def shaped(scores: Floats, members: Sequence[Trajectory], shaping: ShapingConfig) -> Floats:
    """The scores of one group after shaping, ``[n]``; what the advantages are computed from."""
    result = scores.astype(np.float64)
    if shaping.turn_efficiency:
        result = result + shaping.turn_efficiency * _efficiency(members)
    if shaping.overlong_tokens:
        result = result - np.array([_overlong_penalty(t.sampled_tokens, shaping) for t in members])
    return result


def _efficiency(members: Sequence[Trajectory]) -> Floats:
    """Ranks by turns in [-1, 1] with mean 0: successes earn more the fewer turns they took, failures the more.

    AgentRL's efficient rewarding; each kind is ranked by itself, ties share their mean rank.
    """
    bonus = np.zeros(len(members))
    for success, sign in ((True, -1.0), (False, 1.0)):
        places = [i for i, t in enumerate(members) if t.success is success]
        if len(places) > 1:
            turns = np.array([len(members[i].turn_rewards) for i in places], dtype=np.float64)
            bonus[places] = sign * _centred_ranks(turns)
    return bonus


def _centred_ranks(values: Floats) -> Floats:
    """Mean-tied ranks scaled to [-1, 1]."""
    ranks = np.array([(values < v).sum() + ((values == v).sum() - 1) / 2 for v in values])
    scaled: Floats = 2 * ranks / (len(values) - 1) - 1
    return scaled


def _overlong_penalty(tokens: int, shaping: ShapingConfig) -> float:
    """DAPO's soft punishment (arXiv 2503.14476): rises from 0 to 1 over the last ``overlong_buffer`` tokens."""
    over = tokens - (shaping.overlong_tokens - shaping.overlong_buffer)
    return float(np.clip(over / shaping.overlong_buffer, 0.0, 1.0)) if shaping.overlong_buffer else float(over > 0)
