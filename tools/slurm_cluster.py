"""A real Slurm on this machine: munged, slurmctld and several slurmd, for as long as a command or a test needs it.

    python -m tools.slurm_cluster run -- sinfo          # the command sees a cluster of two nodes; then all is gone
    python -m tools.slurm_cluster run -- bash           # a shell on it
    python -m tools.slurm_cluster install               # Debian's packages alone (as root)

Everything lies in one temporary folder that SLURM_CONF points into; a Slurm that runs on the machine is not touched.
Each node has all of the machine's cores, to which Slurm binds steps as a cluster does (``task/affinity``), and two GPUs
by name only, so that requests for GPUs are really scheduled. A job sees no device through them. The daemons share the
cores with the jobs' ranks, so a message and a batch script's start may take longer than Slurm's own 10 seconds.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from mua.utils.ports import free_port
from tools import debian_packages, kit
from tools.debian_packages import PackagesUnavailable

PACKAGES = ("munge", "slurm-client", "slurmctld", "slurmd")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo", "scancel")
NODES = ("n1", "n2")
GPUS = 2
PARTITION = "debug"
SHARED_PARTITION = "shared"
"""One whose site refuses ``--exclusive``."""
START_SECONDS = 180.0
STOP_SECONDS = 30.0
_SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

CONFIGURATION = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
JobRequeue=0
KillWait=10
SlurmdTimeout=20
SlurmctldTimeout=20
MessageTimeout=30
BatchStartTimeout=60
SchedulerParameters=sched_interval=2
JobSubmitPlugins=lua
{nodes}
PartitionName={partition} Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
PartitionName={shared} Nodes=ALL MaxTime=INFINITE State=UP
"""
SITE_RULES = """\
function slurm_job_submit(job, partitions, user)
  if job.partition == "{shared}" and job.shared == 0 then
    slurm.log_user("{shared}: exclusive use of nodes is not allowed")
    return slurm.ERROR
  end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, user)
  return slurm.SUCCESS
end
"""
"""Of a site that grants no whole nodes in one partition."""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=16000 Gres=gpu:{gpus}"


class SlurmUnavailable(RuntimeError):
    """Slurm is not here and could not be installed or started; the message names the fix."""


def missing() -> list[str]:
    """Programs of Slurm and munge that are not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), _SYSTEM_PATH])
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def install() -> None:
    """Install Debian's Slurm and munge where they are missing, without starting their services.

    Raises:
        SlurmUnavailable: not Debian, not root, or apt failed.
    """
    try:
        debian_packages.install(PACKAGES, missing)
    except PackagesUnavailable as error:
        raise SlurmUnavailable(str(error)) from None


@dataclass
class Cluster:
    """A controller and one slurmd a node. Use as a context manager; leaving it stops every job and removes all."""

    nodes: Sequence[str] = NODES
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Cores of each node: those of the machine, since processes are bound to them."""
    folder: Path = field(init=False)
    """Configuration, state and logs of the daemons."""
    daemons: dict[str, subprocess.Popen[bytes]] = field(init=False, default_factory=dict)
    """By name: munged, slurmctld and the nodes."""

    def __enter__(self) -> Self:
        # Unix sockets of Slurm lie in here: the path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.folder.chmod(0o755)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def environment(self) -> dict[str, str]:
        """This process's variables and those that point Slurm's programs at this cluster."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        path = os.pathsep.join(filter(None, [clean.get("PATH"), _SYSTEM_PATH]))
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def call(self, *command: str, seconds: float = 60.0) -> str:
        """Run a program of Slurm that must succeed; its standard output."""
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=self.environment)
        if done.returncode:
            raise SlurmUnavailable(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def start_node(self, name: str) -> None:
        """Start the slurmd of node ``name``."""
        self._daemon(name, "slurmd", "-D", "-N", name)

    def kill_node(self, name: str) -> None:
        """The node dies: its slurmd and every process of its job steps are killed."""
        self.daemons.pop(name).kill()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == name or f"[{name}]" in " ".join(process.cmdline()):
                    process.kill()

    def stop(self) -> None:
        """Cancel every job, end the daemons and whatever was started under them, remove the folder."""
        if "slurmctld" in self.daemons:
            with contextlib.suppress(SlurmUnavailable, subprocess.TimeoutExpired):
                self.call("scancel", "--state=PENDING", f"--user={getpass.getuser()}", seconds=10)
                self.call("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}", seconds=10)
                wait_until(lambda: not self.call("squeue", "--noheader", seconds=10).strip(), 10.0)
        for process in reversed(self.daemons.values()):
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
        deadline = time.monotonic() + STOP_SECONDS
        while left := self._processes():
            for stray in left:
                with contextlib.suppress(psutil.Error):
                    stray.kill()
            if time.monotonic() > deadline:
                raise SlurmUnavailable(f"still running: {left}")
            time.sleep(0.1)
        self.daemons.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        host = socket.gethostname().partition(".")[0]
        ports = _free_ports(len(self.nodes) + 1)
        nodes = [
            NODE.format(name=name, host=host, port=port, cpus=self.cpus, gpus=GPUS)
            for name, port in zip(self.nodes, ports[1:], strict=True)
        ]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host, port=ports[0], folder=self.folder, user=getpass.getuser(), nodes="\n".join(nodes),
                partition=PARTITION, shared=SHARED_PARTITION,
            )
        )  # fmt: skip
        (self.folder / "job_submit.lua").write_text(SITE_RULES.format(shared=SHARED_PARTITION))
        for number in range(GPUS):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        named = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        files = [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in named.items()]
        self._daemon("munged", "munged", "--foreground", "--force", *files)
        self._until(lambda: (self.folder / "munge.socket").exists(), "munged opens its socket")
        (self.folder / "state").mkdir()
        self._daemon("slurmctld", "slurmctld", "-D", "-i")
        for name in self.nodes:
            (self.folder / f"spool-{name}").mkdir()
            self.start_node(name)
        self._until(self.idle, f"{', '.join(self.nodes)} are idle")

    def idle(self) -> bool:
        """Whether every node is there and free."""
        with contextlib.suppress(SlurmUnavailable):
            return self.call("sinfo", "--noheader", "--Node", f"--partition={PARTITION}", "--format=%N %T").split("\n")[
                :-1
            ] == [f"{name} idle" for name in sorted(self.nodes)]
        return False

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def _until(self, look: Callable[[], bool], what: str) -> None:
        def seen() -> bool:
            for name, process in self.daemons.items():
                if process.poll() is not None:
                    raise SlurmUnavailable(f"{name} ended with {process.returncode}:\n{self._tail(name)}")
            return look()

        if not wait_until(seen, START_SECONDS):
            tails = "\n".join(f"--- {name}\n{self._tail(name)}" for name in self.daemons)
            raise SlurmUnavailable(f"not so within {START_SECONDS:g} s: {what}\n{tails}")

    def _tail(self, name: str) -> str:
        return "\n".join((self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-15:])

    def _processes(self) -> list[psutil.Process]:
        """Everything that runs with this cluster's SLURM_CONF: daemons, steps, and what jobs started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF", "").startswith(f"{self.folder}/") and process.pid != os.getpid():
                    found.append(process)
        return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def wait_until(look: Callable[[], bool], seconds: float) -> bool:
    """Look ten times a second; whether it was so within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def main() -> int:
    parser = kit.parser(__doc__)
    parser.add_argument("verb", choices=["install", "run"])
    parser.add_argument("command", nargs="*", help="for run: what to run on the cluster")
    arguments = parser.parse_args()
    try:
        install()
        if arguments.verb == "install":
            return 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        with Cluster() as cluster:
            return subprocess.run(arguments.command or ["sinfo"], env=cluster.environment).returncode
    except SlurmUnavailable as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
