"""Mutation testing: plants one fault at a time in a copy of the tree and reports the faults that no test notices.

    python tools/mutants.py [--only TEXT] [--jobs 2] [--seconds 120] [--list tools/mutants.toml]

Every entry of the list replaces one text of one file and names the tests that must then fail::

    tree ── copied once per job ──► the named tests pass there ──► mutant 1 ──► tests ──► text put back ──► mutant 2 ...

The working tree is never written to. A job is one interpreter that has imported torch and the like, and nothing of this
repository; each run of tests is a fork of it. The exit status is 1 if a mutant survives, is stale (its text does not
stand in the file exactly once), outlives its deadline or cannot be run, or if a test fails without any mutant; else 0.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants.toml"
KEYS = {"name", "file", "old", "new", "tests"}
PRELOADED = (
    "torch", "torch.utils.tensorboard", "numpy", "scipy.stats", "transformers", "tokenizers", "safetensors", "pydantic",
    "aiohttp", "yaml", "rich.progress", "pytest", "_pytest.assertion.rewrite", "pytest_asyncio", "hypothesis",
)  # fmt: skip
"""What nearly every test imports, and what is not part of this repository."""
IGNORED = shutil.ignore_patterns(".*", "__pycache__", "runs", "*.egg-info", "dist", "build")
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


# ---- a copy of the tree, and the interpreter that runs its tests


class Copy:
    """A copy of ``root`` with an interpreter beside it. Belongs to one thread at a time; use as a context manager."""

    def __init__(self, root: Path, folder: Path, preloaded: Sequence[str] = PRELOADED) -> None:
        self._tree = folder / "tree"
        self._logs = folder / "log"
        self._stamp = 0
        shutil.copytree(root, self._tree, ignore=IGNORED, symlinks=True)
        paths = [str(self._tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", *preloaded],
            cwd=self._tree,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def judge(self, mutant: Mutant, seconds: float) -> Finding:
        """Plant ``mutant``, run its tests for at most ``seconds``, and take it out again."""
        try:
            with self._planted(mutant):
                return self._finding(mutant.name, mutant.tests, seconds, passed="SURVIVED", failed="killed")
        except (ValueError, OSError) as error:
            return Finding(mutant.name, "STALE", str(error))

    def unharmed(self, name: str, tests: Sequence[str], seconds: float) -> Finding:
        """The same tests without a fault, which must pass: "killed" is none of theirs."""
        return self._finding(name, tests, seconds, passed="killed", failed="ERROR")

    @contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        path = self._tree / mutant.file
        source = path.read_text(encoding="utf-8")
        self._write(path, mutant.applied(source))
        try:
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: Python takes compiled code for current if time (in seconds) and size are the same."""
        path.write_text(text, encoding="utf-8")
        self._stamp += 1
        os.utime(path, (self._stamp, self._stamp))

    def _finding(self, name: str, tests: Sequence[str], seconds: float, *, passed: Verdict, failed: Verdict) -> Finding:
        started = time.monotonic()
        answer = self._ask({"tests": list(tests), "seconds": seconds, "log": str(self._logs)})
        spent = time.monotonic() - started
        status = answer["status"]
        if status is None:
            return Finding(name, "DEADLINE", f"still running after {seconds:g} s", spent)
        if status not in (0, 1):
            return Finding(name, "ERROR", f"pytest ended with {status}: {self._tail()}", spent)
        return Finding(name, passed if status == 0 else failed, answer.get("failed") or ", ".join(tests), spent)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the interpreter that runs the tests has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self) -> str:
        with suppress(OSError):
            return self._logs.read_text(encoding="utf-8", errors="replace")[-_TAIL:]
        return "it wrote nothing"


def serve(preloaded: Sequence[str]) -> None:
    """Run tests for :class:`Copy`, each time in a fork; requests and answers are lines of JSON."""
    sys.path[0] = os.getcwd()  # the copy, not the folder of this script
    for name in preloaded:
        with suppress(ImportError):
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_forked(request["tests"], request["seconds"], request["log"])) + "\n")
        answers.flush()


def _forked(tests: Sequence[str], seconds: float, log: str) -> dict[str, Any]:
    """The exit status of the tests, None if they took longer, and which failed first."""
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        os.close(told)
        _run(tests, log, tell)
    os.close(tell)
    until = time.monotonic() + seconds
    status: int | None = None
    while status is None and time.monotonic() < until:
        ended, raw = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if ended else None
        time.sleep(0 if ended else 0.01)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the tests, or what they left behind
    if status is None:
        os.waitpid(child, 0)
    with os.fdopen(told) as pipe:
        return {"status": status, "failed": pipe.read() if status == 1 else ""}


def _run(tests: Sequence[str], log: str, tell: int) -> None:
    """In the fork: one run of pytest, then the end of the process."""
    status = 3
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        import pytest

        status = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests], plugins=[_FirstFailure(tell)]))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        sys.stdout.flush()
        os._exit(status)


class _FirstFailure:
    """A pytest plugin that tells which test failed first."""

    def __init__(self, tell: int) -> None:
        self._tell = tell

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self._tell >= 0:
            message = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", "")).partition("\n")[0]
            os.write(self._tell, f"{report.nodeid}: {message[:160]}".encode())
            self._tell = -1


# ---- the whole list


def run(
    root: Path, mutants: Sequence[Mutant], *, jobs: int, seconds: float, preloaded: Sequence[str] = PRELOADED
) -> tuple[list[Finding], list[Finding]]:
    """What the named tests say without a fault (those of one file together), and of every mutant."""
    from mua.observe.progress import Progress

    by_file: dict[str, set[str]] = {}
    for test in (test for mutant in mutants for test in mutant.tests):
        by_file.setdefault(test.partition("::")[0], set()).add(test)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ExitStack() as stack:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(max(1, min(jobs, len(mutants)))):
            copies.put(stack.enter_context(Copy(root, Path(folder) / str(job), preloaded)))
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
                return copy.unharmed(file, sorted(by_file[file]), 5 * seconds)

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
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        sys.path[0] = str(ROOT)
        sys.exit(main())
