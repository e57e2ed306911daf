"""The faults themselves: generators that yield None while they wait for a victim, then what they did, in words."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

import psutil

from mua.utils.ports import LOOPBACK, free_port
from tools.faults.draw import BEGINNING, Fault, Kind
from tools.faults.watch import command_of, family, members, newest_step

_PORT = re.compile(r"--port[ =](\d+)")
_CLOCK = Path(__file__).with_name("clock") / "sitecustomize.py"
_START_SECONDS = 30.0
_FOR_GOOD = 1e6
Effect = Generator[str | None, None, None]
Later = Callable[[float, Callable[[], None]], None]
Found = TypeVar("Found")


class User:
    """The user's endpoint, which belongs to somebody else: it comes back after a while, now and then elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/v1"

    @property
    def pid(self) -> int | None:
        """Of the server, while it runs."""
        alive = self._process is not None and self._process.poll() is None
        return self._process.pid if alive and self._process is not None else None

    def start(self, port: int | None = None) -> None:
        """Serve, on the same port as before or another one, and wait until it answers."""
        self.stop()
        self.port = port or self.port
        command = [sys.executable, "-m", "tools.faults.user_server", str(self.port)]
        self._process = subprocess.Popen(command, cwd=self._folder, start_new_session=True)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the user's endpoint did not start within {_START_SECONDS:g} s")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Clock:
    """What a run's processes take for the time of day."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.ahead = 0.0
        (folder / _CLOCK.name).symlink_to(_CLOCK)
        self._write()

    def put_forward(self, seconds: float) -> None:
        self.ahead += seconds
        self._write()

    def _write(self) -> None:
        # In place: the processes have it mapped.
        with (self.folder / "offset").open("r+b" if self.ahead else "wb") as file:
            file.write(struct.pack("d", self.ahead))


@dataclass
class Scene:
    """What there is to strike."""

    disk: Path
    """A file system of its own."""
    output: Path
    clock: Clock
    user: User | None
    trainer: subprocess.Popen[bytes]
    later: Later
    """Has something done so many seconds from now, or when the attempt has ended, whichever comes first."""
    whenever: Later
    """The same, but whether the attempt has ended or not."""
    held: list[socket.socket] = field(default_factory=list)
    """Ports that somebody else has."""


def strike(fault: Fault, scene: Scene) -> Effect:
    """Have ``fault`` happen."""
    return _EFFECTS[fault.kind](fault, scene, Random(fault.seed))


def _kill_trainer(fault: Fault, scene: Scene, random: Random) -> Effect:
    _kill(scene.trainer.pid)
    yield "its ranks, engines and workers are left alone"


def _stop_trainer(fault: Fault, scene: Scene, random: Random) -> Effect:
    seconds, ends = random.uniform(0.5, 12.0), random.random() < 0.3
    _signal(scene.trainer.pid, signal.SIGSTOP)
    last = (lambda: _kill(scene.trainer.pid)) if ends else (lambda: _signal(scene.trainer.pid, signal.SIGCONT))
    scene.later(seconds, last)
    yield f"for {seconds:.1f} s, then {'kill -9' if ends else 'SIGCONT'}"


def _found(look: Callable[[], Found | None]) -> Generator[None, None, Found]:
    """Waits until there is a victim."""
    while not (found := look()):
        yield None
    return found


def _kill_rank(fault: Fault, scene: Scene, random: Random) -> Effect:
    ranks = yield from _found(lambda: members(scene.trainer.pid, "mua.cli"))
    _kill(ranks[0].pid)
    yield ""


def _stop_rank(fault: Fault, scene: Scene, random: Random) -> Effect:
    ranks = yield from _found(lambda: members(scene.trainer.pid, "mua.cli"))
    yield _stopped_for(ranks[0].pid, random.uniform(0.5, 12.0), scene.later)


def _kill_engine(fault: Fault, scene: Scene, random: Random) -> Effect:
    process = yield from _found(lambda: _of_engine(scene, random))
    name = _named(process)
    _kill(process.pid)
    yield name


def _stop_engine(fault: Fault, scene: Scene, random: Random) -> Effect:
    process = yield from _found(lambda: _of_engine(scene, random))
    name, pid = _named(process), process.pid
    if name == "guardian":
        yield f"{name}, {_stopped_for(pid, random.uniform(0.5, 4.0), scene.later)}"
    _stopped_for(pid, _FOR_GOOD, scene.later)
    yield f"{name}, for good"


def _kill_worker(fault: Fault, scene: Scene, random: Random) -> Effect:
    workers = yield from _found(lambda: members(scene.trainer.pid, "mua.environment.worker"))
    _kill(random.choice(workers).pid)
    yield f"one of {len(workers)}"


def _stop_worker(fault: Fault, scene: Scene, random: Random) -> Effect:
    workers = yield from _found(lambda: members(scene.trainer.pid, "mua.environment.worker"))
    _stopped_for(random.choice(workers).pid, _FOR_GOOD, scene.later)
    yield f"one of {len(workers)}, for good"


def _kill_user(fault: Fault, scene: Scene, random: Random) -> Effect:
    user = scene.user
    assert user is not None, "a mode with a user endpoint"
    seconds, port = random.uniform(0.5, 8.0), free_port() if random.random() < 0.3 else user.port
    where = "on its port" if port == user.port else "at another address, which the next attempt is told"
    user.stop()
    scene.whenever(seconds, lambda: user.start(port))
    yield f"started again after {seconds:.1f} s {where}"


def _stop_user(fault: Fault, scene: Scene, random: Random) -> Effect:
    user = scene.user
    assert user is not None, "a mode with a user endpoint"
    pid = yield from _found(lambda: user.pid)
    yield _stopped_for(pid, random.uniform(0.5, 12.0), scene.whenever)


def _fill_disk(fault: Fault, scene: Scene, random: Random) -> Effect:
    filler, seconds = scene.disk / "filler", random.uniform(2.0, 15.0)
    for size in (65536, 1):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    scene.later(seconds, lambda: filler.unlink(missing_ok=True))
    yield f"until the attempt ends, or for {seconds:.1f} s"


def _truncate(fault: Fault, scene: Scene, random: Random) -> Effect:
    """The trainer is killed as well: a checkpoint is read when an attempt begins."""
    checkpoints = scene.output / "checkpoints"
    step = yield from _found(lambda: newest_step(checkpoints))
    _kill(scene.trainer.pid)
    scene.trainer.wait()
    files = sorted(path for path in (checkpoints / f"step_{step:08d}").rglob("*") if path.is_file())
    file, share = random.choice(files), random.random()
    os.truncate(file, int(file.stat().st_size * share))
    yield f"{file.relative_to(checkpoints)} to {share:.0%}, after kill -9 of the trainer"


def _take_port(fault: Fault, scene: Scene, random: Random) -> Effect:
    """Of an engine that is starting, or, where all have started, of one that is made to start again."""
    rendezvous = fault.phase in BEGINNING and random.random() < 0.5
    killed: set[int] = set()
    while True:
        if rendezvous and (port := _rendezvous(scene)) and _take(port, scene):
            yield "of the ranks' rendezvous"
        for process in members(scene.trainer.pid, "guardian.py"):
            found = _PORT.search(command_of(process))
            port = int(found[1]) if found else 0
            if port and process.pid not in killed and _take(port, scene):
                yield f"of an engine that is starting{' again after kill -9' if killed else ''}"
            elif fault.phase not in BEGINNING:
                killed.add(process.pid)
                _kill(process.pid)
        yield None


def _put_clock_forward(fault: Fault, scene: Scene, random: Random) -> Effect:
    days = random.choice([1 / 24, 1.0, 40.0, 400.0]) * random.uniform(0.5, 1.5)
    scene.clock.put_forward(days * 86400)
    future = time.time() + scene.clock.ahead
    for path in scene.output.glob("**/*"):
        with contextlib.suppress(OSError):
            os.utime(path, (future, future))
    yield f"by {days:.2f} days, files included"


_EFFECTS: dict[Kind, Callable[[Fault, Scene, Random], Effect]] = {
    Kind.KILL_TRAINER: _kill_trainer,
    Kind.STOP_TRAINER: _stop_trainer,
    Kind.KILL_RANK: _kill_rank,
    Kind.STOP_RANK: _stop_rank,
    Kind.KILL_ENGINE: _kill_engine,
    Kind.STOP_ENGINE: _stop_engine,
    Kind.KILL_WORKER: _kill_worker,
    Kind.STOP_WORKER: _stop_worker,
    Kind.KILL_USER: _kill_user,
    Kind.STOP_USER: _stop_user,
    Kind.DISK: _fill_disk,
    Kind.CHECKPOINT: _truncate,
    Kind.PORT: _take_port,
    Kind.CLOCK: _put_clock_forward,
}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill(pid: int) -> None:
    _signal(pid, signal.SIGKILL)


def _stopped_for(pid: int, seconds: float, later: Later) -> str:
    _signal(pid, signal.SIGSTOP)
    later(seconds, lambda: _signal(pid, signal.SIGCONT))
    return f"for {seconds:.1f} s"


def _of_engine(scene: Scene, random: Random) -> psutil.Process | None:
    """One of the processes that make up an engine, its guardian included."""
    guardians = members(scene.trainer.pid, "guardian.py")
    found = [process for guardian in guardians for process in (guardian, *family(guardian.pid))]
    found = [process for process in found if "resource_tracker" not in command_of(process) and command_of(process)]
    return random.choice(found) if found else None


def _named(process: psutil.Process) -> str:
    command = command_of(process)
    if "guardian.py" in command:
        return "guardian"
    return "server" if "sglang.launch_server" in command else command.partition(" ")[0] or "one that just ended"


def _rendezvous(scene: Scene) -> int | None:
    """The port at which the ranks are to meet."""
    for rank in members(scene.trainer.pid, "mua.cli"):
        with contextlib.suppress(psutil.Error):
            return int(rank.environ().get("MASTER_PORT", 0)) or None
    return None


def _take(port: int, scene: Scene) -> bool:
    """Whether nobody had it."""
    taken = socket.socket()
    try:
        taken.bind((LOOPBACK, port))
        taken.listen()
    except OSError:
        taken.close()
        return False
    scene.held.append(taken)
    return True
