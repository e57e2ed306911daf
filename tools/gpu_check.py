"""What of mua works on this machine's GPU, and how fast: one command, each check in a process of its own.

    python tools/gpu_check.py --list
    python tools/gpu_check.py --out FOLDER [--budget SECONDS] [--only NAME ...] [--engine KEY=VALUE ...] [--device cpu]

It needs a Python with torch 2.11 or later and one CUDA device, no internet, and no other package: a check whose package
is not installed is ``skipped`` and names it. Without CUDA the same checks run on the CPU at toy size, which proves this
script and nothing of a GPU.

A check that hangs, crashes or takes too much memory is its own ``failed``; whatever it started is killed, and the next
one runs. Each leaves a line of JSON on standard output and in ``FOLDER/results.jsonl``. At the end there are a table in
Markdown (``FOLDER/gpu.md``, ready for docs/benchmarks/gpu.md) and what the checks printed (``FOLDER/log.txt``). Run
again with the same folder, it goes on with what is missing. The order is that of value: a budget cuts off the least.

Exit status: 0 all that ran is ok; 1 a check failed; 2 it could not be run; 3 nothing failed, but the budget ended
before the last check.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parents[1]
if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(ROOT))
    sys.path[:] = [path for path in sys.path if path != str(ROOT / "tools")]

from tools.gpu_checks import CHECKS, Check, child  # noqa: E402
from tools.gpu_checks.report import page  # noqa: E402

State = Literal["ok", "failed", "skipped"]
RESULTS, PAGE, LOG = "results.jsonl", "gpu.md", "log.txt"
LEFT = "not run: "
"""How the message begins of a check that the budget left out; it counts as missing."""
LOG_BYTES = 65536
"""Of what one check printed, at most, in the log."""
END_SECONDS = 10.0
"""How long what a check started may take to end by itself, as engines do whose owner is gone."""
POLL_SECONDS = 0.05
MEMORY_SECONDS = 0.5
"""Between looks at the memory that a check takes."""
MEMORY_SHARE = 0.9
"""Of the host's memory that is free at the start, what one check and all it started may take."""
PRELOADED = ("torch", "mua.trainer.learner", "mua.launch.plan.planner", "transformers.models.qwen3_moe")


@dataclass
class Record:
    """What one check found."""

    name: str
    state: State
    seconds: float
    figures: list[dict[str, Any]] = field(default_factory=list)
    """Each with ``name``, ``value`` and ``unit``."""
    message: str = ""
    date: str = ""
    machine: dict[str, Any] | None = None
    """Of the first check: hardware and versions."""

    def line(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if value not in (None, [], "")})


class Usage(Exception):
    """What a person can fix: it could not be run."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what is checked, and leave")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these, also where the folder has their results")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for results, table and log")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it; what does not fit is named")
    parser.add_argument("--retry", action="store_true", help="also run again what failed or was skipped")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="cpu: toy sizes in spite of a GPU")
    engines = "keys of the section engine, or SGLang's own arguments, for the checks with engines"
    parser.add_argument("--engine", nargs="+", default=[], metavar="KEY=VALUE", help=engines)
    parser.add_argument("--host-memory", type=float, metavar="GB", help="what one check may take of the host's memory")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for check in CHECKS:
            print(f"{check.name:22} about {check.estimate:3.0f} s, at most {check.deadline:3.0f} s  {check.proves}")
        return 0
    # Checks leave no destructor a chance, so that Python's tracker of semaphores would count what is long gone.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
    # The process that checks are forked from imports this checkout before it is told any path.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        if arguments.out is None:
            raise Usage("--out FOLDER is needed, for results, table and log")
        if wrong := [entry for entry in arguments.engine if "=" not in entry]:
            raise Usage(f"--engine takes KEY=VALUE, such as attention_backend=triton; {wrong[0]!r} is none")
        os.environ[child.ENGINE] = " ".join(arguments.engine)
        session = Session(arguments.out, arguments.device, arguments.budget, arguments.host_memory)
        return session.run(CHECKS, arguments.only, arguments.retry)
    except (Usage, OSError) as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2


class Session:
    """One run of the command into one folder.

    Args:
        budget: seconds from now on for everything; None is without end.
        host_memory: gigabytes; None: :data:`MEMORY_SHARE` of what is free now.
    """

    def __init__(self, out: Path, device: str, budget: float | None, host_memory: float | None = None) -> None:
        self.out, self.device = out, device
        self.ends = time.monotonic() + (budget if budget is not None else float("inf"))
        self.memory = int(host_memory * 1e9) if host_memory else int(MEMORY_SHARE * free_memory())
        self.records: dict[str, Record] = {}
        out.mkdir(parents=True, exist_ok=True)
        self._read()

    def run(self, checks: Sequence[Check], only: Sequence[str] | None = None, retry: bool = False) -> int:
        """Run what is missing of ``checks``, the first of which finds the device; the exit status."""
        if unknown := set(only or ()) - {check.name for check in checks}:
            raise Usage(f"no check is called {', '.join(sorted(unknown))}; --list shows them")
        first, *others = checks
        before = self.records.get(first.name)
        machine = self._take(first, "spawn")
        if before is not None and before.machine and machine.machine:
            self._same_machine(before.machine, machine.machine)
        self._write(machine)
        cuda = bool(machine.machine and machine.machine["device"] != "cpu")
        for check in others:
            if only is not None and check.name not in only:
                continue
            if only is None and self._done(check.name, retry):
                continue
            if machine.state != "ok":
                self._write(self._record(check, "skipped", 0.0, message=f"{LEFT}{first.name} did not end well"))
            elif not cuda and check.cuda_only:
                self._write(self._record(check, "skipped", 0.0, message=f"no CUDA device: {check.cuda_only}"))
            else:
                # A process in which CUDA was touched must not fork; without CUDA one start serves all.
                self._write(self._take(check, "spawn" if cuda else "forkserver"))
        self._publish(checks)
        states = [record.state for record in self.records.values()]
        left = [record.name for record in self.records.values() if record.message.startswith(LEFT)]
        return 1 if "failed" in states else 3 if left else 0

    def _done(self, name: str, retry: bool) -> bool:
        record = self.records.get(name)
        if record is None or record.message.startswith(LEFT):
            return False
        return record.state == "ok" or not retry

    def _same_machine(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for key in ("device", "gpus"):
            if before.get(key) != now.get(key):
                raise Usage(
                    f"{self.out / RESULTS} holds results of {before.get('device')}, this is {now.get('device')}; "
                    "give another --out"
                )

    def _take(self, check: Check, method: str) -> Record:
        """Run one check, if it fits."""
        left = self.ends - time.monotonic()
        if left < check.estimate and self.ends != float("inf"):
            message = f"{LEFT}{max(left, 0):.0f} s are left of the budget, it takes about {check.estimate:.0f} s"
            return self._record(check, "skipped", 0.0, message=message)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mua-gpu-", ignore_cleanup_errors=True) as folder:
            work = Path(folder)
            seconds = min(check.deadline, left)
            ended = self._watched(check, method, work, seconds)
            taken = time.monotonic() - began
            record = self._of_result(check, work / child.RESULT, taken, ended)
            if ended == "late" and seconds < check.deadline:
                record = self._record(check, "skipped", taken, message=f"{LEFT}stopped where the budget ended")
            self._log(record, work / child.OUTPUT)
        return record

    def _watched(self, check: Check, method: str, work: Path, seconds: float) -> str:
        """Start the process of a check and end it, with all that it started. How it ended, "" for as it should."""
        mark = secrets.token_hex(8)
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(list(PRELOADED))
        task = child.Task(
            check.module, check.function, str(work), mark, seconds, self.device, str(ROOT), dict(os.environ)
        )
        process = context.Process(target=child.enter, args=(task,), name=check.name)
        process.start()
        deadline, look, ended = time.monotonic() + seconds, 0.0, ""
        try:
            while not ended and process.exitcode is None:
                process.join(POLL_SECONDS)
                if (now := time.monotonic()) > deadline:
                    ended = "late"
                elif now > look:
                    look, ended = now + MEMORY_SECONDS, self._too_large(memory_of(process.pid, mark))
            if not ended:
                ended = _told(process.exitcode or 0)
        finally:
            end_all(process.pid, mark)
            process.join(END_SECONDS)
        return ended

    def _too_large(self, taken: int) -> str:
        if taken <= self.memory:
            return ""
        return f"took {taken / 1e9:.1f} GB of the host's memory, {self.memory / 1e9:.1f} are allowed"

    def _of_result(self, check: Check, file: Path, seconds: float, ended: str) -> Record:
        """The check's own word, unless its process ended otherwise than it should."""
        if ended == "late":
            return self._record(check, "failed", seconds, message=f"did not end within {check.deadline:.0f} s")
        if ended:
            return self._record(check, "failed", seconds, message=ended)
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            state, figures, message = said["state"], said["figures"], str(said["message"])
            formed = all(figure.keys() == {"name", "value", "unit"} for figure in figures)
            if state not in ("ok", "failed", "skipped") or not formed:
                raise ValueError("it has another form")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"its process ended without a result that can be read ({type(error).__name__}: {error})"
            return self._record(check, "failed", seconds, message=message)
        return self._record(check, state, seconds, figures, message, said.get("machine"))

    def _record(
        self, check: Check, state: State, seconds: float, figures: Iterable[dict[str, Any]] = (), message: str = "",
        machine: dict[str, Any] | None = None,
    ) -> Record:  # fmt: skip
        date = time.strftime("%Y-%m-%d", time.gmtime())
        return Record(check.name, state, round(seconds, 1), list(figures), message, date, machine)

    def _read(self) -> None:
        """The last word on each check of an earlier run; a line cut off at its end is none."""
        file = self.out / RESULTS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.exists() else (), 1):
            try:
                record = Record(**json.loads(line))
            except (ValueError, TypeError) as error:
                print(f"gpu_check: {file}, line {number} is left out: {error}", file=sys.stderr)
                continue
            self.records[record.name] = record

    def _write(self, record: Record) -> None:
        self.records[record.name] = record
        with (self.out / RESULTS).open("a", encoding="utf-8") as file:
            file.write(record.line() + "\n")
        print(record.line(), flush=True)

    def _log(self, record: Record, printed: Path) -> None:
        with suppress(OSError), (self.out / LOG).open("a", encoding="utf-8") as log:
            text = printed.read_bytes()[-LOG_BYTES:].decode("utf-8", errors="replace")
            log.write(f"===== {record.name}: {record.state} {record.message}\n{text}\n")

    def _publish(self, checks: Sequence[Check]) -> None:
        text = page([asdict(self.records[check.name]) for check in checks if check.name in self.records], checks)
        (self.out / PAGE).write_text(text, encoding="utf-8")
        print(text, end="", flush=True)


def _told(status: int) -> str:
    if status == 0:
        return ""
    if status > 0:
        return f"its process ended with status {status}"
    name = signal.Signals(-status).name
    return f"its process was killed by {name}" + (" (memory of the host?)" if name == "SIGKILL" else "")


def free_memory() -> int:
    """Bytes of the host that processes can still take, by the kernel and by the control group."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    first = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for limit, used in (("memory.max", "memory.current"), first):  # of control groups, version 2 and 1
        with suppress(OSError, ValueError):  # without a limit it is no number, or huge
            free = min(free, int((group / limit).read_text()) - int((group / used).read_text()))
    return free


def members(leader: int | None, mark: str) -> list[int]:
    """Processes of the session of ``leader``, and all whose variables carry ``mark``: what it started in sessions of
    their own, as engines are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError, ValueError, IndexError):
                of_session = (entry / "stat").read_text().rpartition(")")[2].split()
                if of_session[0] == "Z":
                    continue
                if int(of_session[3]) == leader or f"{child.MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def memory_of(leader: int | None, mark: str) -> int:
    """Bytes that these processes alone have resident; what they share is left out."""
    total, page_bytes = 0, os.sysconf("SC_PAGE_SIZE")
    for pid in members(leader, mark):
        with suppress(OSError, ValueError, IndexError):
            resident, shared = map(int, Path(f"/proc/{pid}/statm").read_text().split()[1:3])
            total += (resident - shared) * page_bytes
    return total


def end_all(leader: int | None, mark: str) -> None:
    """Kill a check's session, give what has one of its own time to end by itself, then kill that too."""
    if leader is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    deadline = time.monotonic() + END_SECONDS
    while left := members(leader, mark):
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
