"""What a run came to, before anybody asks why: success on held-out tasks, success, reward and scored episodes in
training, or the loss of supervised training, each as better, worse, or neither beyond chance.

The unit is the group, whose members share a task; without a store, the step. Kinds of task are compared with
themselves, so that a curriculum that draws other kinds changes no outcome.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
from scipy.stats import norm, t

from mua.observe.diagnosis.curves import Floats, dated, mean, smoothed
from mua.observe.diagnosis.evidence import DATA, Evidence, Measured, RunOutcome, SeenEpisode

Ints = npt.NDArray[np.int64]
FEW = 4
"""Groups on each side of a comparison: fewer say nothing. Of steps without a store three."""
_T = DATA["thresholds"]


@dataclass(frozen=True)
class Units:
    """One value of each group, or of each step."""

    places: Ints
    """Of the step in the run's series, ``[units]``."""
    values: Floats
    kinds: npt.NDArray[np.str_]
    """``domain: kind`` of the task, or the domain alone; empty where nobody knows."""
    members: float
    """Episodes behind a value: a share of so few cannot vary less than that many tosses."""
    few: int

    @classmethod
    def of(cls, found: Iterable[tuple[int, float, str]], members: float, few: int) -> Self:
        """Of places, values and kinds; values that are not there are left out."""
        places, values, kinds = np.array([one for one in found if math.isfinite(one[1])], object).reshape(-1, 3).T
        many = max(1.0, members) if math.isfinite(members) else math.inf
        return cls(places.astype(np.int64), values.astype(np.float64), kinds.astype(str), many, few)

    def only(self, chosen: npt.NDArray[np.bool_]) -> Self:
        """Some of them."""
        return replace(self, places=self.places[chosen], values=self.values[chosen], kinds=self.kinds[chosen])


class Compared(NamedTuple):
    """The steps from ``begin`` up to ``until`` with those from ``start`` to the end."""

    begin: int
    start: int
    before: float
    after: float
    error: float
    """Standard error of the difference."""
    degrees: int

    @property
    def apart(self) -> float:
        """The difference in standard errors."""
        return (self.after - self.before) / self.error

    def unlikely(self, sign: float = 1.0) -> float:
        """Probability of a difference so far in the direction of ``sign`` where there is none (Student's t)."""
        return float(t.sf(sign * self.apart, self.degrees))


def outcomes_of(seen: Evidence) -> list[RunOutcome]:
    """Every outcome that the evidence can tell."""
    found = [_held_out(seen, name, points) for name, points in seen.held_out.items()]
    found += [_trained(seen, name, units) for name, units in training_units(seen).items()]
    return [one for one in found if one is not None]


def training_units(seen: Evidence) -> dict[str, Units]:
    """Success, reward and scored episodes of each group, or step; the loss where nothing is scored or unscored."""
    rows = {"success": seen.of("success"), "reward": seen.of("reward"), "scored": 1 - seen.of("unscored")}
    if not np.isfinite([rows["reward"], rows["scored"]]).any():
        rows = {"loss": seen.of("loss")}
    series = {name: [(place, value, "") for place, value in enumerate(values)] for name, values in rows.items()}
    domains = [
        (place, value, name.removeprefix("domain "))
        for place, row in enumerate(seen.rows)
        for name, value in row.items()
        if name.startswith("domain ")
    ]
    found = {name: Units.of(values, mean(seen.of("episodes")), 3) for name, values in series.items()}
    if domains:
        found["success"] = Units.of(domains, mean(seen.of("episodes")), 3)
    place_of = {row["step"]: place for place, row in enumerate(seen.rows) if "reward" in row}
    groups = defaultdict[tuple[int, int, str], list[SeenEpisode]](list)
    for e in seen.episodes or ():
        if e.step in place_of:
            groups[place_of[e.step], e.ordinal, f"{e.domain}: {e.kind}"].append(e)
    if groups:
        size = fmean(map(len, groups.values()))
        means = defaultdict[str, list[tuple[int, float, str]]](list)
        for (place, _, kind), members in groups.items():
            means["scored"].append((place, fmean(e.scored for e in members), kind))
            if scored := [e for e in members if e.scored]:
                means["success"].append((place, fmean(e.success for e in scored), kind))
                means["reward"].append((place, fmean(e.reward for e in scored), kind))
        found |= {name: Units.of(values, size, FEW) for name, values in means.items()}
    return found


def step_means(units: Units, total: int) -> Floats:
    """Of each step the mean of its values, ``[total]``."""
    return np.array([mean(units.values[units.places == place]) for place in range(total)])


def compare(units: Units, begin: int, until: int, start: int) -> Compared | None:
    """Least squares of the values on whether they are late, with a mean of its own for each kind; None of too few."""
    late = units.places >= start
    early = (units.places >= begin) & (units.places < until)
    if min(early.sum(), late.sum()) < units.few:
        return None
    chosen = early | late
    values, kinds = units.values[chosen], units.kinds[chosen]
    x, y = late[chosen].astype(np.float64), values.copy()
    names = np.unique(kinds)
    means = [kinds == name for name in names] if len(values) >= FEW * len(names) else [np.ones(len(values), bool)]
    for own in means:  # of kinds too rare to have a mean of their own there is one together
        x[own] -= x[own].mean()
        y[own] -= y[own].mean()
    spread, degrees = float(x @ x), len(y) - len(means) - 1
    if spread < 1e-9 or degrees < 2:
        return None
    slope, level, part = float(x @ y) / spread, float(values.mean()), float(late[chosen].mean())
    rest = y - slope * x
    least = max(level * (1 - level) / units.members, 0.1 * float(np.var(values)))
    error = math.sqrt(max(float(rest @ rest) / degrees, least, 1e-12) / spread)
    return Compared(begin, start, level - slope * part, level + slope * (1 - part), error, degrees)


def comparisons(units: Units, total: int) -> Iterator[Compared]:
    """All steps before a point with all after it, and windows of a quarter, half of one apart, with the last one."""
    last = max(2, total // 4)
    splits = {3, total // 8, total // 4, total // 3, total // 2, 2 * total // 3, total - last, total - 3}
    spans = {(0, at, at) for at in splits if 2 <= at <= total - 2}
    spans |= {(at, at + last, total - last) for at in range(0, total - 2 * last + 1, max(1, last // 2))}
    for span in sorted(spans):
        if (found := compare(units, *span)) is not None:
            yield found


def _trained(seen: Evidence, name: str, units: Units) -> RunOutcome | None:
    total, better = len(seen.steps), -1.0 if name == "loss" else 1.0
    found = list(comparisons(units, total))
    if not found:
        return None
    # A margin beside chance: of long runs the smallest differences are certain.
    scale = 1.0 if name in ("success", "scored") else 2 * float(np.std(units.values))
    doubt = _T["fallen"] / (100 if seen.live else 1)

    def moves(one: Compared, sign: float) -> bool:
        first = one.begin == 0
        least = (0.02 if first else 0.05) * scale + (0.05 if first else 0.15) * abs(one.before)
        if sign * (one.after - one.before) < least or one.unlikely(sign) >= doubt * (1 if sign != better else 5):
            return False
        newest = compare(units, one.begin, one.start, total - max(2, total // 4)) or one  # what has passed is no change
        return sign * (newest.after - newest.before) >= least / 2

    worse = [one for one in found if moves(one, -better)]
    risen = [one for one in found if one.begin == 0 and moves(one, better)]
    change, sign = (-1, -better) if worse else (1, better) if risen else (0, 1.0)
    wide = compare(units, 0, max(2, total // 3), total - max(2, total // 3)) or found[0]
    chosen = min(worse or risen, key=lambda one: one.unlikely(sign)) if change else wide
    half = float(t.ppf(0.975, chosen.degrees)) * chosen.error
    place = dated(smoothed(step_means(units, total), 2), chosen.start, chosen.before, chosen.after) if change else 0
    moved = chosen.after - chosen.before
    return RunOutcome(
        name, chosen.before, chosen.after, moved - half, moved + half, seen.steps[min(place, total - 1)], change
    )


def _held_out(seen: Evidence, name: str, points: Sequence[Measured]) -> RunOutcome | None:
    """The last evaluation with the first, and with the best before it."""
    if len(points) < 2:
        return None
    better, wide = (
        -1.0 if name == "loss" else 1.0,
        2 * float(norm.ppf((1 + seen.setting("evaluation.level", 0.95)) / 2)),
    )
    first, last = points[0], points[-1]
    best = max(points[:-1], key=lambda point: better * point.mean)

    def difference(one: Measured) -> tuple[float, float]:
        return better * (last.mean - one.mean), math.hypot(one.high - one.low, last.high - last.low) / wide

    change, chosen = 0, first
    (gain, doubt), (loss, other) = difference(first), difference(best)
    if not math.isfinite(doubt + other):
        return None
    if gain < -max(0.02, 2.6 * doubt):
        change = -1
    elif loss < -max(0.15 * abs(best.mean), 2.6 * other):
        change, chosen = -1, best
    elif gain > 1.96 * doubt:
        change = 1
    moved, half = last.mean - chosen.mean, 1.96 * difference(chosen)[1]
    return RunOutcome(f"held-out {name}", chosen.mean, last.mean, moved - half, moved + half, chosen.step, change)
