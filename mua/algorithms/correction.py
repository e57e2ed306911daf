"""Off-policy correction: weights for tokens that another policy sampled than the one that is trained.

Two ratios are kept apart. The *mismatch* ``q / m`` compares the trainer's log-probabilities ``q`` with the engine's
``m`` for the same ids: different kernels and precisions, and, in asynchronous runs, older weights. The *policy* ratio
``p / q`` belongs to the objective (:mod:`mua.algorithms.objectives`). What is here looks at the mismatch alone, on
whole sequences and in numpy, before anything is packed or split over ranks: no layout can change it. Before a batch's
first step the policy is the trainer's own ``q``, so that ``q / m`` is then the whole ratio of policy and engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mua.algorithms.advantage import Floats

CorrectionName = Literal["none", "truncate", "mask", "band"]
Level = Literal["token", "sequence", "geometric"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before ``exp``: float32 overflows at 88, and an infinite ratio times a zero
advantage is NaN. Beyond e^20 a ratio carries no gradient, as in verl."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How the mismatch ratio becomes a weight.

    - ``truncate``: ``min(ratio, high)`` (truncated importance sampling);
    - ``mask``: the ratio inside ``[low, high]``, 0 outside (ICEPOP's band at token level; masked importance sampling at
      sequence level);
    - ``band``: like ``truncate``, of the tokens that :func:`in_band` leaves.
    """

    name: CorrectionName = "none"
    level: Level = "token"
    """``token``: each token's own ratio; ``sequence``: the product over the sequence's trained tokens; ``geometric``:
    its ``T``-th root."""
    low: float = 0.0
    high: float = 2.0


def correction_weights(old: Floats, behaviour: Floats, trained: npt.NDArray[np.bool_], how: Correction) -> Floats:
    """The weight of each token of one sequence, ``[T]``; 1 where nothing is trained.

    Args:
        old: the trainer's log-probabilities ``log q``, ``[T]``.
        behaviour: the engine's ``log m``, ``[T]``.
        trained: which tokens were sampled, ``[T]``.
        how: the correction.
    """
    weights = np.ones(len(old), dtype=np.float64)
    if how.name == "none" or not trained.any():
        return weights
    log_ratio = (old - behaviour)[trained].astype(np.float64)
    if how.level != "token":
        total = log_ratio.mean() if how.level == "geometric" else log_ratio.sum()
        log_ratio = np.full_like(log_ratio, total)
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    kept = np.where((ratio >= how.low) & (ratio <= how.high), ratio, 0.0) if how.name == "mask" else ratio
    weights[trained] = np.minimum(kept, how.high)
    return weights


@dataclass(frozen=True, slots=True)
class Band:
    """AgentRL's band of admissible ratios (its ``importance_weight_cap_ratio`` and ``out_of_date_decay``)."""

    low: float
    """Its epsilon: the lower clip distance."""
    high: float
    """Its epsilon + epsilon_higher: the upper one."""
    cap: float
    """How many times wider than these the band of a fresh token is; 1 is AgentRL's ``strict_in_bound``."""
    decay: float = 0.0
    """Rate at which it narrows with a token's age, per policy version."""

    def bounds(self, age: Floats) -> tuple[Floats, Floats]:
        """Lower and upper bound for tokens sampled ``age >= 0`` policy versions ago, each of the shape of ``age``.

        ``[1 - low cap d, 1 + high cap d]`` with ``d = exp(-age decay)``.
        """
        d = np.exp(-self.decay * np.maximum(age, 0.0))
        return 1 - self.low * self.cap * d, 1 + self.high * self.cap * d


def in_band(log_ratio: Floats, advantages: Floats, age: Floats, band: Band) -> npt.NDArray[np.bool_]:
    """Which tokens stay, ``[N]``: not those whose ratio has left the band on the side their advantage pulls to.

    A token goes if ``A > 0`` and its ratio is above the upper bound, or ``A < 0`` and below the lower one. Tokens
    without an advantage stay, and so do those that are far off on the other side, which the objective pulls back.

    Args:
        log_ratio: ``log q - log m``, ``[N]``.
        advantages: ``[N]``.
        age: policy versions since each token was sampled, ``[N]``.
        band: the bounds.
    """
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    lower, upper = band.bounds(age)
    return ~(((advantages > 0) & (ratio > upper)) | ((advantages < 0) & (ratio < lower)))


def mismatch_metrics(old: Floats, behaviour: Floats) -> dict[str, float]:
    """How far two engines are apart on the same tokens, ``[N]`` log-probabilities each; nothing of none.

    ``probability_error`` is the mean of ``exp(|difference|)``, the multiplicative probability error (1: no
    difference); ``kl_k3`` the k3 estimate of KL(engine || trainer). The loss reports the same under the same names.
    """
    if not len(old):
        return {}
    difference = np.clip(old.astype(np.float64) - behaviour.astype(np.float64), -MAX_LOG_RATIO, MAX_LOG_RATIO)
    size = np.abs(difference)
    return {
        "logprob_difference": float(size.mean()),
        "logprob_difference_max": float(size.max()),
        "kl_k3": float((np.exp(difference) - difference - 1).mean()),
        "probability_error": float(np.exp(size).mean()),
    }
