"""Advantages: how much better a trajectory did than the others of its task, or of the whole batch, and which turn
earned it.

Every estimator sees the scores of one group (``[n]``, scored members that sampled something) and gives an advantage
each. A group whose scores are all equal, one-element groups included, gives exactly 0 everywhere: without a difference
there is nothing to be relative to. Only ``reinforce_plus_plus`` compares across groups as well, see :func:`whiten`.

Credit: a trajectory's score comes from its turns' rewards, and its advantage is spread over its turns. Notation: turns
``t = 1..T`` with rewards ``r_t``; ``gamma`` the discount; ``A`` the trajectory's advantage; ``n_t`` tokens of turn
``t`` are trained. The forms are UserRL's (arXiv 2509.19736) as its code has them. Its paper prints another advantage,
``(c_t - mean) / std`` over the group, under which equal credit would give every trajectory the same advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, sqrt
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
AdvantageName = Literal["grpo", "rloo", "reinforce_plus_plus", "pass_at_k", "none"]
ScoreName = Literal["sum", "terminal", "mean", "discounted"]
CreditName = Literal["equal", "reward_to_go", "exponential", "signed"]
TOLERANCE = 1e-6
"""Difference of two rewards, of their size or of 1, up to which they are one: sums of fractions are off by rounding."""


def agree(rewards: Sequence[float] | Floats) -> bool:
    """Whether the rewards of a group differ by rounding alone (:data:`TOLERANCE`), so that they teach nothing."""
    values = np.asarray(rewards, dtype=np.float64)
    return len(values) < 2 or bool(np.ptp(values) <= TOLERANCE * max(1.0, np.abs(values).max()))


def group_relative_advantages(rewards: Sequence[float], *, divide_by_std: bool, epsilon: float = 1e-6) -> Floats:
    """Advantage of each member of one group, shape ``[n]``.

    GRPO (arXiv 2402.03300, eq. in section 4.1.2): ``(r_i - mean) / (std + epsilon)``, with the unbiased
    standard deviation (``n - 1``), as verl computes it. Without ``divide_by_std`` only centered, which is
    Dr. GRPO's advantage (arXiv 2503.20783).

    A group that agrees (:func:`agree`), one-element groups included, gives exactly 0 everywhere. (verl leaves
    the raw reward to a one-element group; without a peer there is nothing to be relative to.)

    Raises ``ValueError`` on a reward that is not finite.
    """
    values = _finite(rewards)
    # Decided on the rewards themselves: rounding of the mean would leave 1e-17 / epsilon behind.
    if agree(values):
        return np.zeros_like(values)
    centered: Floats = values - values.mean()
    if divide_by_std:
        centered /= values.std(ddof=1) + epsilon
    return centered


def leave_one_out(rewards: Sequence[float]) -> Floats:
    """RLOO (arXiv 2402.14740): ``r_i - mean of the others = n / (n - 1) (r_i - mean)``, ``[n]``."""
    n = len(rewards)
    return group_relative_advantages(rewards, divide_by_std=False) * (n / max(1, n - 1))


def pass_at_k_advantages(rewards: Sequence[float], k: int) -> Floats:
    """Advantages of the pass@k reward, ``[n]``, in closed form (arXiv 2508.10751).

    The reward of a random ``k``-subset of the group is 1 if any member of it succeeded (score above 0). With ``m`` of
    ``n`` members failed, ``mean = 1 - C(m, k) / C(n, k)`` and ``std = sqrt(mean (1 - mean))`` over subsets; a member's
    advantage is the mean normalized reward of the subsets it is in: ``(1 - mean) / std`` for one that succeeded, and
    ``(1 - mean - C(m - 1, k - 1) / C(n - 1, k - 1)) / std`` for one that failed.

    Raises ``ValueError`` unless ``1 <= k <= n``.
    """
    values = _finite(rewards)
    n, failed = len(values), int((values <= TOLERANCE).sum())
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= group size, got k = {k} for {n} trajectories")
    mean = 1 - comb(failed, k) / comb(n, k)
    if mean in (0.0, 1.0):
        return np.zeros_like(values)
    std = sqrt(mean * (1 - mean))
    of_failure = 1 - mean - comb(failed - 1, k - 1) / comb(n - 1, k - 1) if failed else 0.0
    return np.where(values > TOLERANCE, (1 - mean) / std, of_failure / std)


def whiten(advantages: Floats, tokens: npt.NDArray[np.int64], epsilon: float = 1e-8) -> Floats:
    """Zero mean and unit variance over all trained tokens of the step, ``[N]``.

    REINFORCE++ (arXiv 2501.03262) whitens token advantages over the global batch, all minibatches of the step; a
    trajectory's tokens share one, so it counts as often as it has tokens (``tokens``, ``[N]``). Left as they are where
    they do not vary.
    """
    total = tokens.sum()
    if total == 0:
        return advantages
    mean = float((advantages * tokens).sum() / total)
    variance = float(((advantages - mean) ** 2 * tokens).sum() / total)
    return advantages if variance == 0 else (advantages - mean) / sqrt(variance + epsilon)


def whiten_by_label(advantages: Floats, tokens: npt.NDArray[np.int64], labels: Sequence[str]) -> Floats:
    """:func:`whiten` over the trajectories of each label by themselves, ``[N]``; ``labels`` are of trajectories."""
    result, marks = np.empty_like(advantages), np.asarray(labels)
    for label in set(labels):
        members = marks == label
        result[members] = whiten(advantages[members], tokens[members])
    return result


def clamp_signs(advantages: Floats, rewards: Sequence[float], threshold: float) -> Floats:
    """AgentRL's clamp: no trajectory scored at most ``threshold`` is encouraged, none above it discouraged."""
    above = np.asarray(rewards, dtype=np.float64) > threshold
    return np.where(above, np.maximum(advantages, 0.0), np.minimum(advantages, 0.0))


def group_advantages(
    rewards: Sequence[float], name: AdvantageName, *, divide_by_std: bool = True, k: int = 4
) -> Floats:
    """One group's advantages by the estimator's name, before :func:`whiten`.

    ``none`` is REINFORCE: the score itself. ``reinforce_plus_plus`` is centered here and whitened over the step.
    """
    estimators: dict[AdvantageName, Callable[[], Floats]] = {
        "grpo": lambda: group_relative_advantages(rewards, divide_by_std=divide_by_std),
        "rloo": lambda: leave_one_out(rewards),
        "reinforce_plus_plus": lambda: group_relative_advantages(rewards, divide_by_std=False),
        "pass_at_k": lambda: pass_at_k_advantages(rewards, k),
        "none": lambda: _finite(rewards),
    }
    return estimators[name]()


def _finite(rewards: Sequence[float]) -> Floats:
    values: Floats = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards of a group must be finite, got {list(rewards)}")
    return values


def trajectory_score(rewards: Sequence[float], name: ScoreName, *, gamma: float = 1.0) -> float:
    """One number for a trajectory; 0 for one without turns.

    - ``sum``: ``sum_t r_t``;
    - ``terminal``: ``r_T``;
    - ``mean``: ``sum_t r_t / T`` (what UserRL's code calls Sum);
    - ``discounted``: ``sum_t gamma^(t-1) r_t`` (UserRL's R2G score).
    """
    values = np.asarray(rewards, dtype=np.float64)
    if not len(values):
        return 0.0
    if name == "terminal":
        return float(values[-1])
    if name == "discounted":
        return float(values @ gamma ** np.arange(len(values)))
    return float(values.mean() if name == "mean" else values.sum())


def turn_credits(rewards: Sequence[float], name: CreditName, *, gamma: float = 1.0, k: float = 2.0) -> Floats:
    """The relative weight ``c_t`` of each turn, ``[T]``.

    - ``equal``: 1;
    - ``reward_to_go``: ``sum_{j>=t} gamma^(j-t) r_j``; turns after the last reward get 0, and so does every turn of a
      trajectory that earned nothing, which then has no gradient at all;
    - ``exponential``: ``0.5 + 0.5 (1 - exp(-k r_t)) / (1 - exp(-k))``, UserRL's EM: 0.5 for a turn without reward, 1
      for reward 1;
    - ``signed``: ``r_t`` itself, negative where a turn was penalized.

    Raises ``ValueError`` when ``k`` is 0, for which the map is not defined.
    """
    values: Floats = np.asarray(rewards, dtype=np.float64)
    if name == "equal":
        return np.ones_like(values)
    if name == "signed":
        return values.copy()
    if name == "exponential":
        if k == 0:
            raise ValueError("the exponential map is not defined for k = 0")
        return np.asarray(0.5 + 0.5 * np.expm1(-k * values) / np.expm1(-k))
    credits, ahead = np.zeros_like(values), 0.0
    for turn in range(len(values) - 1, -1, -1):
        ahead = credits[turn] = values[turn] + gamma * ahead
    return credits


def spread_advantage(
    advantage: float, credits: Floats, tokens: npt.NDArray[np.int64], *, signed_sum: bool = False
) -> Floats:
    """The advantage of the tokens of each turn, ``[T]``, from the trajectory's and the turns' credits.

    With ``n+`` the tokens of turns whose credit is not 0 and ``Z = sum_t n_t |c_t|``::

        A_t = advantage * c_t * n+ / Z

    so that the mean of ``|A|`` over those tokens is ``|advantage|``. All are 0 where ``Z`` is 0. With ``signed_sum``
    ``Z`` is ``sum_t n_t c_t``, as in UserRL's code: the same while credits are not negative; where they are, a negative
    sum turns every sign round and a small one explodes.

    Args:
        advantage: of the trajectory.
        credits: ``c_t``, ``[T]``.
        tokens: trained tokens of each turn, ``[T]``.
        signed_sum: normalize by the sum of credits instead of that of their absolute values.
    """
    if len(credits) != len(tokens):
        raise ValueError(f"{len(credits)} turn credits for {len(tokens)} turns")
    total = float((tokens * (credits if signed_sum else np.abs(credits))).sum())
    if total == 0:
        return np.zeros_like(credits)
    return advantage * credits * (float(tokens[credits != 0].sum()) / total)
