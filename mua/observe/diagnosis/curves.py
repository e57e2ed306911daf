"""How a series is asked for its beginning, its end, and when something began.

All series are by step, in order; a value that a step does not have is NaN.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def above(values: Floats, bound: float | Floats) -> Mask:
    """Where a value is there and at least ``bound``."""
    with np.errstate(invalid="ignore"):
        return np.asarray(values >= bound)


def lasting(holds: Mask, run: int = 3) -> int | None:
    """The first place from which ``holds`` is true ``run`` times in a row, or once per place left, but at least twice;
    None where it never is."""
    need = min(run, len(holds))
    if need < min(run, 2):
        return None
    so_far = np.concatenate([[0], np.cumsum(holds)])
    whole = np.flatnonzero(so_far[need:] - so_far[:-need] == need)
    return int(whole[0]) if len(whole) else None


def smoothed(values: Floats, width: int = 3) -> Floats:
    """Mean of the ``width`` values up to each, NaN left out; NaN where there is none."""
    there = np.isfinite(values)
    totals = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(there)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    with np.errstate(invalid="ignore"):
        return np.asarray((totals[ends] - totals[starts]) / (counts[ends] - counts[starts]))


def dated(values: Floats, place: int, before: float, after: float) -> int:
    """Where the change from about ``before`` to about ``after`` began that averages show at ``place``: from there on
    values are beyond the middle of the two."""
    middle, up = (before + after) / 2, after >= before
    beyond = values >= middle if up else values <= middle
    while place < len(values) - 1 and not beyond[place]:
        place += 1
    while place > 0 and (beyond[place - 1] or not np.isfinite(values[place - 1])):
        place -= 1
    return place


def beginning(values: Floats) -> Floats:
    """The first values of a series: a fifth of it, from two to ten; a disease that begins at once is in them too."""
    finite = values[np.isfinite(values)]
    return finite[: max(2, min(10, len(finite) // 5))]


def ending(values: Floats) -> Floats:
    """The last values of a series, as many as :func:`beginning` takes."""
    return beginning(values[::-1])


def mean(values: npt.ArrayLike) -> float:
    """NaN of nothing."""
    values = np.asarray(values, np.float64)
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
