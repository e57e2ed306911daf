"""What is known of a run, in one form for all causes, and how a series is asked when something began.

All series are by step, in order; a value that a step does not have is NaN.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from mua.types import Json

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

DATA: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8"))
"""``series`` and ``sums``: the metrics that quantities are read from; ``thresholds`` and ``causes``."""
_DOMAIN = re.compile(r"rollout/domain/(.+)/success")
_HELD_OUT = re.compile(r"eval/(.+)_success")


@dataclass(slots=True)
class SeenEpisode:
    """One scored or unscored episode of training, as the causes look at it."""

    id: str
    step: int
    ordinal: int
    sample: int
    task: str
    kind: str
    domain: str
    outcome: str
    scored: bool
    reward: float
    success: bool
    turns: int
    sampled_tokens: int
    calls: int = 0
    """Of tools, by the policy."""
    call_errors: int = 0
    cut_turns: int = 0
    """That ended because they were too long."""
    said: str = ""
    """All that the policy said and called, with arguments, the beginning of it where it is long."""
    told: str = ""
    """What of it the user heard."""
    leak: str | None = None
    """What the user said that it could not know or should not say."""
    error: str | None = None


@dataclass(slots=True)
class TokenSample:
    """What the loss read of one segment, in numbers."""

    trajectory: str
    step: int
    trained: int
    """Tokens with a weight."""
    wrong: int
    """Of these, tokens that the policy did not sample."""
    wrong_of: str
    """Who wrote most of the wrong ones."""
    fresh_kl: float
    """k3 estimate of KL(engine || trainer) over trained tokens of the version that is trained; NaN without any."""
    fresh_gap: float
    stale_kl: float
    stale_gap: float
    lag: float
    first: tuple[str, float] | None = None
    """A name of the first sampled token with everything before it, and the engine's log-probability of it."""


@dataclass
class Evidence:
    """A run so far."""

    steps: npt.NDArray[np.int64]
    metrics: dict[str, Floats]
    """By the names of ``series`` and ``sums`` in causes.yaml; those that no step has are left out."""
    domains: dict[str, Floats] = field(default_factory=dict)
    """Success of each domain of a run over several."""
    evaluations: dict[str, Floats] = field(default_factory=dict)
    """Held-out success by what follows ``eval/``."""
    config: Json = field(default_factory=dict)
    episodes: list[SeenEpisode] | None = None
    """In order of steps; None where there is no store."""
    tokens: list[TokenSample] | None = None
    met: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """Of evaluations that played tasks of training: a name of the evaluation, its step and the tasks."""
    unseen: list[str] = field(default_factory=list)
    """What could not be looked at, and why, in sentences."""
    state: str = ""
    """running | done | left | failed, or empty where nobody knows."""
    live: bool = False
    """Whether this is the trainer's own view of the steps so far."""
    moved: float | None = None
    """Largest change over the run of the log-probability of the same token after the same text; None: no pair."""

    def of(self, name: str) -> Floats:
        """The series of a quantity, ``[steps]``; NaN throughout where no step has it."""
        found = self.metrics.get(name)
        return np.full(len(self.steps), np.nan) if found is None else found

    def setting(self, key: str, default: Any = None) -> Any:
        """A key of the run's configuration, such as ``algorithm.group_size``."""
        here: Any = self.config
        for part in key.split("."):
            here = here.get(part) if isinstance(here, Mapping) else None
        return default if here is None else here

    def by_step(self) -> dict[int, list[SeenEpisode]]:
        """Episodes of each step."""
        found: dict[int, list[SeenEpisode]] = {}
        for episode in self.episodes or ():
            found.setdefault(episode.step, []).append(episode)
        return found


def series(lines: Iterable[Mapping[str, Any]]) -> Evidence:
    """The evidence of ``lines`` of metrics, one per step, in order."""
    lines = list(lines)
    metrics = {name: _column(lines, key) for name, key in DATA["series"].items()}
    for quantity, prefixes in DATA["sums"].items():
        matching = [
            {k: v for k, v in line.items() if k.startswith(tuple(prefixes)) and v is not None} for line in lines
        ]
        metrics[quantity] = np.array([float(sum(line.values())) for line in matching])
    names = sorted({name for line in lines for name in line})
    return Evidence(
        np.array([int(line["step"]) for line in lines], np.int64),
        {name: values for name, values in metrics.items() if np.isfinite(values).any()},
        {found[1]: _column(lines, name) for name in names if (found := _DOMAIN.fullmatch(name))},
        {found[1]: _column(lines, name) for name in names if (found := _HELD_OUT.fullmatch(name))},
    )


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> Floats:
    return np.array([math.nan if (value := line.get(key)) is None else float(value) for line in lines])


def lasting(holds: Mask, run: int = 3) -> int | None:
    """The first place from which ``holds`` is true ``run`` times in a row, or once per place left, but at least twice;
    None where it never is."""
    need = min(run, len(holds))
    if need < 2:
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
    """The last values of a series: a fifth of it, from two to ten."""
    finite = values[np.isfinite(values)]
    return finite[-max(2, min(10, len(finite) // 5)) :]


def mean(values: Floats) -> float:
    """NaN of nothing."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
