"""The statistics of an evaluation against closed forms, enumeration and simulation.

Not covered: that tasks are independent, which every interval and test assumes.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from mua.trainer.evaluation.estimators import (
    bootstrap,
    effective_turns,
    mcnemar,
    paired_test,
    pass_at,
    pass_hat,
    resampled_means,
    sign_flip,
    time_weighted_reward,
)


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 3, 6) for c in range(n + 1)])
def test_passes_are_the_shares_of_all_subsets(n: int, c: int) -> None:
    outcomes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(outcomes, k))
        assert pass_hat(n, c, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))
        assert pass_at(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_passes_are_unbiased() -> None:
    """Averaged over the binomial distribution of c, the estimates are exactly p^k and 1 - (1 - p)^k."""
    n, p = 8, 0.3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    for k in range(1, n + 1):
        assert sum(w * pass_hat(n, c, k) for c, w in enumerate(chances)) == pytest.approx(p**k)
        assert sum(w * pass_at(n, c, k) for c, w in enumerate(chances)) == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    for estimate in (pass_hat, pass_at):
        with pytest.raises(ValueError, match="1 <= k <= n"):
            estimate(n, c, k)


def test_turn_measures() -> None:
    assert [effective_turns(r) for r in ([], [0.0, 0.0], [0.0, 0.5, 0.0], [0.0, -1.0])] == [0, 0, 2, 2]
    assert time_weighted_reward([1.0, 0.0, 0.6]) == pytest.approx(1.0 + 0.2)
    assert time_weighted_reward([]) == 0.0


def test_the_bootstrap_is_seeded_and_covers() -> None:
    """Of 300 samples from a known distribution about 95 % of the intervals hold its mean."""
    rng = np.random.default_rng(3)
    samples = rng.beta(2, 3, size=(300, 60))
    held = 0
    for sample in samples:
        found = bootstrap(sample, level=0.95, resamples=400, seed=1)
        assert found.low <= found.mean <= found.high
        held += found.low <= 0.4 <= found.high
    assert 0.90 <= held / 300 <= 0.98
    one, other = (bootstrap(samples[0], level=0.95, resamples=400, seed=1) for _ in range(2))
    assert one == other


def test_the_bootstrap_has_the_spread_of_the_mean() -> None:
    values = np.random.default_rng(0).normal(size=400)
    means = resampled_means(values, 4000, 1)
    assert means.std() == pytest.approx(values.std() / math.sqrt(400), rel=0.05)
    assert len(resampled_means(values[:3], 7, 1)) == 7


def test_tasks_that_all_agree_still_have_an_interval() -> None:
    """Wilson's: 10 of 10 leaves room below, closed form n / (n + z^2)."""
    found = bootstrap([1.0] * 10, level=0.95, resamples=100, seed=1)
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(10 / (10 + 1.959964**2), abs=1e-5)
    assert bootstrap([0.0] * 10, level=0.95, resamples=100, seed=1).high == pytest.approx(1 - found.low)
    assert bootstrap([-3.0] * 10, level=0.95, resamples=100, seed=1) == (-3.0, -3.0, -3.0)
    with pytest.raises(ValueError, match="at least one task"):
        bootstrap([], level=0.95, resamples=100, seed=1)


def test_mcnemar_by_enumeration() -> None:
    for lost, won in itertools.product(range(6), repeat=2):
        flips = list(itertools.product((0, 1), repeat=lost + won))
        extreme = sum(abs(2 * sum(flip) - lost - won) >= abs(won - lost) for flip in flips)
        assert mcnemar(lost, won) == pytest.approx(extreme / len(flips))
    assert mcnemar(1, 9) == pytest.approx(22 / 1024)


def test_single_episodes_are_tested_by_mcnemar_and_shares_by_permutation() -> None:
    first, second = [0.0] * 10 + [1.0] * 5, [1.0] * 9 + [0.0] + [0.0] + [1.0] * 4
    assert paired_test(first, second, seed=1) == ("exact McNemar", mcnemar(1, 9))
    found = paired_test([0.5, 0.0, 0.25], [1.0, 0.5, 0.75], seed=1)
    assert found == ("exact sign-flip permutation", 0.25)  # all three signs alike: 2 of 8


def test_the_drawn_permutation_test_agrees_with_the_exact_one() -> None:
    rng = np.random.default_rng(5)
    differences = rng.normal(0.3, 1.0, size=14)
    exact = sign_flip(differences, seed=1)
    # Tiny differences change no verdict but push the count past what is enumerated.
    drawn = sign_flip(np.concatenate([differences, np.full(4, 1e-7)]), seed=1)
    assert exact.name.startswith("exact")
    assert not drawn.name.startswith("exact")
    assert drawn.p_value == pytest.approx(exact.p_value, abs=0.01)
    assert sign_flip(np.zeros(5), seed=1).p_value == 1.0
    # No drawn assignment reaches 40 tasks that all agree; what was observed is one of them, so that p is never 0.
    assert sign_flip(np.ones(40), seed=1).p_value == 1 / 100_001
