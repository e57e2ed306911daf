"""Scores, turn credits and estimators against closed forms, UserRL's formula written out token by token, enumeration.

Does not cover how they reach a batch (test_algorithms_batch.py).
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.advantage import (
    clamp_signs,
    group_advantages,
    leave_one_out,
    pass_at_k_advantages,
    spread_advantage,
    trajectory_score,
    turn_credits,
    whiten,
)

REWARDS = st.lists(st.integers(-8, 8).map(lambda k: k / 8), min_size=1, max_size=8)
POSITIVE = st.lists(st.integers(0, 8).map(lambda k: k / 8), min_size=1, max_size=8)
NAMES = st.sampled_from(["equal", "reward_to_go", "exponential", "signed"])


@given(REWARDS, st.floats(0.1, 1.0))
def test_scores_written_out(rewards: list[float], gamma: float):
    total = math.fsum(rewards)
    assert trajectory_score(rewards, "sum") == pytest.approx(total)
    assert trajectory_score(rewards, "mean") == pytest.approx(total / len(rewards))
    assert trajectory_score(rewards, "terminal") == rewards[-1]
    discounted = math.fsum(r * gamma**t for t, r in enumerate(rewards))
    assert trajectory_score(rewards, "discounted", gamma=gamma) == pytest.approx(discounted)


@given(REWARDS, st.floats(0.1, 1.0), st.floats(0.5, 4.0))
def test_credits_written_out(rewards: list[float], gamma: float, k: float):
    turns = range(len(rewards))
    assert turn_credits(rewards, "equal").tolist() == [1.0] * len(rewards)
    assert turn_credits(rewards, "signed").tolist() == rewards
    to_go = [math.fsum(gamma ** (j - t) * rewards[j] for j in turns if j >= t) for t in turns]
    np.testing.assert_allclose(turn_credits(rewards, "reward_to_go", gamma=gamma), to_go, atol=1e-12)
    mapped = [0.5 + 0.5 * (1 - math.exp(-k * r)) / (1 - math.exp(-k)) for r in rewards]
    np.testing.assert_allclose(turn_credits(rewards, "exponential", k=k), mapped, rtol=1e-12)


def by_token(advantage: float, credits: list[float], tokens: list[int]) -> list[list[float]]:
    """UserRL's code: z of every token, scaled so that the mean over tokens with z != 0 is the advantage."""
    z = [[c] * n for c, n in zip(credits, tokens, strict=True)]
    flat = [value for turn in z for value in turn]
    nonzero, total = sum(value != 0 for value in flat), math.fsum(flat)
    return [[advantage * value * nonzero / total if total else 0.0 for value in turn] for turn in z]


@given(POSITIVE, NAMES, st.floats(-3, 3), st.data())
def test_spreading_is_userrls_formula_while_credits_are_not_negative(rewards, name, advantage, data):
    tokens = data.draw(st.lists(st.integers(1, 5), min_size=len(rewards), max_size=len(rewards)))
    credits = turn_credits(rewards, name, gamma=0.8)
    expected = by_token(advantage, credits.tolist(), tokens)
    for form in (True, False):
        found = spread_advantage(advantage, credits, np.array(tokens), signed_sum=form)
        np.testing.assert_allclose(found, [turn[0] for turn in expected], rtol=1e-9, atol=1e-12)


def test_a_negative_sum_of_credits_turns_the_literal_form_round_but_not_the_robust_one():
    credits, tokens = np.array([-1.0, 0.5]), np.array([1, 1])
    assert spread_advantage(1.0, credits, tokens).tolist() == pytest.approx([-4 / 3, 2 / 3])
    assert spread_advantage(1.0, credits, tokens, signed_sum=True).tolist() == pytest.approx([4.0, -2.0])


@given(st.lists(st.integers(0, 8).map(float), min_size=2, max_size=8))
def test_leave_one_out_is_the_score_above_the_mean_of_the_others(rewards: list[float]):
    total = math.fsum(rewards)
    expected = [r - (total - r) / (len(rewards) - 1) for r in rewards]
    np.testing.assert_allclose(leave_one_out(rewards), expected, atol=1e-12)


def test_agentrls_numbers():
    np.testing.assert_allclose(leave_one_out([1, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(clamp_signs(leave_one_out([1, 0, 0, 0]), [1, 0, 0, 0], 0.5), [1, -1 / 3, -1 / 3, -1 / 3])
    graded = [0.4, 0.2, 0.2, 0.2]
    assert leave_one_out(graded)[0] == pytest.approx(0.2)
    assert clamp_signs(leave_one_out(graded), graded, 0.5)[0] == 0.0


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_mean_over_all_subsets(rewards: list[float], data):
    n = len(rewards)
    k = data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    values = [float(any(rewards[i] for i in subset)) for subset in subsets]
    mean = sum(values) / len(values)
    std = math.sqrt(mean * (1 - mean))
    expected = []
    for member in range(n):
        of_member = [v for subset, v in zip(subsets, values, strict=True) if member in subset]
        expected.append((sum(of_member) / len(of_member) - mean) / std if std > 1e-12 else 0.0)
    np.testing.assert_allclose(pass_at_k_advantages(rewards, k), expected, atol=1e-9)


@given(REWARDS, st.data(), st.randoms(use_true_random=False))
def test_pass_at_k_knows_successes_only_and_follows_permutations(rewards: list[float], data, order):
    k = data.draw(st.integers(1, len(rewards)))
    found = pass_at_k_advantages(rewards, k)
    np.testing.assert_array_equal(pass_at_k_advantages([float(r > 0) for r in rewards], k), found)
    places = list(range(len(rewards)))
    order.shuffle(places)
    np.testing.assert_array_equal(pass_at_k_advantages([rewards[i] for i in places], k), found[places])
    assert abs(found.sum()) < 1e-9


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-1, 1)), max_size=8), st.floats(-1, 1))
def test_the_sign_clamp_member_by_member(pairs: list[tuple[float, float]], threshold: float):
    advantages = np.array([a for a, _ in pairs])
    expected = [max(a, 0.0) if r > threshold else min(a, 0.0) for a, r in pairs]
    assert clamp_signs(advantages, [r for _, r in pairs], threshold).tolist() == expected


@given(st.lists(st.integers(-8, 8).map(float), min_size=2, max_size=8), st.data())
def test_whitening_is_over_tokens(advantages: list[float], data):
    tokens = data.draw(st.lists(st.integers(1, 4), min_size=len(advantages), max_size=len(advantages)))
    found = whiten(np.array(advantages), np.array(tokens))
    per_token = np.repeat(found, tokens)
    if len(set(advantages)) == 1:
        assert found.tolist() == advantages
    else:
        assert per_token.mean() == pytest.approx(0.0, abs=1e-9)
        assert per_token.var() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus"])
@given(rewards=REWARDS, shift=st.integers(-4, 4), order=st.randoms(use_true_random=False))
def test_estimators_are_blind_to_shifts_and_follow_permutations(name, rewards, shift, order):
    plain = group_advantages(rewards, name)
    np.testing.assert_allclose(group_advantages([r + shift for r in rewards], name), plain, atol=1e-9)
    places = list(range(len(rewards)))
    order.shuffle(places)
    np.testing.assert_allclose(group_advantages([rewards[i] for i in places], name), plain[places], atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "pass_at_k"])
def test_equal_scores_and_lone_members_have_no_advantage(name):
    assert not group_advantages([0.7] * 4, name).any()
    assert not group_advantages([0.7], name, k=1).any()
