"""The statistics of an evaluation: unbiased estimates, intervals, tests of a difference. Pure functions of numbers.

The task is the unit of everything: tasks are what the policy will meet other ones of, so intervals resample tasks, with
all their episodes, and never single episodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MAX_K = 8
"""Largest k that is reported."""
EXACT_FLIPS = 16
"""Up to so many tasks that differ, a permutation test goes through all 2^n signs."""
RANDOM_FLIPS = 100_000
"""Signs that are drawn where there are more."""


class Interval(NamedTuple):
    """A mean and its confidence bounds."""

    mean: float
    low: float
    high: float


def pass_hat(episodes: int, successes: int, k: int) -> float:
    """Probability that k episodes of one task *all* succeed (pass^k): ``C(c, k) / C(n, k)``.

    Unbiased for ``p^k`` from n independent episodes with c successes (Yao et al. 2024, tau-bench, section 3).
    Raises ``ValueError`` where k is not in 1 .. n.
    """
    _check(episodes, successes, k)
    return math.comb(successes, k) / math.comb(episodes, k)


def pass_at(episodes: int, successes: int, k: int) -> float:
    """Probability that *any* of k episodes of one task succeeds (pass@k): ``1 - C(n - c, k) / C(n, k)``.

    Unbiased for ``1 - (1 - p)^k`` from n independent episodes with c successes (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", equation 1). Raises ``ValueError`` where k is not in 1 .. n.
    """
    _check(episodes, successes, k)
    return 1.0 - math.comb(episodes - successes, k) / math.comb(episodes, k)


def effective_turns(turn_rewards: Sequence[float]) -> int:
    """Assistant turns up to and including the last with a non-zero reward; 0 if there is none (UserRL)."""
    paid = [index for index, reward in enumerate(turn_rewards, start=1) if reward != 0]
    return paid[-1] if paid else 0


def time_weighted_reward(turn_rewards: Sequence[float]) -> float:
    """``sum_i r_i / (i + 1)`` over assistant turns i = 0, 1, ... (UserRL): the same reward is worth less when late."""
    return math.fsum(reward / (index + 1) for index, reward in enumerate(turn_rewards))


def wilson(successes: int, tasks: int, level: float) -> Interval:
    """Wilson score interval of a success rate (Wilson 1927)."""
    from scipy.stats import binomtest  # a second, which only those pay who need it

    low, high = binomtest(successes, tasks).proportion_ci(level, method="wilson")
    return Interval(successes / tasks, float(low), float(high))


def bootstrap(values: Sequence[float], *, level: float, resamples: int, seed: int) -> Interval:
    """Mean over tasks with a percentile bootstrap interval (Efron 1979), tasks resampled with replacement.

    The same for the same values in whatever order they come.
    Where all tasks agree on 0 or on 1 resampling sees no spread at all; the Wilson interval of so many tasks stands in
    then. Raises ``ValueError`` without values.
    """
    if not len(values):
        raise ValueError("an interval needs at least one task")
    array = np.sort(np.asarray(values, np.float64))
    if array[0] == array[-1] and array[0] in (0.0, 1.0):
        return wilson(int(array.sum()), len(array), level)
    return percentile_interval(array, level=level, resamples=resamples, seed=seed)


def percentile_interval(values: Floats, *, level: float, resamples: int, seed: int) -> Interval:
    """Mean of ``values`` (``[T]``) and the percentiles of its resampled means, which depend on their order."""
    mean = float(values.mean())
    low, high = np.quantile(resampled_means(values, resamples, seed), [(1 - level) / 2, (1 + level) / 2])
    return Interval(mean, min(float(low), mean), max(float(high), mean))


def resampled_means(values: Floats, resamples: int, seed: int) -> Floats:
    """Means of bootstrap resamples of ``values`` (``[T]``), ``[resamples]``.

    ``scipy.stats.bootstrap`` draws other resamples: the figures of docs/benchmarks are of these.
    """
    rng, count = np.random.default_rng(seed), len(values)
    rows = max(1, 4_000_000 // count)  # bounds the memory of one block of weights to 32 MB
    blocks = [min(rows, resamples - start) for start in range(0, resamples, rows)]
    even = np.full(count, 1.0 / count)
    return np.concatenate([rng.multinomial(count, even, size=block) @ values / count for block in blocks])


class Verdict(NamedTuple):
    """What a test of no difference says."""

    name: str
    p_value: float
    """Two-sided."""


def paired_test(first: Sequence[float], second: Sequence[float], *, seed: int) -> Verdict:
    """McNemar's exact test where every value is 0 or 1 (one episode a task), else a sign-flip permutation test."""
    if set(first) | set(second) <= {0.0, 1.0}:
        lost = sum(a > b for a, b in zip(first, second, strict=True))
        won = sum(a < b for a, b in zip(first, second, strict=True))
        return Verdict("exact McNemar", mcnemar(lost, won))
    return sign_flip(np.subtract(second, first), seed=seed)


def mcnemar(lost: int, won: int) -> float:
    """Two-sided exact p-value of McNemar's test (1947) from the discordant pairs.

    Under no difference ``won`` is binomial(lost + won, 1/2): ``p = min(1, 2 * P(X <= min(lost, won)))``.
    """
    from scipy.stats import binomtest

    return float(binomtest(won, lost + won).pvalue) if lost + won else 1.0


def sign_flip(differences: Floats, *, seed: int) -> Verdict:
    """Permutation test of a zero mean over tasks (Fisher 1935): under no difference each task's sign is a coin's.

    p is the share of sign assignments whose mean is at least as far from 0. All of them are tried where at most
    ``EXACT_FLIPS`` tasks differ; otherwise ``RANDOM_FLIPS`` are drawn, and the observed one counts among them.
    ``scipy.stats.permutation_test`` would draw others than those behind the figures of docs/benchmarks.
    """
    moved = differences[differences != 0]
    observed = abs(moved.sum()) - 1e-9
    if len(moved) <= EXACT_FLIPS:
        numbers = np.arange(2 ** len(moved))[:, None]
        signs = 1.0 - 2.0 * (numbers >> np.arange(len(moved)) & 1)
        return Verdict("exact sign-flip permutation", float(np.mean(np.abs(signs @ moved) >= observed)))
    rng, reached, done = np.random.default_rng(seed), 0, 0
    while done < RANDOM_FLIPS:
        rows = min(RANDOM_FLIPS - done, max(1, 4_000_000 // len(moved)))
        signs = rng.choice((-1.0, 1.0), size=(rows, len(moved)))
        reached += int((np.abs(signs @ moved) >= observed).sum())
        done += rows
    return Verdict("sign-flip permutation", (reached + 1) / (RANDOM_FLIPS + 1))


def _check(episodes: int, successes: int, k: int) -> None:
    if not (1 <= k <= episodes and 0 <= successes <= episodes):
        raise ValueError(f"k={k} needs 1 <= k <= n and 0 <= c <= n; n is {episodes}, c is {successes}")
