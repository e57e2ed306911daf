"""What training says when something goes wrong: the causes that metrics alone can show, looked at after every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mua.observe.diagnosis.causes import CAUSES, Cause, Symptom
from mua.observe.diagnosis.evidence import Evidence, Floats, series
from mua.types import Json

log = logging.getLogger(__name__)

KEPT = 120
"""Steps that are looked at: the first of the run, as a beginning to compare with, and the newest."""
FIRST = 10
READY = 6
"""Steps before anything is said of what a policy does: its first steps are no sample."""
AT_ONCE = ("wrong_tokens", "leaking_user", "failing_user", "engine_mismatch", "stale_data")
"""Causes that are no matter of the policy, and told from the second step on."""


class Alarms:
    """Looks at each step's metrics as it comes; each cause is told once. About a millisecond per step.

    A fault of this code ends no run: it is logged once, and nothing is looked at any more.
    """

    def __init__(self, config: Json, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """``config`` is the run's, as plain values; ``before`` are the lines of metrics of its earlier starts, whose
        alarms were given then."""
        self._config, self._broken = config, False
        kept = before if len(before) < KEPT else [*before[:FIRST], *before[FIRST - KEPT :]]
        self._seen: Evidence | None = None
        self._told: set[str] = set()
        if before:
            self._safely(lambda: self._new(kept), "before")

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is new after ``step``, one line per cause."""
        return self._safely(lambda: self._new([{"step": step, **metrics}]), f"after step {step}")

    def _safely(self, look: Callable[[], list[str]], when: str) -> list[str]:
        if self._broken:
            return []
        try:
            return look()
        except Exception:
            self._broken = True
            log.exception("alarms: a fault of their own %s; this start of the run has none from here on", when)
            return []

    def _new(self, lines: Sequence[Mapping[str, Any]]) -> list[str]:
        """What shows after these lines of metrics and did not before them."""
        new = series(lines)
        self._seen = new if self._seen is None else _longer(self._seen, new)
        found = [(cause, symptom) for cause, symptom in self._found() if cause.name not in self._told]
        self._told |= {cause.name for cause, _ in found}
        return [
            f"{cause.title}, from step {symptom.step}: {symptom.text}; try: {symptom.remedy or cause.remedy}"
            for cause, symptom in found
        ]

    def _found(self) -> Iterator[tuple[Cause, Symptom]]:
        if (seen := self._seen) is None:
            return
        seen.config, seen.live = self._config, True
        for cause in CAUSES:
            patience = 2 if cause.name in AT_ONCE else READY
            if cause.from_metrics and len(seen.steps) >= patience and (found := cause.find(seen)) is not None:
                yield cause, found


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
