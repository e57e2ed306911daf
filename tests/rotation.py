"""Which slow tests one run of CI takes: its cost has a bound, and every slow test runs within three landings.

    python -m tests.rotation             # what CI leaves out, a file per line
    python -m tests.rotation --advance   # begin a landing: next third, compared with the current commit
    python -m tests.rotation --measure [FILE ...]   # run slow files one by one, write what each costs

``.ci/rotation`` holds the number of the landing and the commit that it starts from. A slow file (one that marks tests
``slow`` or ``slurm``) belongs to one of three thirds by its name. A run takes the third of its landing. Then it
takes the files that changed and those whose rooms changed, the cheapest first, as long as ``BUDGET`` holds.

Not covered: which of a file's slow tests a change reaches; whether the figures of ``tests/data/slow_costs.yaml`` are
still true (``--measure`` writes them).
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import yaml

ROOT = Path(__file__).parents[1]
STATE = ROOT / ".ci/rotation"
COSTS = ROOT / "tests/data/slow_costs.yaml"
THIRDS = 3
BUDGET = 420.0
"""Processor seconds of slow tests per run; the third of a landing runs whatever it costs."""
UNKNOWN_COST = 60.0
"""Processor seconds of a file that COSTS lacks."""
PR_SET_CHILD_SUBREAPER = 36
EVERYWHERE = {"mua", "mua.types", "mua.utils", "mua.config", "tools"}
"""Rooms that all tests use: a change there says nothing about which slow test it needs."""
BY_COMMAND: Mapping[str, tuple[str, ...]] = {
    "sampler|refill": ("mua.rollout", "mua.store"),
    "engine|separate|sync|two_nodes|ports": ("mua.engine", "megatron_bridge"),
    "users": ("mua.users",),
    "gateway": ("mua.rollout",),
    "tool_servers|environments": ("mua.environment", "environments"),
    "evaluation|best": ("mua.trainer",),
    "resume|preempt|replay|two_ranks|critic|distillation|loop|variants|zero_learning": ("mua.trainer", "mua.megatron"),
    "memory|recipe|gpu_check": ("mua.megatron", "mua.launch"),
}
"""Rooms of end-to-end tests, which reach them by a command, not an import: pattern of the name -> rooms."""


class Rotation(NamedTuple):
    """What one run takes of the slow files."""

    taken: list[str]
    left: dict[str, str]
    """File -> why it is left out."""


def room_of(path: str) -> str:
    """The room of a file, as ``mua.engine``; its top folder outside ``mua``."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:2]) if parts[0] == "mua" and len(parts) > 2 else parts[0]


@cache
def slow_files() -> tuple[str, ...]:
    """Test files that hold tests marked ``slow`` or ``slurm``, from the root, sorted."""
    marked = re.compile(r"mark\.(slow|slurm)\b")
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(p.relative_to(ROOT).as_posix() for p in paths if marked.search(p.read_text(encoding="utf-8")))


def rooms_of(file: str) -> set[str]:
    """Rooms that a test file imports, or that its commands reach."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules |= {f"{node.module}.{name.name}" for name in node.names} if node.module == "mua" else {node.module}
        elif isinstance(node, ast.Import):
            modules |= {name.name for name in node.names}
    found = {".".join(module.split(".")[: 2 if module.startswith("mua.") else 1]) for module in modules}
    for pattern, rooms in BY_COMMAND.items():
        if "/e2e/" in file and re.search(pattern, Path(file).name):
            found |= set(rooms)
    return found - EVERYWHERE


def choose(files: Iterable[str], landing: int, changed: Iterable[str], costs: Mapping[str, float]) -> Rotation:
    """The files that the run of ``landing`` takes, where the paths ``changed`` differ from its start."""
    changed = set(changed)
    rooms = {room_of(path) for path in changed}
    thirds = {file: crc32(file.encode()) % THIRDS for file in files}
    taken = [file for file, third in thirds.items() if third == landing % THIRDS]
    left = {file: "another landing's third" for file in thirds if file not in taken}
    spent = sum(costs.get(file, UNKNOWN_COST) for file in taken)
    concerned = [file for file in left if file in changed or rooms_of(file) & rooms]
    for file in sorted(concerned, key=lambda file: (file not in changed, costs.get(file, UNKNOWN_COST))):
        spent += costs.get(file, UNKNOWN_COST)
        if spent > BUDGET:
            left[file] = f"it is concerned, but the budget of {BUDGET:.0f} processor seconds is spent"
        else:
            taken.append(file)
            del left[file]
    return Rotation(sorted(taken), left)


@cache
def current() -> Rotation:
    """What the run of this commit takes."""
    landing, start = STATE.read_text(encoding="utf-8").split()
    costs: dict[str, float] = yaml.safe_load(COSTS.read_text(encoding="utf-8")) or {}
    return choose(slow_files(), int(landing), git("diff", "--name-only", start).split(), costs)


def git(*words: str) -> str:
    """What git prints in the checkout; empty where the commit is unknown, as in a shallow clone."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout


def measure(files: Iterable[str]) -> None:
    """Run the slow tests of each file and write its processor seconds, orphans included, to ``COSTS``."""
    costs: dict[str, float] = yaml.safe_load(COSTS.read_text(encoding="utf-8")) or {}
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for file in files:
        before = sum(os.times()[2:4])
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "slow or slurm", file], cwd=ROOT, check=False
        )
        with contextlib.suppress(ChildProcessError):
            while os.wait():
                pass
        costs[file] = round(sum(os.times()[2:4]) - before)
        print(f"{file}: {costs[file]} processor seconds, status {done.returncode}", flush=True)
        COSTS.write_text(yaml.safe_dump(costs), encoding="utf-8")


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2:] or slow_files())
        return
    if sys.argv[1:] == ["--advance"]:
        landing = int(STATE.read_text(encoding="utf-8").split()[0]) + 1
        STATE.write_text(f"{landing} {git('rev-parse', 'HEAD').strip()}\n", encoding="utf-8")
        return
    rotation = current()
    print(f"Slow test files: {len(rotation.taken)} run, {len(rotation.left)} left out (`make test-all` runs them):")
    for file, why in rotation.left.items():
        print(f"  {file}: {why}")


if __name__ == "__main__":
    main()
