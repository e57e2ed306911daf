"""What is known of a run, in one form for all causes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from mua.observe.diagnosis.curves import Floats
from mua.types import Json

DATA: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("causes.yaml").read_text(encoding="utf-8"))
"""``series`` and ``sums``: the metrics that quantities are read from; ``thresholds`` and ``causes``."""
_DOMAIN = re.compile(r"rollout/domain/(.+)/success")
_HELD_OUT = re.compile(r"eval/(.+_success|loss)")


@dataclass(slots=True)
class SeenEpisode:
    """One scored or unscored episode of training, as the causes look at it."""

    id: str
    step: int
    ordinal: int
    task: str
    kind: str
    domain: str
    outcome: str
    scored: bool
    reward: float
    success: bool
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
    to_decline: bool = False
    """Whether the task's own solution declines."""
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
    lag: float


class Measured(NamedTuple):
    """A held-out figure of the policy after ``step`` steps, with its interval; NaN bounds where nobody knows."""

    step: int
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How one of a run's results changed."""

    name: str
    """success | reward | scored | held-out NAME | loss | held-out loss."""
    before: float
    after: float
    low: float
    """Of ``after - before``, with 95 % confidence."""
    high: float
    step: int
    """At which it began."""
    change: int
    """1 better, -1 worse, both beyond chance; 0 neither."""

    def __str__(self) -> str:
        moved = {1: "rose", -1: "fell", 0: "went"}[self.change if "loss" not in self.name else -self.change]
        difference = self.after - self.before
        told = f"{self.name} {moved} from {self.before:.3g} to {self.after:.3g}"
        return f"{told} ({difference:+.3f}, {self.low:+.3f} to {self.high:+.3f})"


@dataclass
class Evidence:
    """A run so far."""

    rows: list[dict[str, float]]
    """Of each step ``step`` and the quantities that are known, by the names of ``series`` and ``sums`` in causes.yaml,
    and success of each domain of a run over several as ``domain NAME``."""
    held_out: dict[str, list[Measured]] = field(default_factory=dict)
    """By the name of the evaluation, in order."""
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
    outcomes: list[RunOutcome] = field(default_factory=list)
    """What the run came to, before causes are asked (:func:`mua.observe.diagnosis.outcomes.outcomes_of`)."""

    @property
    def steps(self) -> list[int]:
        """Their numbers."""
        return [int(row["step"]) for row in self.rows]

    def of(self, name: str) -> Floats:
        """The series of a quantity, ``[steps]``; NaN throughout where no step has it."""
        return np.array([row.get(name, math.nan) for row in self.rows], np.float64)

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

    def per_step(self, value: Callable[[Sequence[SeenEpisode]], float]) -> Floats:
        """``value`` of the episodes of each step."""
        by_step = self.by_step()
        return np.array([value(by_step.get(step, [])) for step in self.steps], np.float64)

    def outcome(self, name: str) -> RunOutcome | None:
        """The outcome of this name, where it is known."""
        return next((one for one in self.outcomes if one.name == name), None)

    @property
    def success_rose(self) -> bool:
        """On held-out tasks or in training."""
        names = ("success", "held-out")
        return any(one.change > 0 and one.name.startswith(names) for one in self.outcomes)


def series(lines: Iterable[Mapping[str, Any]], evaluations: Iterable[Mapping[str, Any]] = ()) -> Evidence:
    """The evidence of ``lines`` of metrics, one per step, in order, and of lines of evaluations by steps taken."""
    lines, held_out = list(lines), dict[str, list[Measured]]()
    for line in chain(evaluations, lines):
        for name in filter(_HELD_OUT.fullmatch, line):
            bounds = (
                line.get(f"{name}_{end}", math.nan if "loss" not in name else line[name]) for end in ("low", "high")
            )
            if line[name] is not None:
                title = name.removeprefix("eval/").removesuffix("_success")
                held_out.setdefault(title, []).append(Measured(line["step"], line[name], *bounds))
    return Evidence([quantities(line) for line in lines], held_out)


def quantities(line: Mapping[str, Any]) -> dict[str, float]:
    """What causes ask of a line of metrics."""
    known = {key: float(value) for key, value in line.items() if isinstance(value, int | float)}
    row = {"step": known["step"]} | {name: known[key] for name, key in DATA["series"].items() if key in known}
    for name, prefixes in DATA["sums"].items():
        row[name] = math.fsum(value for key, value in known.items() if key.startswith(tuple(prefixes)))
    return row | {f"domain {found[1]}": known[key] for key in known if (found := _DOMAIN.fullmatch(key))}
