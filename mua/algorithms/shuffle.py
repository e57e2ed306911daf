"""A control for every claim that rewards taught something: the same run, its rewards dealt at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from mua.types import Group, Trajectory


def shuffled(groups: Sequence[Group], version: int) -> list[Group]:
    """The groups with the rewards of all scored trajectories of the step dealt anew among them.

    Their distribution stays, what they say of a trajectory goes. A dealt reward is an outcome reward: it stands in the
    last turn. The same for the same groups and ``version``.
    """
    rewards = [(t.reward, t.success) for group in groups for t in group.scored]
    random.Random(f"shuffled/{version}").shuffle(rewards)
    left = iter(rewards)

    def dealt(trajectory: Trajectory) -> Trajectory:
        if not trajectory.scored:
            return trajectory
        reward, success = next(left)
        turns = [0.0] * (len(trajectory.turn_rewards) - 1) + [reward]
        return replace(trajectory, reward=reward, success=success, turn_rewards=turns)

    return [replace(group, trajectories=[dealt(t) for t in group.trajectories]) for group in groups]
