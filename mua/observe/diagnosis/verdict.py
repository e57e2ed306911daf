"""What the causes find together: which was first and how it is said; and what training says while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mua.observe.diagnosis.causes import CAUSES, Cause, Symptom
from mua.observe.diagnosis.evidence import Evidence, Floats, series
from mua.types import Json
from mua.utils.strict_json import printable

log = logging.getLogger(__name__)

SLACK = 0.05
"""Share of a run's steps, two at least, by which two causes may begin apart and still count as together: averages over
three steps cannot tell them apart, and what brings about the other is then named."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of one run."""

    run: str
    steps: int
    state: str
    findings: list[tuple[Cause, Symptom]]
    """What happened first comes first; the rest by the step at which it began."""
    unseen: list[str]

    @property
    def healthy(self) -> bool:
        return not self.findings

    def to_json(self) -> Json:
        """As ``mua diagnose --json`` prints it."""
        return {
            "run": self.run, "steps": self.steps, "state": self.state, "healthy": self.healthy,
            "findings": [
                {
                    "cause": cause.name, "title": cause.title, "step": found.step, "evidence": found.text,
                    "numbers": found.numbers, "trajectory": found.trajectory, "meaning": cause.meaning,
                    "try": found.remedy or cause.remedy,
                }
                for cause, found in self.findings
            ],
            "unseen": self.unseen,
        }  # fmt: skip

    def lines(self, place: str) -> Iterable[str]:
        """As ``mua diagnose`` prints it; ``place`` is how the person named the run."""
        state = f", {self.state}" if self.state else ""
        yield f"{printable(self.run)}: {self.steps} steps{state}"
        if self.healthy:
            yield "healthy: none of the causes that are known shows"
        for number, (cause, found) in enumerate(self.findings):
            when = "first" if not number else "then"
            yield f"{when}, from step {found.step}: {cause.title}"
            yield f"  {printable(found.text, 600)}"
            if not number:
                yield f"  {cause.meaning}"
            if found.trajectory:
                yield f"  look at: mua show {printable(place)} {printable(found.trajectory)}"
            if not number:
                yield f"  try: {found.remedy or cause.remedy}"
        for said in self.unseen:
            yield f"not seen: {printable(said, 600)}"


def diagnosed(run: str, seen: Evidence) -> Diagnosis:
    """What there is to find in ``seen``."""
    found = [(cause, finding) for cause in CAUSES if (finding := cause.find(seen)) is not None]
    return Diagnosis(run, len(seen.steps), seen.state, in_order(found, len(seen.steps)), seen.unseen)


def in_order(found: list[tuple[Cause, Symptom]], steps: int) -> list[tuple[Cause, Symptom]]:
    """By the step at which they began; those that began together (:data:`SLACK`) in the order of :data:`CAUSES`."""
    slack = max(2, round(SLACK * steps))
    left, ordered = list(found), []
    while left:
        earliest = min(finding.step for _, finding in left)
        chosen = next(pair for pair in left if pair[1].step <= earliest + slack)
        ordered.append(chosen)
        left.remove(chosen)
    return ordered


KEPT = 120
"""Steps that alarms look at: the first of the run, as a beginning to compare with, and the newest."""
FIRST = 10
READY = 6
"""Steps before anything is said of what a policy does: its first steps are no sample."""


class Alarms:
    """Looks at each step's metrics as it comes; each cause is told once. About a millisecond per step.

    A fault of this code ends no run: it is logged once, and nothing is looked at any more.
    """

    def __init__(self, config: Json, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """``config`` is the run's, as plain values; ``before`` are the lines of metrics of its earlier starts, whose
        alarms were given then."""
        self._config, self._broken = config, False
        self._seen: Evidence | None = None
        self._told: set[str] = set()
        if before:
            self._look(before if len(before) < KEPT else [*before[:FIRST], *before[FIRST - KEPT :]], "before")

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is new after ``step``, one line per cause."""
        return self._look([{"step": step, **metrics}], f"after step {step}")

    def _look(self, lines: Sequence[Mapping[str, Any]], when: str) -> list[str]:
        if self._broken:
            return []
        try:
            new = series(lines)
            self._seen = seen = new if self._seen is None else _longer(self._seen, new)
            seen.config, seen.live = self._config, True
            found = []
            for cause in CAUSES:
                ready = len(seen.steps) >= (2 if cause.at_once else READY)
                if cause.from_metrics and ready and (symptom := cause.find(seen)) and cause.name not in self._told:
                    self._told.add(cause.name)
                    text = f"{cause.title}, from step {symptom.step}: {symptom.text}"
                    found.append(f"{text}; try: {symptom.remedy or cause.remedy}")
            return found
        except Exception:
            self._broken = True
            log.exception("alarms: a fault of their own %s; this start of the run has none from here on", when)
            return []


def _longer(before: Evidence, new: Evidence) -> Evidence:
    """``before`` and one step more; of more than :data:`KEPT` the oldest behind the first is gone."""
    many = len(before.steps)
    kept = np.arange(many) if many < KEPT else np.delete(np.arange(many), FIRST)

    def joined(old: Mapping[str, Floats], more: Mapping[str, Floats]) -> dict[str, Floats]:
        nothing = np.full(many, np.nan), np.full(1, np.nan)
        return {
            name: np.concatenate([old.get(name, nothing[0])[kept], more.get(name, nothing[1])])
            for name in old.keys() | more.keys()
        }

    return Evidence(
        np.concatenate([before.steps[kept], new.steps]), joined(before.metrics, new.metrics),
        joined(before.domains, new.domains), joined(before.evaluations, new.evaluations),
    )  # fmt: skip
