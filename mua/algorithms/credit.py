"""Which turn earned it: trajectory scores from turn rewards, and how a trajectory's advantage is spread over its turns.

Notation: turns ``t = 1..T`` with rewards ``r_t``; ``gamma`` the discount; a trajectory's advantage ``A`` comes from its
score and its group (:mod:`mua.algorithms.advantage`); ``n_t`` tokens of turn ``t`` are trained.

The forms are UserRL's (arXiv 2509.19736) as its code has them. Its paper prints another advantage,
``(c_t - mean) / std`` over the group, under which equal credit would give every trajectory the same advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
ScoreName = Literal["sum", "terminal", "mean", "discounted"]
CreditName = Literal["equal", "reward_to_go", "exponential", "signed"]


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
    - ``signed``: ``r_t`` itself, negative where a turn was penalised.

    Raises ``ValueError`` when ``k`` is 0, for which the map is not defined.
    """
    values = np.asarray(rewards, dtype=np.float64)
    return CREDITS[name](values, gamma, k)


def spread(advantage: float, credits: Floats, tokens: npt.NDArray[np.int64], *, signed_sum: bool = False) -> Floats:
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
        signed_sum: normalise by the sum of credits instead of that of their absolute values.
    """
    if len(credits) != len(tokens):
        raise ValueError(f"{len(credits)} turn credits for {len(tokens)} turns")
    total = float((tokens * (credits if signed_sum else np.abs(credits))).sum())
    if total == 0:
        return np.zeros_like(credits)
    return advantage * credits * (float(tokens[credits != 0].sum()) / total)


def _reward_to_go(rewards: Floats, gamma: float, k: float) -> Floats:
    credits, ahead = np.zeros_like(rewards), 0.0
    for turn in range(len(rewards) - 1, -1, -1):
        ahead = credits[turn] = rewards[turn] + gamma * ahead
    return credits


def _exponential(rewards: Floats, gamma: float, k: float) -> Floats:
    if k == 0:
        raise ValueError("the exponential map is not defined for k = 0")
    mapped: Floats = 0.5 + 0.5 * np.expm1(-k * rewards) / np.expm1(-k)
    return mapped


CREDITS: dict[CreditName, Callable[[Floats, float, float], Floats]] = {
    "equal": lambda rewards, gamma, k: np.ones_like(rewards),
    "reward_to_go": _reward_to_go,
    "exponential": _exponential,
    "signed": lambda rewards, gamma, k: rewards.copy(),
}
