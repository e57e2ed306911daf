"""Which trajectories train: an ordered pipeline over groups, and shaping of their rewards and scores.

Filters see scored trajectories only; whatever they take out is in no group statistics either, so that it cannot shift
the baseline of those that stay. They run in the order of ``algorithm.filters``.

Shaping reads which turns of a conversation were malformed, and which repeat what was done or said before. A turn is an
assistant message. Messages are those of :class:`mua.types.Trajectory`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mua.algorithms.advantage import Floats
from mua.config.schema import (
    AlgorithmConfig,
    BalanceFilter,
    GroupFilter,
    MinimumTurnsFilter,
    RangeFilter,
    ShapingConfig,
)
from mua.types import Group, Json, Outcome, Trajectory
from mua.utils.hooks import call_hook, wrong_result
from mua.utils.seeds import derived_seed, named_random


def filter_groups(groups: Sequence[Group], config: AlgorithmConfig) -> tuple[list[Group], dict[str, float]]:
    """The groups that are left, without their unscored members, and what share of trajectories each filter took.

    A group that is left without members is dropped. Deterministic: what is drawn depends on the group's ordinal alone.
    """
    kept = [replace(group, trajectories=group.scored) for group in groups if group.scored]
    before, taken = sum(len(group.trajectories) for group in kept), Counter[str]()
    for chosen in config.filters:
        passed = [replace(group, trajectories=_passed(group, chosen)) for group in kept]
        taken[chosen.kind] += sum(len(g.trajectories) - len(p.trajectories) for g, p in zip(kept, passed, strict=True))
        kept = [group for group in passed if group.trajectories]
    if (path := config.group_filter) is not None:
        passed = [replace(group, trajectories=_passed_by_hook(group, path, config)) for group in kept]
        taken["hook"] = sum(len(g.trajectories) - len(p.trajectories) for g, p in zip(kept, passed, strict=True))
        kept = [group for group in passed if group.trajectories]
    shares = {f"rollout/filters/{kind}": count / before for kind, count in taken.items()} if before else {}
    return kept, shares | ({"rollout/filters/groups_kept": len(kept) / len(groups)} if groups and taken else {})


def _passed(group: Group, chosen: GroupFilter) -> list[Trajectory]:
    members, draw = group.trajectories, random.Random(derived_seed("filter", group.ordinal))

    def at_most(count: int, among: list[Trajectory]) -> list[Trajectory]:
        return among if len(among) <= count else draw.sample(among, count)

    if isinstance(chosen, RangeFilter):
        rewards = [t.reward for t in members]
        spread = max(rewards) - min(rewards)
        return members if spread > 0 and spread >= chosen.minimum else []
    right, wrong = [t for t in members if t.success], [t for t in members if not t.success]
    if isinstance(chosen, MinimumTurnsFilter):
        dropped = [t for t in right if len(t.turn_rewards) < chosen.turns]
    elif isinstance(chosen, BalanceFilter):
        # At most so many more of either kind than there are of the rarer one (AgentRL: one wrong, two right).
        rarer = min(len(right), len(wrong))
        kept = at_most(rarer + chosen.extra_right, right) + at_most(rarer + chosen.extra_wrong, wrong)
        dropped = _without(members, kept)
    else:
        overlong = [t for t in wrong if t.outcome in (Outcome.LENGTH, Outcome.MAX_TURNS)]
        dropped = _without(overlong, at_most(chosen.keep, overlong))
    return _without(members, dropped)


def _passed_by_hook(group: Group, path: str, config: AlgorithmConfig) -> list[Trajectory]:
    key, members = "algorithm.group_filter", {id(t) for t in group.trajectories}
    found = call_hook(key, path, group, config)
    if not isinstance(found, list | tuple) or not all(id(t) in members for t in found):
        raise wrong_result(key, path, f"gave {type(found).__name__}, which is no list of the group's trajectories")
    return list(found)


def _without(members: list[Trajectory], dropped: list[Trajectory]) -> list[Trajectory]:
    gone = {id(t) for t in dropped}  # trajectories hold arrays, which know no equality
    return [t for t in members if id(t) not in gone]


def penalize_turns(trajectory: Trajectory, shaping: ShapingConfig) -> Trajectory:
    """``trajectory`` with the penalties of its malformed and repeated turns in its turn rewards and its reward."""
    if not (shaping.malformed_turn or shaping.repeated_turn) or not trajectory.sampled_tokens:
        return trajectory
    malformed, repeated = malformed_turns(trajectory.messages), repeated_turns(trajectory.messages)
    penalties = [
        shaping.malformed_turn * m + shaping.repeated_turn * r for m, r in zip(malformed, repeated, strict=True)
    ]
    rewards = [reward - penalty for reward, penalty in zip(trajectory.turn_rewards, penalties, strict=True)]
    return replace(trajectory, turn_rewards=rewards, reward=trajectory.reward - sum(penalties))


def cap_faulty_turns(advantages: Floats, trajectory: Trajectory, shaping: ShapingConfig) -> Floats:
    """``advantages`` of the trajectory's turns, ``[T]``, at most 0 where a turn was malformed or repeated.

    AgentRL's treatment of such turns: what was discouraged stays so, and their rewards are left alone.
    """
    if not shaping.cap_faulty_turns or not trajectory.sampled_tokens:
        return advantages
    faulty = np.array(malformed_turns(trajectory.messages)) | np.array(repeated_turns(trajectory.messages))
    return np.where(faulty, np.minimum(advantages, 0.0), advantages)


def shape_scores(scores: Floats, members: Sequence[Trajectory], shaping: ShapingConfig) -> Floats:
    """The scores of one group after shaping, ``[n]``; what the advantages are computed from.

    ``turn_efficiency`` (AgentRL's efficient rewarding) adds ranks by turns in [-1, 1] with mean 0: successes earn more
    the fewer turns they took, failures the more; each kind is ranked by itself, ties share their mean rank.
    ``overlong_tokens`` (DAPO's soft punishment, arXiv 2503.14476) takes a penalty that rises from 0 to 1 over the last
    ``overlong_buffer`` tokens.
    """
    result = scores.astype(np.float64)
    if shaping.turn_efficiency:
        from scipy.stats import rankdata  # seconds of imports, which only those pay who need it

        bonus = np.zeros(len(members))
        for success, sign in ((True, -1.0), (False, 1.0)):
            places = [i for i, t in enumerate(members) if t.success is success]
            if len(places) > 1:
                ranks = rankdata([len(members[i].turn_rewards) for i in places]) - 1
                bonus[places] = sign * (2 * ranks / (len(places) - 1) - 1)
        result = result + shaping.turn_efficiency * bonus
    if shaping.overlong_tokens:
        sampled = np.array([t.sampled_tokens for t in members])
        over, buffer = sampled - (shaping.overlong_tokens - shaping.overlong_buffer), shaping.overlong_buffer
        result = result - (np.clip(over / buffer, 0.0, 1.0) if buffer else (over > 0).astype(np.float64))
    return result


def malformed_turns(messages: Sequence[Json]) -> list[bool]:
    """For every turn: it holds something that is no acceptable tool call, or nothing at all.

    Not acceptable is what cannot be read, names no tool or breaks its schema (``tool_call_errors``). A turn that was
    cut by a budget is not malformed.
    """
    return [
        bool(turn.get("tool_call_errors"))
        or not ((turn.get("content") or "").strip() or turn.get("tool_calls") or turn.get("truncated"))
        for turn in messages
        if turn["role"] == "assistant"
    ]


def repeated_turns(messages: Sequence[Json]) -> list[bool]:
    """For every turn: one of its tool calls was made before, with the same arguments; or, without a call, its text was.

    Arguments are compared as JSON values, texts without regard to white space. That the world changed in between does
    not excuse a call: whether to look again is for the policy to find out.
    """
    seen: set[str] = set()
    repeated = []
    for turn in messages:
        if turn["role"] == "assistant":
            # What the turn did, in a form that is equal where the deed is.
            calls = [call["function"] for call in turn.get("tool_calls") or ()]
            actions = [json.dumps(["call", f["name"], json.loads(f["arguments"])], sort_keys=True) for f in calls]
            if not calls and (words := (turn.get("content") or "").split()):
                actions = [json.dumps(["text", *words])]
            repeated.append(any(action in seen for action in actions) or len(set(actions)) < len(actions))
            seen.update(actions)
    return repeated


def shuffle_rewards(groups: Sequence[Group], version: int) -> list[Group]:
    """The groups with the rewards of all scored trajectories of the step dealt anew among them.

    A control for every claim that rewards taught something: the same run, its rewards dealt at random. Their
    distribution stays, what they say of a trajectory goes. A dealt reward is an outcome reward: it stands in the last
    turn. The same for the same groups and ``version``.
    """
    rewards = [(t.reward, t.success) for group in groups for t in group.scored]
    named_random("shuffled", version).shuffle(rewards)
    left = iter(rewards)

    def dealt(trajectory: Trajectory) -> Trajectory:
        if not trajectory.scored:
            return trajectory
        reward, success = next(left)
        turns = [0.0] * (len(trajectory.turn_rewards) - 1) + [reward]
        return replace(trajectory, reward=reward, success=success, turn_rewards=turns)

    return [replace(group, trajectories=[dealt(t) for t in group.trajectories]) for group in groups]
