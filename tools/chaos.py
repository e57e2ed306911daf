"""Faults drawn by seed strike runs of a tiny configuration, which must end as if nothing had happened.

    python -m tools.chaos [--faults 10] [--seed 1] [--mode sync stale ranks] [--write]

Every run is struck several times, also while it starts and resumes: processes are killed and stopped, the disk is
full, the newest checkpoint is damaged, a port is taken, the clock jumps. A supervisor does what Slurm would, and what a
person is asked for (:mod:`tools.faults.supervise`). At the end no task is lost and none trained twice; in the
deterministic modes weights, tokens and metrics are bit for bit those of an undisturbed run
(:mod:`tools.faults.account`).

A run that fails leaves everything in ``runs/chaos/<run>``, and the command that repeats its faults is printed. Status 1
if any failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from mua.observe.progress import Progress, ProgressStage
from tools import kit
from tools.faults.account import faults_of
from tools.faults.draw import STEPS, Kind, Mode, draw
from tools.faults.supervise import Pace, RunFailed, Struck, Supervisor
from tools.faults.workshop import DETERMINISTIC, build

PAGE = Path("docs/benchmarks/faults.md")
_DISK = b"size=64m"
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Outcome:
    """One run under faults."""

    mode: Mode
    seed: int
    faults: int
    """Drawn; fewer strike where a run ends before."""
    struck: list[Struck]
    attempts: int
    seconds: float
    failures: list[str]

    @property
    def command(self) -> str:
        """What draws the same faults."""
        count = f"--faults {self.faults} --per-run {self.faults}"
        return f"python -m tools.chaos --mode {self.mode} --seed {self.seed} {count}"


class Campaign:
    """Runs in turn in every mode, until so many faults have struck."""

    def __init__(self, folder: Path, modes: Sequence[Mode], per_run: int, progress: Progress, *, short: bool) -> None:
        self._folder, self._modes, self._per_run, self._progress = folder, modes, per_run, progress
        self._short = short
        self._disk = _own_mounts()
        self._references: dict[Mode, tuple[Path, Pace]] = {}
        folder.mkdir(parents=True)
        self._config = build(folder)
        self.outcomes: list[Outcome] = []

    def run(self, count: int, seed: int) -> None:
        """Strike ``count`` faults. Ends early only by :class:`KeyboardInterrupt`."""
        with self._progress.stage("faults", total=count) as stage:
            while (left := count - sum(len(outcome.struck) for outcome in self.outcomes)) > 0:
                index = len(self.outcomes)
                faults = min(self._per_run, left)
                self.outcomes.append(self._one(self._modes[index % len(self._modes)], seed + index, faults, stage))
                if len(self.outcomes) > 2 * (count // self._per_run) + 8:
                    break  # runs that fail at once strike nothing

    def _one(self, mode: Mode, seed: int, count: int, stage: ProgressStage) -> Outcome:
        undisturbed, pace = self._reference(mode)

        def tell(struck: Struck) -> None:
            print(f"  {struck.seconds:6.1f} s  {struck.place}: {struck.fault.kind}, {struck.done}", flush=True)
            stage.advance(note=f"{mode} run {seed}")

        print(f"{mode}, seed {seed}", flush=True)
        folder = self._folder / f"{mode}-{seed}"
        faults = draw(mode, count, seed, disk=self._disk)
        with self._place(folder):
            supervisor = Supervisor(folder, self._config, mode, faults, pace, tell)
            failures = self._survive(supervisor, mode, undisturbed)
            if failures:
                shutil.copytree(folder / "disk" / "out", folder / "evidence", dirs_exist_ok=True)
        outcome = Outcome(mode, seed, count, supervisor.struck, supervisor.attempts, supervisor.seconds, failures)
        if failures:
            print(
                *(f"  FAILED: {failure}" for failure in failures), f"  again: {outcome.command}", sep="\n", flush=True
            )
        else:
            print(f"  {outcome.seconds:6.1f} s  finished, {outcome.attempts} attempts", flush=True)
            shutil.rmtree(folder)
        return outcome

    def _survive(self, supervisor: Supervisor, mode: Mode, undisturbed: Path) -> list[str]:
        try:
            supervisor.run()
        except RunFailed as error:
            return [str(error)]
        except Exception as error:  # of this tool: the other runs go on
            traceback.print_exc()
            return [repr(error)]
        bits = mode in DETERMINISTIC and mode in self._references
        return faults_of(supervisor.output, undisturbed, bits=bits, staleness=int(mode is Mode.STALE))

    def _reference(self, mode: Mode) -> tuple[Path, Pace]:
        """Output and pace of the undisturbed run; of a short campaign, that of the first mode serves all."""
        if mode not in self._references:
            if self._short and self._references:
                return next(iter(self._references.values()))
            self._references[mode] = self._undisturbed(mode)
        return self._references[mode]

    def _undisturbed(self, mode: Mode) -> tuple[Path, Pace]:
        folder = self._folder / f"{mode}-undisturbed"
        with self._place(folder):
            supervisor = Supervisor(folder, self._config, mode, ())
            supervisor.run()
            found = faults_of(supervisor.output, supervisor.output, bits=False, staleness=int(mode is Mode.STALE))
            if found:
                raise RunFailed(f"the undisturbed run: {found}")
            shutil.copytree(supervisor.output, folder / "out")
        print(f"{mode}, undisturbed: {supervisor.seconds:.1f} s for {STEPS} steps", flush=True)
        return folder / "out", supervisor.reached

    @contextlib.contextmanager
    def _place(self, folder: Path) -> Iterator[None]:
        """A block with an empty ``folder`` and, where that is allowed, a file system of its own as its ``disk``."""
        shutil.rmtree(folder, ignore_errors=True)
        disk = folder / "disk"
        disk.mkdir(parents=True)
        if self._disk:
            _mount(b"tmpfs", disk, b"tmpfs", 0, _DISK)
        try:
            yield
        finally:
            if self._disk:
                _LIBC.umount2(os.fsencode(disk), 2)  # MNT_DETACH


def _own_mounts() -> bool:
    """Whether this process can mount file systems, which then nobody else sees and which end with it."""
    user, group = os.getuid(), os.getgid()
    try:
        os.unshare(os.CLONE_NEWNS | (os.CLONE_NEWUSER if user else 0))
        if user:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        _mount(b"none", Path("/"), None, _MS_REC | _MS_PRIVATE, None)
    except OSError as error:
        print(f"no disk can be filled here: {error}", file=sys.stderr)
        return False
    return True


def _mount(source: bytes, target: Path, kind: bytes | None, flags: int, data: bytes | None) -> None:
    if _LIBC.mount(source, os.fsencode(target), kind, flags, data):
        raise OSError(ctypes.get_errno(), f"mount {target}: {os.strerror(ctypes.get_errno())}")


# ---- the report


def summary(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A record for each run, JSON-able."""
    return [
        {
            "mode": outcome.mode,
            "seed": outcome.seed,
            "attempts": outcome.attempts,
            "seconds": round(outcome.seconds, 1),
            "failures": outcome.failures,
            "again": outcome.command,
            "faults": [
                {
                    "kind": struck.fault.kind,
                    "place": str(struck.place),
                    "phase": struck.place.phase,
                    "done": struck.done,
                    "survived": struck.survived,
                    "lost_seconds": round(struck.lost, 1),
                }
                for struck in outcome.struck
            ],
        }
        for outcome in outcomes
    ]


def table(outcomes: Sequence[Outcome]) -> str:
    """Kind by mode: how many, how they were survived, seconds lost."""
    modes = list(dict.fromkeys(outcome.mode for outcome in outcomes))
    lines = [kit.head("fault", *modes, "survived by", "seconds lost: median, most")]
    for kind in Kind:
        found = [(o.mode, struck) for o in outcomes for struck in o.struck if struck.fault.kind is kind]
        if found:
            counts = Counter(mode for mode, _ in found)
            ways = Counter(struck.survived for _, struck in found)
            told = ", ".join(f"{way} ({count})" for way, count in ways.most_common())
            lost = [max(0.0, struck.lost) for _, struck in found]
            lines.append(kit.row(kind, *(counts[mode] for mode in modes), told, f"{median(lost):.0f}, {max(lost):.0f}"))
    return "\n".join(lines)


def moments(outcomes: Sequence[Outcome]) -> str:
    """What runs were doing when they were struck."""
    struck = Counter(struck.place.phase for outcome in outcomes for struck in outcome.struck)
    return ", ".join(f"{phase} {count}" for phase, count in sorted(struck.items(), key=lambda item: item[0].order))


def page(outcomes: Sequence[Outcome], command: str, seconds: float) -> str:
    """``docs/benchmarks/faults.md``."""
    struck = sum(len(outcome.struck) for outcome in outcomes)
    failed = [outcome for outcome in outcomes if outcome.failures]
    verdict = "No task was lost and none trained twice; weights, tokens and metrics of the deterministic modes equal"
    faults = "\n".join(f"- `{outcome.command}`: {'; '.join(outcome.failures)}" for outcome in failed)
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU, Python {platform.python_version()}"
    each = struck / len(outcomes)
    return f"""\
# Faults that runs survive

{datetime.now(UTC):%Y-%m-%d}, {machine}. Made by

```
{command}
```

{struck} faults struck {len(outcomes)} runs of {STEPS} steps within {seconds / 60:.0f} minutes, {each:.1f} each;
{len(failed)} runs failed. {verdict + " those of an undisturbed run bit for bit." if not failed else ""}
{faults}

`sync` is synchronous and deterministic, `stale` has `trainer.max_staleness=1` and a language model as user, `ranks` is
`sync` on two trainer ranks. What they were doing: {moments(outcomes)}.

{table(outcomes)}

Seconds lost are those from a fault to the next one, or to the end, that an undisturbed run would not have needed to get
as far; an attempt of this size needs most of them to start.
"""


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--faults", type=int, default=10, help="faults in all")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; each further one has the next")
    parser.add_argument("--mode", type=Mode, nargs="+", default=list(Mode), help="taken in turn")
    parser.add_argument("--per-run", type=int, default=8, help="faults in one run")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="must not be there, or is replaced")
    parser.add_argument("--short", action="store_true", help="one undisturbed run only: bits are compared in its mode")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run that is under way, too
    started = time.monotonic()
    with Progress() as progress:
        campaign = Campaign(
            arguments.folder.resolve(), arguments.mode, arguments.per_run, progress, short=arguments.short
        )
        campaign.run(arguments.faults, arguments.seed)
    outcomes = campaign.outcomes
    (arguments.folder / "faults.json").write_text(json.dumps(summary(outcomes), indent=1) + "\n")
    print(f"\n{table(outcomes)}\n\n{moments(outcomes)}")
    if arguments.write:
        command = "python -m tools.chaos " + " ".join(sys.argv[1:])
        PAGE.write_text(page(outcomes, command, time.monotonic() - started))
    sys.exit(any(outcome.failures for outcome in outcomes))


if __name__ == "__main__":
    main()
