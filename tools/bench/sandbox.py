"""What a sandbox costs: its start, a call beside a plain subprocess, its memory, and 64 at once.

    python -m tools.bench.sandbox [--calls 100] [--sandboxes 64]

*plain* starts ``/usr/bin/python3 -c`` (or ``sh -c``) by asyncio and reads its output, with no limit and no isolation;
*sandbox* is the call of :class:`mua.users.scoring.sandbox.Sandbox` under bubblewrap. Rounds of both alternate in one
process, and ratios are of medians. Memory is the proportional share (PSS) of bwrap and of the sandbox's first process.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter

import psutil

from mua.users.scoring.sandbox import PYTHON, ProgramKind, Sandbox, SandboxLimits
from tools import kit

CONFIG = SandboxLimits(call_seconds=60, start_seconds=60)
PROGRAMS: dict[str, tuple[ProgramKind, list[str], str]] = {
    "python: `print(1)`": ("python", [PYTHON, "-c"], "print(1)"),
    "python: imports json, re, random": ("python", [PYTHON, "-c"], "import json, re, random; print(1)"),
    "shell: `echo 1`": ("shell", ["/bin/sh", "-c"], "echo 1"),
}


async def plain(command: list[str]) -> None:
    """Run a program and read its output."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert output == b"1\n", output


async def sandboxed(box: Sandbox, kind: ProgramKind, text: str) -> None:
    """Run it in a sandbox."""
    result = await box.run(kind, text)
    assert result.output == "1\n", result


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = perf_counter()
    await work()
    return 1e3 * (perf_counter() - began)


async def cost(calls: int) -> None:
    """Milliseconds of start, end and calls, one at a time."""
    starts, ends, box = list[float](), list[float](), Sandbox(CONFIG)
    for _ in range(calls // 5):
        box = Sandbox(CONFIG)
        starts.append(await timed(box.start))
        ends.append(await timed(box.close))
    told = [(name, f"{statistics.median(ms):.1f}", f"{max(ms):.1f}") for name, ms in (("start", starts), ("end", ends))]
    print(kit.table(("of a sandbox", "median, ms", "longest, ms"), told) + "\n")
    rows = []
    box = Sandbox(CONFIG)
    await box.start()
    for name, (kind, command, text) in PROGRAMS.items():
        theirs, ours = list[float](), list[float]()
        for _ in range(calls):
            theirs.append(await timed(lambda line=[*command, text]: plain(line)))  # type: ignore[misc]
            ours.append(await timed(lambda kind=kind, text=text: sandboxed(box, kind, text)))  # type: ignore[misc]
        middle = statistics.median(theirs), statistics.median(ours)
        rows.append((name, *(f"{ms:.1f}" for ms in middle), f"{middle[1] / middle[0]:.2f}"))
    await box.close()
    print(kit.table(("call", "plain, ms", "sandbox, ms", "ratio"), rows) + "\n")


def share_mib() -> float:
    """Memory of all sandboxes, MiB."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


async def crowd(number: int) -> None:
    """``number`` sandboxes at once, beside as many plain subprocesses."""
    boxes = [Sandbox(CONFIG) for _ in range(number)]
    started = await timed(lambda: asyncio.gather(*(box.start() for box in boxes)))
    memory = share_mib()
    kind, command, text = PROGRAMS["python: `print(1)`"]
    theirs, ours = list[float](), list[float]()
    for _ in range(5):
        theirs.append(await timed(lambda: asyncio.gather(*(plain([*command, text]) for _ in boxes))))
        ours.append(await timed(lambda: asyncio.gather(*(sandboxed(box, kind, text) for box in boxes))))
    ended = await timed(lambda: asyncio.gather(*(box.close() for box in boxes)))
    middle = statistics.median(theirs), statistics.median(ours)
    rows = [
        ("all started", f"{started:.0f} ms"),
        ("memory of one, idle", f"{memory / number:.1f} MiB"),
        ("a call in each, plain", f"{middle[0]:.0f} ms"),
        ("a call in each, sandbox", f"{middle[1]:.0f} ms"),
        ("ratio", f"{middle[1] / middle[0]:.2f}"),
        ("all ended", f"{ended:.0f} ms"),
    ]
    print(kit.table((f"{number} at once", ""), rows))


async def measure(calls: int, sandboxes: int) -> None:
    print(f"{kit.machine()}\n")
    await cost(calls)
    await crowd(sandboxes)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--sandboxes", type=int, default=64)
    given = parser.parse_args()
    asyncio.run(measure(given.calls, given.sandboxes))


if __name__ == "__main__":
    main()
