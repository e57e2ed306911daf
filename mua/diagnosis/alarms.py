"""What training says when something goes wrong: the causes that metrics alone can show, looked at after every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from mua.diagnosis.causes import CAUSES
from mua.diagnosis.evidence import QUANTITIES, SUMS, series
from mua.types import Json

KEPT = 120
"""Steps that are looked at: the first of the run, as a beginning to compare with, and the newest."""
FIRST = 10
READY = 6
"""Steps before anything is said of what a policy does: its first steps are no sample."""
AT_ONCE = ("wrong_tokens", "leaking_user", "failing_user", "engine_mismatch", "stale_data")
"""Causes that are no matter of the policy, and told from the second step on."""


class Alarms:
    """Looks at each step's metrics as it comes; each cause is told once. Some tenths of a millisecond a step."""

    def __init__(self, config: Json) -> None:
        """``config`` is the run's, as plain values."""
        self._config = config
        self._first: list[dict[str, Any]] = []
        self._newest: deque[dict[str, Any]] = deque(maxlen=KEPT - FIRST)
        self._told: set[str] = set()

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is new after ``step``, one line a cause."""
        names, sums = {name for keys in QUANTITIES.values() for name in keys}, tuple(p for ps in SUMS.values() for p in ps)
        line = {"step": step} | {n: v for n, v in metrics.items() if n in names or n.startswith(sums)}
        (self._first if len(self._first) < FIRST else self._newest).append(line)
        seen = series([*self._first, *self._newest])
        seen.config, seen.live = self._config, True
        lines = []
        for cause in CAUSES:
            if len(seen.steps) < (2 if cause.name in AT_ONCE else READY):
                continue
            if not cause.from_metrics or cause.name in self._told or (found := cause.find(seen)) is None:
                continue
            self._told.add(cause.name)
            lines.append(f"{cause.title}, from step {found.step}: {found.text}; try: {found.remedy or cause.remedy}")
        return lines
