"""Filters and shaping: what is taken out, what stays of the statistics, what shaping gives.

Does not cover the loop that calls them, or filling up what was taken out: groups are not replaced; nor that shaping
reaches the gradient (test_algorithms_groups.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.batch import filter_groups, make_batch, shape_scores
from mua.config.schema import AlgorithmConfig, ShapingConfig
from mua.types import Group, Outcome, Trajectory
from tests.segments import segment_of


def member(reward: float, *, turns: int = 1, tokens: int = 1, outcome: Outcome = Outcome.USER_STOP) -> Trajectory:
    segment = segment_of([True] * tokens, logprobs=0.0)
    rewards = [0.0] * (turns - 1) + [reward]
    return Trajectory("t", 0, 0, [segment], rewards, reward, reward > 0.5, outcome)


def group(*members: Trajectory, ordinal: int = 0) -> Group:
    return Group(ordinal, "t", list(members))


def passed(groups: list[Group], *filters: dict) -> tuple[list[list[float]], dict[str, float]]:
    kept, shares = filter_groups(groups, AlgorithmConfig.model_validate({"filters": list(filters)}))
    return [[t.reward for t in g.trajectories] for g in kept], shares


def test_groups_without_a_difference_are_dropped():
    groups = [group(member(0.4), member(0.4)), group(member(0.4), member(0.45)), group(member(0.0), member(1.0))]
    assert passed(groups, {"kind": "range"}) == (
        [[0.4, 0.45], [0.0, 1.0]],
        {"rollout/filters/range": 2 / 6, "rollout/filters/groups_kept": 2 / 3},
    )
    assert passed(groups, {"kind": "range", "minimum": 0.1})[0] == [[0.0, 1.0]]
    unscored = group(member(0.0), member(1.0, outcome=Outcome.TIMEOUT))
    assert passed([unscored], {"kind": "range"})[0] == []


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
def test_balance_keeps_a_bounded_surplus_and_always_the_same(right, wrong, extra_right, extra_wrong, ordinal):
    members = [member(1.0) for _ in range(right)] + [member(0.0) for _ in range(wrong)]
    if not members:
        return
    chosen = {"kind": "balance", "extra_right": extra_right, "extra_wrong": extra_wrong}
    kept, _ = passed([group(*members, ordinal=ordinal)], chosen)
    rewards = kept[0] if kept else []
    rarer = min(right, wrong)
    assert rewards.count(1.0) == min(right, rarer + extra_right)
    assert rewards.count(0.0) == min(wrong, rarer + extra_wrong)
    assert passed([group(*members, ordinal=ordinal)], chosen)[0] == kept


def test_quick_successes_and_overlong_failures():
    quick, slow, quick_failure = member(1.0, turns=1), member(1.0, turns=3), member(0.0, turns=1)
    chosen = {"kind": "minimum_turns", "turns": 2}
    kept, _ = filter_groups([group(quick, slow, quick_failure)], AlgorithmConfig.model_validate({"filters": [chosen]}))
    assert kept[0].trajectories == [slow, quick_failure]
    long = [member(0.0, outcome=outcome) for outcome in (Outcome.LENGTH, Outcome.MAX_TURNS, Outcome.LENGTH)]
    success = member(1.0, outcome=Outcome.MAX_TURNS)
    for keep in (0, 2):
        config = AlgorithmConfig.model_validate({"filters": [{"kind": "overlong", "keep": keep}]})
        (left,), shares = filter_groups([group(*long, success)], config)
        assert len(left.trajectories) == keep + 1
        assert success in left.trajectories
        assert shares["rollout/filters/overlong"] == (3 - keep) / 4


def test_filters_run_in_order():
    lone = [group(member(1.0, turns=1), member(0.0, turns=4))]
    turns, spread = {"kind": "minimum_turns", "turns": 2}, {"kind": "range"}
    assert passed(lone, spread, turns)[0] == [[0.0]]
    assert passed(lone, turns, spread)[0] == []


def test_what_was_taken_out_does_not_shift_the_baseline():
    groups = [group(member(1.0, turns=1), member(1.0, turns=5), member(0.0, turns=5))]
    config = AlgorithmConfig.model_validate({"advantage": "rloo", "filters": [{"kind": "minimum_turns", "turns": 2}]})
    kept, _ = filter_groups(groups, config)
    assert [s.advantages[0] for s in make_batch(kept, config, 1.0)] == [1.0, -1.0]


def test_turn_efficiency_prefers_short_successes_and_long_failures_and_sums_to_nothing():
    members = [member(1.0, turns=t) for t in (2, 4, 6)] + [member(0.0, turns=t) for t in (1, 3)]
    scores = np.array([t.reward for t in members])
    found = shape_scores(scores, members, ShapingConfig(turn_efficiency=0.1)) - scores
    np.testing.assert_allclose(found, [0.1, 0.0, -0.1, -0.1, 0.1], atol=1e-12)
    tied = [member(1.0, turns=2) for _ in range(3)]
    assert not (shape_scores(np.ones(3), tied, ShapingConfig(turn_efficiency=0.1)) - 1).any()


@pytest.mark.parametrize(("tokens", "lost"), [(10, 0.0), (60, 0.0), (80, 0.5), (100, 1.0), (500, 1.0)])
def test_overlong_answers_lose_step_by_step(tokens: int, lost: float):
    shaping = ShapingConfig(overlong_tokens=100, overlong_buffer=40)
    assert shape_scores(np.ones(1), [member(1.0, tokens=tokens)], shaping).tolist() == pytest.approx([1 - lost])
