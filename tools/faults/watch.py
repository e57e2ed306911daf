"""Where a run is, read from what it writes: its lines on standard error, its engines' logs, its checkpoints.

::

    attempt begins ── start-up, or resume where a checkpoint is
    engine log: a prefill of an episode ─────────── rollout of the step that comes next
    stderr: "episodes of step 3 8/8" ────────────── scoring and training of step 3
    engine log: a cache was flushed ─────────────── sync of step 3
    checkpoints/.step_00000004.partial ──────────── checkpoint of step 3
    metrics.jsonl, and the checkpoint if it is due ─ rollout of step 4, or the export after the last

Nothing in the run is changed for it. A phase is noticed some milliseconds after it began.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import psutil

from tools.faults.draw import BEGINNING, SAVE_EVERY, STEPS, Phase

_ROLLED_OUT = re.compile(r"episodes of step (\d+) \d+/\d+")
_EPISODE = re.compile(r"Prefill batch, #new-seq: \d+, #new-token: [1-9]\d")
_FLUSHED = "Cache flushed successfully"
_LOGGED = re.compile(r'^\{"step": (\d+)')


class Tail:
    """Whole lines that are appended to a file from now on; the file may come later, and be replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            size = self._path.stat().st_size
            if size < self._offset:
                self._offset = 0  # lines of steps that are taken again were dropped
            if size > self._offset:
                return self._read()
        return []

    def _read(self) -> list[str]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode("utf-8", "replace").split("\n") if newline else []


@dataclass(frozen=True)
class Place:
    """Where a run is, since ``at`` on the monotonic clock."""

    phase: Phase
    step: int
    at: float

    @property
    def key(self) -> tuple[int, int]:
        """Orders the places of a run."""
        return (self.step, self.phase.order)

    def __str__(self) -> str:
        return str(self.phase) if self.phase is Phase.EXPORT else f"{self.phase} of step {self.step}"


class Watch:
    """One attempt, from its start on; ``moved`` is called with every new place."""

    def __init__(self, output: Path, stderr: Path, moved: Callable[[Place], None]) -> None:
        self._checkpoints = output / "checkpoints"
        self._logs = output / "logs"
        self._stderr, self._metrics = Tail(stderr), Tail(output / "metrics.jsonl")
        self._engines = {path: Tail(path) for path in self._logs.glob("engine-*.log")}
        self._moved = moved
        self._logged = -1
        resumed = newest_step(self._checkpoints)
        self.place = Place(Phase.RESUME if resumed else Phase.START, resumed, monotonic())
        moved(self.place)

    def look(self) -> None:
        """Bring :attr:`place` up to date."""
        for phase, step in self._signs():
            if (step, phase.order) > self.place.key:
                self.place = Place(phase, step, monotonic())
                self._moved(self.place)

    def _signs(self) -> Iterator[tuple[Phase, int]]:
        for line in self._stderr.lines():
            if found := _ROLLED_OUT.search(line):
                yield Phase.TRAIN, int(found[1])
        yield from self._engine_signs()
        if self.place.phase in (Phase.TRAIN, Phase.SYNC) and (self._checkpoints / self._partial).exists():
            yield Phase.SAVE, self.place.step
        for line in self._metrics.lines():
            if found := _LOGGED.search(line):
                self._logged = int(found[1])
        done = self._logged + 1
        if self._logged >= self.place.step and (not due(self._logged) or newest_step(self._checkpoints) >= done):
            yield (Phase.EXPORT if done == STEPS else Phase.ROLLOUT), done

    def _engine_signs(self) -> Iterator[tuple[Phase, int]]:
        for path in self._logs.glob("engine-*.log"):
            for line in self._engines.setdefault(path, _whole(path)).lines():
                if self.place.phase in BEGINNING and _EPISODE.search(line):
                    yield Phase.ROLLOUT, self.place.step
                elif self.place.phase is Phase.TRAIN and _FLUSHED in line:
                    yield Phase.SYNC, self.place.step

    @property
    def _partial(self) -> str:
        return f".step_{self.place.step + 1:08d}.partial"


def _whole(path: Path) -> Tail:
    """Of a log that is new: from its first line on."""
    tail = Tail(path)
    tail._offset = 0
    return tail


def due(step: int) -> bool:
    """Whether a checkpoint follows ``step``."""
    return (step + 1) % SAVE_EVERY == 0 or step + 1 == STEPS


def newest_step(checkpoints: Path) -> int:
    """Steps that the newest checkpoint holds; 0 where there is none."""
    return max((int(folder.name.removeprefix("step_")) for folder in checkpoints.glob("step_*")), default=0)


# ---- processes


def members(trainer: int, text: str) -> list[psutil.Process]:
    """What the trainer has started, directly or not, with ``text`` in its command line."""
    return [process for process in family(trainer) if text in command_of(process)]


def family(pid: int) -> list[psutil.Process]:
    """Everything below a process."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def command_of(process: psutil.Process) -> str:
    """Its command line; empty for what is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def left_in(folder: Path) -> list[psutil.Process]:
    """Whatever still runs in ``folder``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
