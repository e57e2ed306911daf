"""Fuzzers: damaged input of every kind, by the thousand, each of which must load or be refused in a clear line.

    python -m tools.fuzz [--only configuration traces] [--cases N] [--seed N] [--report FILE]

A subject is a module of ``tests/fuzz`` with ``run(cases, seed) -> list[str]``, one line for each fault it found: a
traceback, a wrong line or key named, data lost. Optional are ``CASES``, how many a full run takes, and ``CHUNK``, how
many ``run`` is asked for at once (1). Case number n of a run has the seed ``--seed`` + n, so ``--cases 1 --seed S``
repeats it. Every subject runs in a process of its own, under a deadline for each case: what hangs, or kills the
process, is a fault too, and the run goes on behind it. Exit status 1 if there is any fault.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Protocol

import psutil
from rich.console import Console
from rich.table import Table

from mua.observe.progress import Progress, ProgressStage
from tools import kit

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "fuzz"
CASES = {"model_folders": 167, "manifests": 87}
"""Of subjects that do not say."""
CPU_SECONDS = 10.0
"""What one case may compute."""
WAIT_SECONDS = 60.0
"""How long a process may sleep in one chunk: it waits for what will never come. One that only gets no core is not
asleep."""
MEMORY = 8 << 30
"""Bytes of data a subject's process may hold."""
SHOWN = 20
"""Faults of one subject that are printed."""


class Subject(Protocol):
    """A module of the folder."""

    __name__: str

    def run(self, cases: int, seed: int) -> list[str]:
        """One line for each fault of ``cases`` cases."""


@dataclass
class Found:
    """What became of one subject."""

    cases: int
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=names(), metavar="SUBJECT", help=f"of {', '.join(names())}")
    parser.add_argument("--cases", type=int, help="of each subject; by default what a full run takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="JSON file to write the result into")
    arguments = parser.parse_args()
    found = {name: fuzz(subject(name), arguments.cases, arguments.seed) for name in arguments.only or names()}
    if arguments.report:
        arguments.report.write_text(json.dumps({name: asdict(one) for name, one in found.items()}), encoding="utf-8")
    show(found)
    sys.exit(any(one.faults for one in found.values()))


def names() -> list[str]:
    """The subjects there are."""
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def subject(name: str) -> Subject:
    """The module of ``tests/fuzz`` with this name."""
    module: Subject = importlib.import_module(f"tests.fuzz.{name}")  # type: ignore[assignment]
    return module


def fuzz(module: Subject, cases: int | None, seed: int) -> Found:
    """Run ``cases`` cases of one subject, by default as many as a full run takes."""
    name = module.__name__.rpartition(".")[2]
    found = Found(cases or int(getattr(module, "CASES", CASES.get(name, 100))))
    chunk, started, done = getattr(module, "CHUNK", 1), time.monotonic(), 0
    with Progress() as progress, progress.stage(name, total=found.cases) as stage:
        while done < found.cases:
            done = _stretch(module, found, done, chunk, seed, stage)
    found.seconds = round(time.monotonic() - started, 1)
    return found


def show(found: dict[str, Found]) -> None:
    """Print a line a subject, and the first faults of each."""
    table = Table("subject", "cases", "faults", "seconds")
    for name, one in found.items():
        table.add_row(name, str(one.cases), str(len(one.faults)), f"{one.seconds:.1f}")
    Console().print(table)
    for name, one in found.items():
        for fault in one.faults[:SHOWN]:
            print(f"{name}: {fault[:1000]}")


def _stretch(module: Subject, found: Found, done: int, chunk: int, seed: int, stage: ProgressStage) -> int:
    """Run cases from ``done`` on in one process until all are done or it had to be killed; how many are done then."""
    with _child(module, found.cases, done, chunk, seed) as (process, answers):
        while done < found.cases:
            size = min(chunk, found.cases - done)
            faults, alive = _awaited(process, answers, size)
            found.faults += faults if alive else [f"seed {seed + done}, {size} cases: {faults[0]}"]
            done += size
            stage.advance(size, note=f"{len(found.faults)} faults")
            if not alive:
                break
    return done


def _awaited(process: ForkProcess, answers: Connection, size: int) -> tuple[list[str], bool]:
    """The faults of the next chunk, or what became of the process; whether it goes on."""
    with suppress(EOFError, psutil.NoSuchProcess):
        watched, awake = psutil.Process(process.pid), time.monotonic()
        before = _cpu(watched)
        while not answers.poll(0.2):
            if _cpu(watched) - before > CPU_SECONDS * size:
                return [f"hang: more than {CPU_SECONDS * size:g} s of computing"], False
            if watched.status() != psutil.STATUS_SLEEPING:
                awake = time.monotonic()
            if time.monotonic() - awake > WAIT_SECONDS:
                return [f"hang: asleep for {WAIT_SECONDS:g} s"], False
        faults: list[str] = answers.recv()
        return faults, True
    process.join(WAIT_SECONDS)
    return [f"the process died, exit code {process.exitcode}"], False


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextmanager
def _child(
    module: Subject, cases: int, first: int, chunk: int, seed: int
) -> Iterator[tuple[ForkProcess, Connection]]:  # fmt: skip
    answers, theirs = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")  # what is imported is imported once for all
    process = context.Process(target=_work, args=(module.run, cases, first, chunk, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, answers
    finally:
        if process.is_alive():
            process.kill()
        process.join()
        answers.close()


def _work(
    run: Callable[[int, int], list[str]], cases: int, first: int, chunk: int, seed: int, answers: Connection
) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for start in range(first, cases, chunk):
        try:
            faults = run(min(chunk, cases - start), seed + start)
        except Exception:
            faults = [f"seed {seed + start}: the subject itself failed: {traceback.format_exc()[-1500:]}"]
        answers.send(faults)


if __name__ == "__main__":
    main()
