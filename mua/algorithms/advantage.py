"""Group-relative advantages: how much better a trajectory did than the others of the same task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def group_relative_advantages(
    rewards: Sequence[float], *, divide_by_std: bool, epsilon: float = 1e-6
) -> npt.NDArray[np.float64]:
    """Advantage of each member of one group, shape ``[n]``.

    GRPO (arXiv 2402.03300, eq. in section 4.1.2): ``(r_i - mean) / (std + epsilon)``, with the unbiased
    standard deviation (``n - 1``), as verl computes it. Without ``divide_by_std`` only centred, which is
    Dr. GRPO's advantage (arXiv 2503.20783).

    A group whose rewards are all equal, one-element groups included, gives exactly 0 everywhere. (verl leaves
    the raw reward to a one-element group; without a peer there is nothing to be relative to.)

    Raises ``ValueError`` on a reward that is not finite.
    """
    values: npt.NDArray[np.float64] = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(values).all():
        raise ValueError(f"rewards of a group must be finite, got {list(rewards)}")
    # Decided on the rewards themselves: rounding of the mean would leave 1e-17 / epsilon behind.
    if len(values) < 2 or values.max() == values.min():
        return np.zeros_like(values)
    centred: npt.NDArray[np.float64] = values - values.mean()
    if divide_by_std:
        centred /= values.std(ddof=1) + epsilon
    return centred
