"""Mutation testing: plants one fault at a time in a copy of the tree and reports the faults that no test notices.

    python tools/mutants.py [--only TEXT] [--jobs 2] [--seconds 120] [--list tools/mutants.toml]

Every entry of the list replaces one text of one file and names the tests that must then fail::

    tree ── copied once per job ──► the named tests pass there ──► mutant 1 ──► tests ──► text put back ──► mutant 2 ...

The working tree is never written to. Each run of tests is a fork of one interpreter that has imported torch and the
like, and nothing of this repository. The exit status is 1 if a mutant survives, is stale (its text does not
stand in the file exactly once), outlives its deadline or cannot be run, or if a test fails without any mutant; else 0.
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
KEYS = {"name", "file", "old", "new", "tests"}
PRELOADED = (
    "torch", "torch.utils.tensorboard", "numpy", "scipy.stats", "transformers", "tokenizers", "safetensors", "pydantic",
    "aiohttp", "yaml", "rich.progress", "pytest", "_pytest.assertion.rewrite", "pytest_asyncio", "hypothesis",
)  # fmt: skip
"""What nearly every test imports, and what is not part of this repository."""
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info", "dist", "build")
FORKS: Any = multiprocessing.get_context("forkserver")
_TAIL = 2000

Verdict = Literal["killed", "SURVIVED", "STALE", "DEADLINE", "ERROR"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault to plant."""

    name: str
    """What is wrong, in words."""
    file: str
    """Path from the root of the tree."""
    old: str
    """A text that the file holds exactly once."""
    new: str
    tests: tuple[str, ...]
    """Files or node ids of pytest; one of them must fail."""

    def applied(self, source: str) -> str:
        """``source`` with the fault. Raises ``ValueError`` when it does not hold :attr:`old` exactly once, or when what
        results is no Python or the same program."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.file} holds its text {count} times instead of once")
        mutated = source.replace(self.old, self.new)
        try:
            if ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(source)):
                raise ValueError(f"{self.file} means the same with and without it")
        except SyntaxError as error:
            raise ValueError(f"{self.file}:{error.lineno}: it is no Python: {error.msg}") from None
        return mutated


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one mutant, or of the tests of one file without any."""

    name: str
    verdict: Verdict
    told: str
    """The test that failed and its message, or why there is no such test."""
    seconds: float = 0.0


def load(path: Path) -> list[Mutant]:
    """The mutants of a list. Raises ``ValueError`` that names the entry and the key."""
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from None
    mutants = [_entry(path, number, entry) for number, entry in enumerate(entries, start=1)]
    if twice := [name for name, count in Counter(m.name for m in mutants).items() if count > 1]:
        raise ValueError(f"{path}: two mutants are named {twice[0]!r}")
    return mutants


def _entry(path: Path, number: int, entry: dict[str, Any]) -> Mutant:
    if wrong := KEYS ^ entry.keys():
        raise ValueError(
            f"{path}: mutant {number}: keys are {', '.join(sorted(KEYS))}; wrong or missing: {sorted(wrong)}"
        )
    if not entry["tests"]:
        raise ValueError(f"{path}: mutant {number}: tests is empty; name those that must fail")
    return Mutant(entry["name"], entry["file"], entry["old"], entry["new"], tuple(entry["tests"]))


# ---- a copy of the tree, and its tests


class Copy:
    """A copy of ``root`` in which tests run. Belongs to one thread at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._tree, self._log, self._stamp = folder / "tree", folder / "log", 0
        shutil.copytree(root, self._tree, ignore=IGNORED, symlinks=True)

    def judge(self, mutant: Mutant, seconds: float) -> Finding:
        """Plant ``mutant``, run its tests for at most ``seconds``, and take it out again."""
        path = self._tree / mutant.file
        try:
            source = path.read_text(encoding="utf-8")
            mutated = mutant.applied(source)
        except (ValueError, OSError) as error:
            return Finding(mutant.name, "STALE", str(error))
        self._write(path, mutated)
        try:
            return self.test(mutant.name, mutant.tests, seconds, passed="SURVIVED", failed="killed")
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: Python takes compiled code for current if time (in seconds) and size are the same."""
        path.write_text(text, encoding="utf-8")
        self._stamp += 1
        os.utime(path, (self._stamp, self._stamp))

    def test(self, name: str, tests: Sequence[str], seconds: float, *, passed: Verdict, failed: Verdict) -> Finding:
        """What the tests say, in a fork of an interpreter that has imported torch and the like."""
        started = time.monotonic()
        told, tell = FORKS.Pipe(duplex=False)
        child = FORKS.Process(target=run_tests, args=(self._tree, tests, self._log, tell))
        child.start()
        tell.close()
        child.join(seconds)
        late = child.exitcode is None
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # the tests, or what they left behind
        child.kill()
        child.join()
        spent = time.monotonic() - started
        if late:
            return Finding(name, "DEADLINE", f"still running after {seconds:g} s", spent)
        if child.exitcode not in (0, 1):
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
            return Finding(name, "ERROR", f"pytest ended with {child.exitcode}: {tail}", spent)
        first = ", ".join(tests)
        with suppress(EOFError):  # no test failed
            first = told.recv()
        return Finding(name, passed if child.exitcode == 0 else failed, first, spent)


def run_tests(tree: Path, tests: Sequence[str], log: Path, tell: Connection) -> None:
    """In a fork: one run of pytest on ``tree``; tells which test failed first."""
    os.setsid()
    os.chdir(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tools"))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = str(tree)
    output, null = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    import pytest

    class FirstFailure:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                message = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "")).partition("\n")[0]
                tell.send(f"{report.nodeid}: {message[:160]}")

    status = 3
    try:
        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[FirstFailure()]))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(status)


# ---- the whole list


def run(
    root: Path, mutants: Sequence[Mutant], *, jobs: int, seconds: float, preloaded: Sequence[str] = PRELOADED
) -> tuple[list[Finding], list[Finding]]:
    """What the named tests say without a fault (those of one file together), and of every mutant."""
    from mua.observe.progress import Progress

    FORKS.set_forkserver_preload(list(preloaded))
    by_file: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        by_file.setdefault(test.partition("::")[0], set()).add(test)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(max(1, min(jobs, len(mutants)))):
            copies.put(Copy(root, Path(folder) / str(job)))
        progress = stack.enter_context(Progress(True))
        pool = stack.enter_context(ThreadPoolExecutor(copies.qsize()))

        @contextmanager
        def one() -> Iterator[Copy]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def unharmed(file: str) -> Finding:
            with one() as copy:
                return copy.test(file, sorted(by_file[file]), 5 * seconds, passed="killed", failed="ERROR")

        def judged(mutant: Mutant) -> Finding:
            with one() as copy:
                return copy.judge(mutant, seconds)

        found: list[list[Finding]] = []
        for stage, work, items in (("tests without a mutant", unharmed, [*by_file]), ("mutants", judged, [*mutants])):
            found.append([])
            with progress.stage(stage, total=len(items)) as shown:
                for finding in pool.map(work, items):  # type: ignore[arg-type]
                    found[-1].append(finding)
                    shown.advance(note=f"{sum(f.verdict != 'killed' for f in found[-1])} not as they should be")
    return found[0], found[1]


def show(mutants: Sequence[Mutant], unharmed: Sequence[Finding], judged: Sequence[Finding], seconds: float) -> bool:
    """Print a line for each mutant, those not killed last; whether all is as it should be."""
    print("result    seconds  mutant (file): the test that failed, and how")
    for mutant, finding in sorted(zip(mutants, judged, strict=True), key=lambda pair: pair[1].verdict != "killed"):
        print(f"{finding.verdict:9} {finding.seconds:7.1f}  {mutant.name} ({mutant.file}): {finding.told}")
    broken = [finding for finding in unharmed if finding.verdict != "killed"]
    for finding in broken:
        print(f"fails without any mutant, so that it proves nothing: {finding.name}: {finding.told}")
    counts = Counter(finding.verdict for finding in judged)
    others = "".join(f", {count} {verdict}" for verdict, count in counts.items() if verdict != "killed")
    print(f"{counts['killed']} of {len(judged)} mutants killed{others}, in {seconds:.0f} s")
    return not broken and counts["killed"] == len(judged)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="mutants whose name, file or tests contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time")
    parser.add_argument("--seconds", type=float, default=120.0, help="deadline of one mutant's tests")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of mutants")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    chosen = parser.parse_args(arguments)
    try:
        mutants = [m for m in load(chosen.list) if any(chosen.only in text for text in (m.name, m.file, *m.tests))]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not mutants:
        print(
            f"--only {chosen.only!r}: no mutant of {chosen.list} has this in its name, file or tests", file=sys.stderr
        )
        return 2
    started = time.monotonic()
    unharmed, judged = run(chosen.root, mutants, jobs=chosen.jobs, seconds=chosen.seconds)
    return 0 if show(mutants, unharmed, judged, time.monotonic() - started) else 1


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main())
