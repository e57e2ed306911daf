"""Off-policy correction: weights for tokens that another policy sampled than the one that is trained.

Two ratios are kept apart. The *mismatch* ``q / m`` compares the trainer's log-probabilities ``q`` with the engine's
``m`` for the same ids: different kernels and precisions, and, in asynchronous runs, older weights. The *policy* ratio
``p / q`` belongs to the objective (:mod:`mua.algorithms.objectives`). What is here looks at the mismatch alone, on
whole sequences and in numpy, before anything is packed or split over ranks: no layout can change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
CorrectionName = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class Correction:
    """How the mismatch ratio becomes a weight.

    - ``truncate``: ``min(ratio, high)`` (truncated importance sampling);
    - ``mask``: the ratio inside ``[low, high]``, 0 outside (ICEPOP's band at token level; masked importance sampling at
      sequence level).
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
    ratio = np.exp(np.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    kept = ratio if how.name == "truncate" else np.where((ratio >= how.low) & (ratio <= how.high), ratio, 0.0)
    weights[trained] = np.minimum(kept, how.high)
    return weights


def decaying_bounds(
    low: float, high: float, cap: float, age: float, *, decay: float | None, strict: bool
) -> tuple[float, float]:
    """AgentRL's band of admissible ratios for a token sampled ``age >= 0`` versions ago, ``(lower, upper)``.

    ``[1 - low cap d, 1 + high cap d]`` with ``d = 1 / cap`` if ``strict``, else ``exp(-age decay)`` (1 without decay):
    wide for fresh tokens, narrower the older they are. ``high`` is AgentRL's sum of epsilon and epsilon_higher.
    """
    d = 1 / cap if strict else 1.0 if decay is None else float(np.exp(-age * decay))
    return 1 - low * cap * d, 1 + high * cap * d


def mismatch_metrics(old: Floats, behaviour: Floats) -> dict[str, float]:
    """How far two engines are apart on the same tokens, ``[N]`` log-probabilities each.

    ``error`` is the mean of ``exp(|difference|)``, the multiplicative probability error (1: no difference); ``kl`` the
    k3 estimate of KL(engine || trainer).
    """
    if not len(old):
        return {}
    difference = np.clip(old.astype(np.float64) - behaviour.astype(np.float64), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    size = np.abs(difference)
    return {
        "mean": float(size.mean()),
        "max": float(size.max()),
        "kl": float((np.exp(difference) - difference - 1).mean()),
        "error": float(np.exp(size).mean()),
    }
