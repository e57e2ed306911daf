"""What the causes find together: which was first and how it is said; and what training says while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mua.observe.diagnosis.causes import CAUSES, THRESHOLDS, Cause, Symptom
from mua.observe.diagnosis.curves import ending, mean
from mua.observe.diagnosis.evidence import Evidence, RunOutcome, quantities
from mua.observe.diagnosis.outcomes import outcomes_of
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
    outcomes: list[RunOutcome]
    solved: bool
    """Whether success left little to learn from the beginning to the end."""
    findings: list[tuple[Cause, Symptom]]
    """The cause that happened first comes first; the rest by the step at which it began; bad outcomes last."""
    unseen: list[str]

    @property
    def verdict(self) -> str:
        """ill, where anything is found; healthy only where an outcome is good; otherwise undecided."""
        if self.findings:
            return "ill"
        rose = any(one.change > 0 for one in self.outcomes if one.name != "scored")
        return "healthy" if self.solved or rose else "undecided"

    @property
    def healthy(self) -> bool | None:
        """None where nobody can tell yet."""
        return {"ill": False, "healthy": True}.get(self.verdict)

    def to_json(self) -> Json:
        """As ``mua diagnose --json`` prints it."""
        return {
            "run": self.run, "steps": self.steps, "state": self.state, "verdict": self.verdict, "healthy": self.healthy,
            "outcomes": [asdict(one) for one in self.outcomes],
            "findings": [
                {"cause": cause.name, "title": cause.title, "step": found.step, "evidence": found.text,
                 "trajectory": found.trajectory, "meaning": cause.meaning, "try": cause.remedy}
                for cause, found in self.findings
            ],
            "unseen": self.unseen,
        }  # fmt: skip

    def lines(self, place: str) -> Iterable[str]:
        """As ``mua diagnose`` prints it; ``place`` is how the person named the run."""
        state = f", {self.state}" if self.state else ""
        yield f"{printable(self.run)}: {self.steps} steps{state}"
        yield from (printable(str(one)) for one in self.outcomes)
        yield from {
            "healthy": ["healthy: none of the causes that are known shows"],
            "undecided": ["undecided: no known cause shows, and no outcome rose or fell beyond chance"],
        }.get(self.verdict, ())
        for number, (cause, found) in enumerate(self.findings):
            yield f"{'then' if number else 'first'}, from step {found.step}: {cause.title}"
            yield f"  {printable(found.text, 600)}"
            if found.trajectory:
                yield f"  look at: mua show {printable(place)} {printable(found.trajectory)}"
            if not number:
                yield f"  {cause.meaning}"
                yield f"  try: {cause.remedy}"
        for said in self.unseen:
            yield f"not seen: {printable(said, 600)}"


def diagnosed(run: str, seen: Evidence) -> Diagnosis:
    """What there is to find in ``seen``: outcomes first, then causes."""
    steps, known = len(seen.rows), {row["step"] for row in seen.rows}
    for step, members in seen.by_step().items():  # of a step that stopped the run there are no metrics
        if step not in known and sum(not e.scored for e in members) >= len(members) / 2:
            seen.rows.append({"step": step})
    seen.rows.sort(key=lambda row: row["step"])
    seen.outcomes = outcomes_of(seen)
    found = [(cause, finding) for cause in CAUSES if (finding := cause.find(seen)) is not None]
    success = seen.of("success")
    solved = min(mean(success), mean(ending(success))) >= THRESHOLDS.solved
    return Diagnosis(run, steps, seen.state, seen.outcomes, solved, in_order(found, steps), seen.unseen)


def in_order(found: list[tuple[Cause, Symptom]], steps: int) -> list[tuple[Cause, Symptom]]:
    """By the step at which they began; those that began together (:data:`SLACK`) in the order of :data:`CAUSES`; what
    is no cause but an outcome last."""
    slack = max(2, round(SLACK * steps))
    left, ordered = list(found), []
    while left:
        those = [pair for pair in left if not pair[0].outcome] or left
        earliest = min(finding.step for _, finding in those)
        ordered.append(next(pair for pair in those if pair[1].step <= earliest + slack))
        left.remove(ordered[-1])
    return ordered


KEPT = 120
"""Steps that alarms look at: the first of the run, as a beginning to compare with, and the newest."""
FIRST = 10
READY = 6
"""Steps before anything is said of what a policy does: its first steps are no sample."""


class Alarms:
    """Looks at each step's metrics as it comes; each cause is told once. Some hundredths of a second per step.

    A fault of this code ends no run: it is logged once, and nothing is looked at any more.
    """

    def __init__(self, config: Json, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """``config`` is the run's, as plain values; ``before`` are the lines of metrics of its earlier starts, whose
        alarms were given then."""
        self._config, self._broken = config, False
        self._rows: list[dict[str, float]] = []
        self._told: set[str] = set()
        if before:
            self._look(before, "before")

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is new after ``step``, one line per cause."""
        return self._look([{"step": step, **metrics}], f"after step {step}")

    def _look(self, lines: Sequence[Mapping[str, Any]], when: str) -> list[str]:
        if self._broken:
            return []
        try:
            self._rows += map(quantities, lines)
            del self._rows[FIRST : max(FIRST, len(self._rows) - KEPT + FIRST)]
            seen = Evidence(self._rows, config=self._config, live=True)
            seen.outcomes = outcomes_of(seen)
            found = []
            for cause in CAUSES:
                ready = len(seen.rows) >= (2 if cause.at_once else READY)
                if cause.from_metrics and ready and (symptom := cause.find(seen)) and cause.name not in self._told:
                    self._told.add(cause.name)
                    text = f"{cause.title}, from step {symptom.step}: {symptom.text}"
                    found.append(f"{text}; try: {cause.remedy}")
            return found
        except Exception:
            self._broken = True
            log.exception("alarms: a fault of their own %s; this start of the run has none from here on", when)
            return []
