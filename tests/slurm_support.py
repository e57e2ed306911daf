"""Jobs on a Slurm of this machine, as a person at its login node submits and watches them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from e2e_support import environment, finish

from tests.forked_commands import FORKER
from tools.slurm_cluster import Cluster, SlurmUnavailable

SECONDS = 600.0
"""Deadline of one wait. Generous: the machine may be busy, and four trainers share its cores with engines."""
ROOT = Path(__file__).parents[1]
_QUIET_SECONDS = 5.0


@dataclass(frozen=True)
class Jobs:
    """The cluster as a person at its login node sees it."""

    cluster: Cluster

    @property
    def environment(self) -> dict[str, str]:
        ours = self.cluster.environment
        slurm = {name: value for name, value in ours.items() if name in ("SLURM_CONF", "PATH")}
        return environment() | slurm | {"MUA_TEST_API_KEY": "sk-this-must-not-appear", "MUA_ENGINE_SECONDS": "2"}

    def mua(self, *arguments: str | Path, cwd: Path, status: int = 0) -> str:
        """``mua arguments`` on the login node, which must end with ``status``; what it said.

        Forked from an interpreter that has imported everything. What a job runs is started as the scripts say.
        """
        process = FORKER.start([*map(str, arguments)], cwd, self.environment)
        found, out, err = finish(process, cwd, SECONDS)
        assert found == status, out + err
        return out + err

    def launch(self, folder: Path, *arguments: str | Path) -> tuple[str, Path]:
        """``mua launch slurm arguments`` from ``folder``; the job's number and its log."""
        said = self.mua("launch", "slurm", *arguments, cwd=folder)
        number = re.search(r"^job +(\d+)$", said, re.MULTILINE)
        assert number, said
        return number[1], folder / "out" / "slurm" / f"{number[1]}.log"

    def sbatch(self, script: str, *arguments: str | Path, cwd: Path, options: tuple[str, ...] = ()) -> str:
        """Submit ``slurm/script`` by hand, from ``cwd``; the job's number."""
        env = self.environment | {"MUA_ROOT": str(ROOT), "VENV": str(Path(sys.prefix))}
        command = ["sbatch", "--parsable", "--gpus-per-node=2", "--cpus-per-task=2", *options]
        done = subprocess.run(
            [*command, ROOT / "slurm" / script, *map(str, arguments)],
            cwd=cwd, env=env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        return dict(re.findall(r"(\w+)=(\S*)", self.cluster.call("scontrol", "show", "job", job, "--oneliner")))

    def until(self, job: str, look: Callable[[], object], what: str, log: Path) -> None:
        """Look again and again; fails with the job's log when it is over before."""
        deadline = time.monotonic() + SECONDS
        while not look():
            shown = self.show(job)
            state = shown["JobState"]
            over = state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
            assert not over or look(), f"{state} before {what}\n{_told(log)}"
            assert time.monotonic() < deadline, (
                f"not seen within {SECONDS:g} s: {what} ({state}, {shown.get('Reason')})\n{_told(log)}"
            )
            time.sleep(0.1)

    def state(self, job: str, *wanted: str) -> Callable[[], bool]:
        """Whether the job is in one of the states."""
        return lambda: self.show(job)["JobState"] in wanted

    def start_now(self, job: str) -> None:
        """Slurm lets a requeued job rest two minutes, in which nodes clean up; this one waits for the nodes alone.

        A step daemon of the attempt before must not report its end while the next one runs: Slurm 22.05 would take it
        for the next one's. So none may be left, and the nodes must have been idle for some seconds. Where that takes
        longer than the two minutes, Slurm has started the job itself.
        """
        deadline, since = time.monotonic() + SECONDS, time.monotonic()
        while time.monotonic() - since < _QUIET_SECONDS:
            if not self.state(job, "PENDING")():
                return
            if _step_daemons(job) or not self.cluster.idle():
                since = time.monotonic()
            assert time.monotonic() < deadline, self.cluster.call("sinfo", "--Node")
            time.sleep(0.2)
        try:
            self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")
        except SlurmUnavailable:
            if self.state(job, "PENDING")():
                raise


def _step_daemons(job: str) -> list[int]:
    """Processes of Slurm that look after a step of ``job``; they name it in their title."""
    titles = ((process.pid, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, title in titles if "slurmstepd" in title and f"[{job}." in title]


def _told(log: Path) -> str:
    """The job's log and the ends of its ranks' logs."""
    files = [log, *sorted(log.with_suffix("").rglob("rank-*.log"))]
    return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.exists())
