"""Group-relative advantages against closed forms and a separate float64 computation.

Does not cover their invariances (test_algorithms_credit.py) or how they reach tokens (test_algorithms_batch.py).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.algorithms.advantage import group_relative_advantages

REWARDS = st.lists(st.integers(-40, 40).map(lambda k: k / 8), min_size=1, max_size=12)


def by_hand(rewards: list[float], divide: bool) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    centered = [r - mean for r in rewards]
    if len(rewards) == 1 or len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    std = math.sqrt(math.fsum(c * c for c in centered) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centered] if divide else centered


def test_closed_form_of_one_success_in_four():
    # mean 1/4, unbiased variance (9/16 + 3/16) / 3 = 1/4, so std 1/2.
    advantages = group_relative_advantages([1, 0, 0, 0], divide_by_std=True)
    np.testing.assert_allclose(advantages, np.array([1.5, -0.5, -0.5, -0.5]) / (1 + 2e-6), rtol=1e-12)


@given(REWARDS, st.booleans())
def test_equals_the_brute_force(rewards: list[float], divide: bool):
    np.testing.assert_allclose(
        group_relative_advantages(rewards, divide_by_std=divide), by_hand(rewards, divide), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_an_error(bad: float):
    with pytest.raises(ValueError, match="finite"):
        group_relative_advantages([0.0, bad], divide_by_std=True)
