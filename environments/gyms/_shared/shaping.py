"""The reward's last step, the same in every gym: a scale, a cost for each step, a clip; all off by default.

The form is UserRL's (arXiv 2509.19736)::

    r = scale * base - penalty * (step index, from 1, or 1),     clipped to [0, 1] where normalised

Its gyms intention, persuade and travel take the same penalty for each step, the others one that grows with the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mua.utils.errors import EnvironmentFault

SHAPING: Mapping[str, str | int | float | bool] = {
    "reward_scale": 1.0,
    "step_penalty": 0.0,
    "normalize_rewards": False,
}
"""Options that every gym has besides its own, and their defaults, under which a reward stays as it is."""
FLAT = frozenset({"gyms/intention", "gyms/persuade", "gyms/travel"})
"""Gyms whose step penalty does not grow."""


def checked(reward: object, game: str) -> float:
    """``reward`` as a game gave it; raises :class:`EnvironmentFault` unless it is a number, finite and not negative."""
    if not isinstance(reward, int | float) or not math.isfinite(reward) or reward < 0:
        raise EnvironmentFault(f"{game} gave the reward {reward!r}; a reward is a finite number of at least 0")
    return float(reward)


def shaped(base: float, step: int, flat: bool, options: Mapping[str, str | int | float | bool]) -> float:
    """What a call pays: ``base`` under ``options``, at the ``step``-th call of the episode (from 1; 0: no penalty).

    Negative where the penalty is higher and nothing is normalised; never otherwise.
    """
    given = {**SHAPING, **options}
    reward = float(given["reward_scale"]) * base - float(given["step_penalty"]) * (min(step, 1) if flat else step)
    return min(1.0, max(0.0, reward)) if given["normalize_rewards"] else reward
