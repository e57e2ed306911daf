"""Seconds by named stage, summed over one step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StageTimer:
    """Wall-clock seconds of each stage since the last :meth:`take`.

    A stage entered several times adds up. Stages may nest; each counts its whole time, inner stages included, so only
    stages that do not nest sum to the step. Stages of concurrent tasks may overlap. One thread at a time.
    """

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the time of the block under ``name``, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self, prefix: str = "seconds/") -> dict[str, float]:
        """Seconds by ``prefix + stage`` and a fresh start."""
        taken = {f"{prefix}{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
