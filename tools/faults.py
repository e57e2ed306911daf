"""Faults that strike a run: drawn by seed, so that a failed run can be repeated, and what each of them does.

python -m tools.faults PORT      # serves the user's language model, for tools.chaos
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random

import psutil
from aiohttp import web

from mua.environment.user import STOP_SIGNAL
from mua.utils.ports import LOOPBACK, free_port

STEPS = 6
"""Of every run."""
SAVE_EVERY = 2
_PORT = re.compile(r"--port[ =](\d+)")
_CLOCK = Path(__file__).with_name("chaos_clock") / "sitecustomize.py"
_START_SECONDS = 30.0
_FOR_GOOD = 1e6


class Mode(StrEnum):
    """How the run trains."""

    SYNC = "sync"
    """Synchronous and deterministic, one process."""
    STALE = "stale"
    """``trainer.max_staleness=1``, with a language model as the user."""
    RANKS = "ranks"
    """Synchronous and deterministic, two trainer ranks."""


class Phase(StrEnum):
    """What a run is doing, in the order of one step."""

    START = "start-up"
    ROLLOUT = "rollout"
    TRAIN = "scoring and training"
    SYNC = "sync"
    SAVE = "checkpoint"

    @property
    def order(self) -> int:
        """Place within a step."""
        return list(Phase).index(self)


SECONDS = {Phase.START: 20.0, Phase.ROLLOUT: 3.0, Phase.TRAIN: 2.0, Phase.SYNC: 0.3, Phase.SAVE: 0.3}
"""How long each takes, about: a fault strikes within."""


class Kind(StrEnum):
    """What happens."""

    KILL_TRAINER = "kill -9 of the trainer"
    STOP_TRAINER = "SIGSTOP of the trainer"
    KILL_RANK = "kill -9 of rank 1"
    STOP_RANK = "SIGSTOP of rank 1"
    KILL_ENGINE = "kill -9 of the engine"
    STOP_ENGINE = "SIGSTOP of the engine"
    KILL_WORKER = "kill -9 of an environment worker"
    STOP_WORKER = "SIGSTOP of an environment worker"
    KILL_USER = "kill -9 of the user endpoint"
    STOP_USER = "SIGSTOP of the user endpoint"
    DISK = "full disk"
    CHECKPOINT = "newest checkpoint truncated"
    PORT = "port taken"
    CLOCK = "clock put forward"


_ONLY = {
    Kind.KILL_RANK: Mode.RANKS,
    Kind.STOP_RANK: Mode.RANKS,
    Kind.KILL_USER: Mode.STALE,
    Kind.STOP_USER: Mode.STALE,
}
ENDS = frozenset({Kind.KILL_TRAINER, Kind.KILL_RANK, Kind.CHECKPOINT})
"""After these there is another attempt, whose beginning the next fault may strike."""
_LOOP = (Phase.ROLLOUT, Phase.TRAIN, Phase.SYNC, Phase.SAVE)
_OF_WORKERS = (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN)
_AT_THE_BEGINNING = 0.4
"""Share of the faults that strike a beginning, where there is one to strike."""


@dataclass(frozen=True)
class Fault:
    """One fault of a plan."""

    kind: Kind
    phase: Phase
    step: int
    """It strikes in ``phase`` of this step, or as soon after as there is an opportunity."""
    seconds: float
    """After the phase began."""
    seed: int
    """Decides the rest: which process, which file, how long."""


def draw(mode: Mode, count: int, seed: int, *, disk: bool = True) -> list[Fault]:
    """``count`` faults in the order in which they strike; no kind comes twice before all have come once.

    ``disk``: whether the run's disk can be filled.
    """
    random = Random(f"{mode}/{seed}")
    deck = [kind for kind in Kind if _ONLY.get(kind, mode) is mode and (disk or kind is not Kind.DISK)]
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += random.sample(deck, min(len(deck), count - len(kinds)))
    placed = []
    for kind in kinds:
        phase = random.choice(_OF_WORKERS if kind in (Kind.KILL_WORKER, Kind.STOP_WORKER) else _LOOP)
        first = SAVE_EVERY if kind is Kind.CHECKPOINT else 0  # there must be one
        steps = [step for step in range(first, STEPS) if phase is not Phase.SAVE or (step + 1) % SAVE_EVERY == 0]
        placed.append((random.choice(steps), phase.order, kind, phase))
    found: list[Fault] = []
    for step, _, kind, phase in sorted(placed):
        after_an_end = not found or found[-1].kind in ENDS
        late = kind in (Kind.KILL_WORKER, Kind.STOP_WORKER, Kind.CHECKPOINT)
        if after_an_end and not late and random.random() < _AT_THE_BEGINNING:
            step, phase = (found[-1].step if found else 0), Phase.START
        found.append(Fault(kind, phase, step, random.uniform(0, SECONDS[phase]), random.randrange(2**32)))
    return found


# ---- what there is to strike


class User:
    """The user's endpoint, which belongs to somebody else: it comes back after a while, now and then elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/v1"

    def start(self, port: int | None = None) -> None:
        """Serve, on the same port as before or another one, and wait until it answers."""
        self.stop()
        self.port = port or self.port
        command = [sys.executable, "-m", __spec__.name, str(self.port)]
        self.process = subprocess.Popen(command, cwd=self._folder, start_new_session=True)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1):
                return
            time.sleep(0.05)
        raise RuntimeError(f"the user's endpoint did not start within {_START_SECONDS:g} s")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Clock:
    """What a run's processes take for the time of day."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self.ahead = folder, 0.0
        (folder / _CLOCK.name).symlink_to(_CLOCK)
        (folder / "offset").write_bytes(struct.pack("d", 0.0))

    def put_forward(self, seconds: float) -> None:
        self.ahead += seconds
        with (self.folder / "offset").open("r+b") as file:  # in place: the processes have it mapped
            file.write(struct.pack("d", self.ahead))


@dataclass
class Scene:
    """What there is to strike."""

    output: Path
    """On a file system of its own."""
    clock: Clock
    user: User | None
    trainer: subprocess.Popen[bytes]
    later: Callable[[float, Callable[[], None]], None]
    """Has something done so many seconds from now, or when the attempt has ended, whichever comes first."""
    held: list[socket.socket] = field(default_factory=list)
    """Ports that somebody else has."""
    restarted: set[int] = field(default_factory=set)
    """Engines that were killed so that they start again."""

    def children(self, text: str) -> list[psutil.Process]:
        """What the trainer has started, directly or not, with ``text`` in its command line."""
        return [process for process in family(self.trainer.pid) if text in command_of(process)]


def family(pid: int) -> list[psutil.Process]:
    """Everything below a process."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def command_of(process: psutil.Process) -> str:
    """Its command line; empty for what is gone."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def newest_step(checkpoints: Path) -> int:
    """Steps that the newest checkpoint holds; 0 where there is none."""
    return max((int(folder.name.removeprefix("step_")) for folder in checkpoints.glob("step_*")), default=0)


# ---- the faults


def strike(fault: Fault, scene: Scene) -> str | None:
    """Have ``fault`` happen; in words what was done, or None while there is no victim."""
    random = Random(fault.seed)
    if fault.kind in _OTHERS:
        return _OTHERS[fault.kind](fault, scene, random)
    found = _processes(fault.kind.rpartition(" of ")[2], scene)
    if not found:
        return None
    pid, name = random.choice(found)
    if fault.kind.startswith("kill"):
        return _kill(pid, name, scene, random)
    seconds = random.uniform(0.5, 12.0)
    _signal(pid, signal.SIGSTOP)
    if fault.kind in (Kind.STOP_ENGINE, Kind.STOP_WORKER) and name != "guardian":
        seconds = _FOR_GOOD
    scene.later(seconds, lambda: _signal(pid, signal.SIGCONT))
    return f"{name} for {seconds:.1f} s"


def _processes(victim: str, scene: Scene) -> list[tuple[int, str]]:
    """Process ids and names of whom a fault can strike."""
    if victim == "the trainer":
        return [(scene.trainer.pid, victim)]
    if victim == "the user endpoint":
        assert scene.user is not None, "a mode with a user endpoint"
        alive = scene.user.process is not None and scene.user.process.poll() is None
        return [(scene.user.process.pid, victim)] if alive and scene.user.process is not None else []
    if victim != "the engine":
        text = "mua.cli" if victim == "rank 1" else "mua.environment.worker"
        return [(process.pid, victim) for process in scene.children(text)][: 1 if victim == "rank 1" else None]
    guardians = scene.children("guardian.py")
    below = [process for guardian in guardians for process in family(guardian.pid)]
    named = [(process.pid, command_of(process)) for process in below]
    return [(guardian.pid, "guardian") for guardian in guardians] + [
        (pid, "server" if "launch_server" in command else command.partition(" ")[0])
        for pid, command in named
        if command and "resource_tracker" not in command
    ]


def _kill(pid: int, name: str, scene: Scene, random: Random) -> str:
    user = scene.user
    if user is None or user.process is None or user.process.pid != pid:
        _signal(pid, signal.SIGKILL)
        return name
    seconds, port = random.uniform(0.5, 8.0), free_port() if random.random() < 0.3 else user.port
    user.stop()
    scene.later(seconds, lambda: user.start(port))
    return f"started again after {seconds:.1f} s on {'its' if port == user.port else 'another'} port"


def _fill_disk(fault: Fault, scene: Scene, random: Random) -> str:
    filler, seconds = scene.output.parent / "filler", random.uniform(2.0, 15.0)
    for size in (65536, 1):
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    scene.later(seconds, lambda: filler.unlink(missing_ok=True))
    return f"until the attempt ends, or for {seconds:.1f} s"


def _truncate(fault: Fault, scene: Scene, random: Random) -> str | None:
    """The trainer is killed as well: a checkpoint is read when an attempt begins."""
    checkpoints = scene.output / "checkpoints"
    if not (step := newest_step(checkpoints)):
        return None
    scene.trainer.kill()
    scene.trainer.wait()
    files = sorted(path for path in (checkpoints / f"step_{step:08d}").rglob("*") if path.is_file())
    file, share = random.choice(files), random.random()
    os.truncate(file, int(file.stat().st_size * share))
    return f"{file.relative_to(checkpoints)} to {share:.0%}, after kill -9 of the trainer"


def _take_port(fault: Fault, scene: Scene, random: Random) -> str | None:
    """Of an engine that is starting, or, where all have started, of one that is made to start again."""
    for process in scene.children("guardian.py"):
        found = _PORT.search(command_of(process))
        if found and process.pid not in scene.restarted and _take(int(found[1]), scene):
            return f"of an engine that is starting{' again after kill -9' if scene.restarted else ''}"
        if fault.phase is not Phase.START:
            scene.restarted.add(process.pid)
            _signal(process.pid, signal.SIGKILL)
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


def _put_clock_forward(fault: Fault, scene: Scene, random: Random) -> str:
    days = random.choice([1 / 24, 1.0, 40.0, 400.0]) * random.uniform(0.5, 1.5)
    scene.clock.put_forward(days * 86400)
    future = time.time() + scene.clock.ahead
    for path in scene.output.glob("**/*"):
        with contextlib.suppress(OSError):
            os.utime(path, (future, future))
    return f"by {days:.2f} days, files included"


_OTHERS: dict[Kind, Callable[[Fault, Scene, Random], str | None]] = {
    Kind.DISK: _fill_disk,
    Kind.CHECKPOINT: _truncate,
    Kind.PORT: _take_port,
    Kind.CLOCK: _put_clock_forward,
}


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- the user's language model


async def _answer(request: web.Request) -> web.StreamResponse:
    """A sentence that the request's seed and length choose, so that it is the same again."""
    body = await request.json()
    random = Random(f"{body.get('seed')}/{len(body['messages'])}")
    await asyncio.sleep(random.uniform(0.02, 0.2))
    said = sum(message["role"] == "assistant" for message in body["messages"])
    sentences = ("Hello, where is my parcel now?", "Please cancel the order.", "My name is Ada Brown.", "It is 4711.")
    text = STOP_SIGNAL if said and random.random() < 0.15 else random.choice(sentences)
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
    )


def main() -> None:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    web.run_app(app, host=LOOPBACK, port=int(sys.argv[1]), print=lambda _: None)


if __name__ == "__main__":
    main()
