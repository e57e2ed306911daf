"""What the causes find together: which was first, and how it is said."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mua.observe.diagnosis.causes import CAUSES, Cause, Symptom
from mua.observe.diagnosis.evidence import Evidence
from mua.types import Json
from mua.utils.strict_json import printable

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
