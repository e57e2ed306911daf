"""Advantages: how much better a trajectory did than the others of its task, or of the whole batch.

Every estimator sees the scores of one group (``[n]``, scored members only) and gives an advantage each. A group whose
scores are all equal, one-element groups included, gives exactly 0 everywhere: without a difference there is nothing to
be relative to. Only the estimators of :data:`GLOBAL` compare across groups as well, see :func:`whitened`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import comb, sqrt
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
AdvantageName = Literal["grpo", "rloo", "reinforce_plus_plus", "pass_at_k", "none"]
GLOBAL: frozenset[AdvantageName] = frozenset({"reinforce_plus_plus"})
"""Estimators whose result is whitened over the whole step, or over each environment's part of it."""


def group_relative_advantages(rewards: Sequence[float], *, divide_by_std: bool, epsilon: float = 1e-6) -> Floats:
    """Advantage of each member of one group, shape ``[n]``.

    GRPO (arXiv 2402.03300, eq. in section 4.1.2): ``(r_i - mean) / (std + epsilon)``, with the unbiased
    standard deviation (``n - 1``), as verl computes it. Without ``divide_by_std`` only centred, which is
    Dr. GRPO's advantage (arXiv 2503.20783).

    A group whose rewards are all equal, one-element groups included, gives exactly 0 everywhere. (verl leaves
    the raw reward to a one-element group; without a peer there is nothing to be relative to.)

    Raises ``ValueError`` on a reward that is not finite.
    """
    values = _finite(rewards)
    if _flat(values):
        return np.zeros_like(values)
    centred: Floats = values - values.mean()
    if divide_by_std:
        centred /= values.std(ddof=1) + epsilon
    return centred


def leave_one_out(rewards: Sequence[float]) -> Floats:
    """RLOO (arXiv 2402.14740): ``r_i - mean of the others = n / (n - 1) (r_i - mean)``, ``[n]``."""
    values = _finite(rewards)
    if _flat(values):
        return np.zeros_like(values)
    scaled: Floats = (values - values.mean()) * (len(values) / (len(values) - 1))
    return scaled


def pass_at_k_advantages(rewards: Sequence[float], k: int) -> Floats:
    """Advantages of the pass@k reward, ``[n]``, in closed form (arXiv 2508.10751).

    The reward of a random ``k``-subset of the group is 1 if any member of it succeeded (score above 0). With ``m`` of
    ``n`` members failed, ``mean = 1 - C(m, k) / C(n, k)`` and ``std = sqrt(mean (1 - mean))`` over subsets; a member's
    advantage is the mean normalised reward of the subsets it is in: ``(1 - mean) / std`` for one that succeeded, and
    ``(1 - mean - C(m - 1, k - 1) / C(n - 1, k - 1)) / std`` for one that failed.

    Raises ``ValueError`` unless ``1 <= k <= n``.
    """
    values = _finite(rewards)
    n, failed = len(values), int((values <= 0).sum())
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= group size, got k = {k} for {n} trajectories")
    mean = 1 - comb(failed, k) / comb(n, k)
    if mean in (0.0, 1.0):
        return np.zeros_like(values)
    std = sqrt(mean * (1 - mean))
    of_failure = 1 - mean - comb(failed - 1, k - 1) / comb(n - 1, k - 1) if failed else 0.0
    return np.where(values > 0, (1 - mean) / std, of_failure / std)


def whitened(advantages: Floats, tokens: npt.NDArray[np.int64], epsilon: float = 1e-8) -> Floats:
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


def whitened_apart(advantages: Floats, tokens: npt.NDArray[np.int64], labels: Sequence[str]) -> Floats:
    """:func:`whitened` over the trajectories of each label by themselves, ``[N]``; ``labels`` are of trajectories."""
    result, marks = np.empty_like(advantages), np.asarray(labels)
    for label in set(labels):
        members = marks == label
        result[members] = whitened(advantages[members], tokens[members])
    return result


def sign_clamped(advantages: Floats, rewards: Sequence[float], threshold: float) -> Floats:
    """AgentRL's clamp: no trajectory scored at most ``threshold`` is encouraged, none above it discouraged."""
    above = np.asarray(rewards, dtype=np.float64) > threshold
    return np.where(above, np.maximum(advantages, 0.0), np.minimum(advantages, 0.0))


def group_advantages(
    rewards: Sequence[float], name: AdvantageName, *, divide_by_std: bool = True, k: int = 4
) -> Floats:
    """One group's advantages by the estimator's name, before :func:`whitened`.

    ``none`` is REINFORCE: the score itself. ``reinforce_plus_plus`` is centred here and whitened over the step.
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


def _flat(values: Floats) -> bool:
    """Decided on the rewards themselves: rounding of the mean would leave 1e-17 / epsilon behind."""
    return len(values) < 2 or bool(values.max() == values.min())
