"""Progress of named stages: bars with the time left on a terminal, sparse plain lines elsewhere.

::

    with Progress(config.observe.progress) as progress:
        with progress.stage("train", total=100) as steps:
            for step in range(100):
                with progress.stage("rollout", total=256) as episodes:
                    ...
                    episodes.advance()
                steps.advance(note="reward 0.41")
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TextIO

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from mua.observe.safe_output import SafeConsole
from mua.utils.strict_json import pictured

PLAIN_INTERVAL_S = 30.0
"""A stage that writes to a file or pipe says something this often, and once when it ends."""


class ProgressStage:
    """One stage that is under way: a bar, lines in ``stream``, or silent. Made by :meth:`Progress.stage`."""

    def __init__(self, name: str, total: int | None, depth: int, bars: Bars | None, stream: TextIO | None) -> None:
        self.name = name
        self.total = total
        self.depth = depth
        self.done = 0
        self.note = ""
        self.started = self._said = time.monotonic()
        self._bars = bars
        self._stream = stream
        self._shown: tuple[int, str] | None = None
        """What was said last: the count and the note."""
        self._bar = bars.add_task("  " * depth + name, total=total, note="") if bars is not None else TaskID(0)

    def advance(self, count: int = 1, note: str | None = None) -> None:
        """``count`` more are done; ``note`` is shown until another comes."""
        self.done += count
        if note is not None:
            self.note = note
        if self._bars is not None:
            self._bars.update(self._bar, completed=self.done, note=self.note)
        elif time.monotonic() - self._said >= PLAIN_INTERVAL_S:
            self._said = time.monotonic()
            self._print()

    def line(self) -> str:
        """The stage in one plain line: name, count, seconds so far and left, note."""
        elapsed = time.monotonic() - self.started
        parts = [f"{self.name} {self.done}" + ("" if self.total is None else f"/{self.total}"), f"{elapsed:.0f} s"]
        if self.total is not None and 0 < self.done < self.total:
            parts.append(f"about {elapsed / self.done * (self.total - self.done):.0f} s left")
        return "  " * self.depth + ", ".join(parts) + (f": {self.note}" if self.note else "")

    def end(self) -> None:
        """Say the last of it."""
        if self._bars is None:
            if self._shown != (self.done, self.note):
                self._print()
        elif self.depth:  # inner stages come and go with every step; only the outermost leave their bar on the screen
            self._bars.remove_task(self._bar)
        else:
            self._bars.stop_task(self._bar)

    def _print(self) -> None:
        if self._stream is not None:
            print(pictured(self.line()), file=self._stream, flush=True)
            self._shown = (self.done, self.note)


class Progress:
    """The display of all stages of one process. Stages nest; an inner one is indented under the outer.

    Writes to ``stream``, standard error by default. With ``enabled`` false it shows nothing; so should be passed in
    every process but the first of a distributed run.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._stream = stream if enabled else None
        self._depth = 0
        self._bars: Bars | None = None
        if enabled and stream.isatty():
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
            )
            self._bars = Bars(*columns, console=SafeConsole(stream), refresh_per_second=4)
            self._bars.start()

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[ProgressStage]:
        """Show a stage for the length of the block. ``total`` None: how much there is to do is not known."""
        stage = ProgressStage(name, total, self._depth, self._bars, self._stream)
        self._depth += 1
        try:
            yield stage
        finally:
            self._depth -= 1
            stage.end()

    def close(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
