"""Rewards dealt at random: the same rewards, other owners, nothing of the unscored. Not covered: a whole run of it."""

from __future__ import annotations

from collections import Counter

from mua.algorithms.batch import shuffle_rewards
from mua.types import Group, Outcome, Trajectory


def group(ordinal: int, rewards: list[float]) -> Group:
    def one(sample: int, reward: float) -> Trajectory:
        outcome = Outcome.USER_STOP if reward >= 0 else Outcome.USER_ERROR
        return Trajectory("t", ordinal, sample, [], [0.5, reward - 0.5], reward, reward == 1, outcome)

    return Group(ordinal, "t", [one(sample, reward) for sample, reward in enumerate(rewards)])


GROUPS = [group(index, [1.0, 0.0, 0.0, -1.0, float(index % 2)]) for index in range(40)]


def test_the_rewards_of_a_step_stay_and_their_owners_change():
    dealt = shuffle_rewards(GROUPS, 3)
    before = [t.reward for g in GROUPS for t in g.scored]
    after = [t.reward for g in dealt for t in g.scored]
    assert Counter(before) == Counter(after)
    assert sum(a != b for a, b in zip(before, after, strict=True)) > len(before) // 4
    assert all(t.turn_rewards == [0.0, t.reward] and t.success == (t.reward == 1) for g in dealt for t in g.scored)


def test_unscored_members_keep_what_they_have():
    dealt = shuffle_rewards(GROUPS, 3)
    assert [g.trajectories[3] for g in dealt] == [g.trajectories[3] for g in GROUPS]


def test_it_is_the_same_for_the_same_step_and_another_for_the_next():
    assert shuffle_rewards(GROUPS, 3) == shuffle_rewards(GROUPS, 3) != shuffle_rewards(GROUPS, 4)
