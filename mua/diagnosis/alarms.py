"""What training says when something goes wrong: the causes that metrics alone can show, looked at after every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mua.diagnosis.causes import CAUSES, Cause, Symptom
from mua.diagnosis.evidence import Evidence, Floats, series
from mua.types import Json

KEPT = 120
"""Steps that are looked at: the first of the run, as a beginning to compare with, and the newest."""
FIRST = 10
READY = 6
"""Steps before anything is said of what a policy does: its first steps are no sample."""
AT_ONCE = ("wrong_tokens", "leaking_user", "failing_user", "engine_mismatch", "stale_data")
"""Causes that are no matter of the policy, and told from the second step on."""


class Alarms:
    """Looks at each step's metrics as it comes; each cause is told once. Under a millisecond per step."""

    def __init__(self, config: Json, before: Sequence[Mapping[str, Any]] = ()) -> None:
        """``config`` is the run's, as plain values; ``before`` are the lines of metrics of its earlier starts, whose
        alarms were given then."""
        self._config = config
        kept = before if len(before) < KEPT else [*before[:FIRST], *before[FIRST - KEPT :]]
        self._seen = series(kept) if before else None
        self._told = {cause.name for cause, _ in self._found()}

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is new after ``step``, one line a cause."""
        new = series([{"step": step, **metrics}])
        self._seen = new if self._seen is None else _longer(self._seen, new)
        lines = []
        for cause, found in self._found():
            if cause.name not in self._told:
                self._told.add(cause.name)
                lines.append(
                    f"{cause.title}, from step {found.step}: {found.text}; try: {found.remedy or cause.remedy}"
                )
        return lines

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
