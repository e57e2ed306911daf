"""Environments in worker processes: a crash or a hang costs one worker, and the episodes that had environments in it.

::

    run (event loop)                                       worker k of ``environment.workers``
    handle ── chooses the worker with fewest instances ──►    instances 3, 7, 12: one environment each
    run(request) ── waits its turn ── JSON line ──────►    main thread performs it
                 ◄───────────────────── JSON line ───
       ├─ no line before the deadline: the process group is killed ── HungCall
       └─ end of file: it crashed, or was killed ─────────────────── LostEnvironment
                                                           the next instance starts another in its place

A worker is a clean interpreter: it inherits no memory, no open file but its socket, no CUDA device, and of the
process's variables only those that say where things are. It leads a process group of its own, so that Ctrl-C does not
reach it, and ends itself when the socket closes (:mod:`mua.environment.worker`): however a run ends, nothing stays.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.executors import EnvironmentHandle, HungCall, LostEnvironment
from mua.environment.protocol import Task
from mua.environment.requests import CallOutcome, Request, packed, read_error, read_outcome, request_json
from mua.types import Json
from mua.utils.cores import all_cores
from mua.utils.errors import ConfigError, EnvironmentFault, MuaError

log = logging.getLogger(__name__)

START_SECONDS = 60.0
"""Deadline of starting an interpreter and importing the domain."""
MAX_FAILED_STARTS = 3
"""In a row; then the domain must be broken, and retrying episodes would only hide it."""
_STOP_SECONDS = 5.0
"""For a worker to leave by itself once its socket is closed: it closes the environments it still has."""
_LONGEST_LINE = 2**28
_KEPT_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH")


class WorkersBroken(MuaError):
    """Workers do not start. Not an episode's fault to be retried: it ends the run."""


class ProcessExecutor:
    """At most ``config.workers`` processes; each is started when an instance first needs it."""

    hung = 0

    def __init__(self, domain: Domain, config: EnvironmentConfig) -> None:
        if config.oracle == "llm":
            raise ConfigError(
                "environment.isolation: worker processes have no endpoints, which oracle: llm asks; leave isolation at "
                "auto"
            )
        hello = packed({"domain": domain.name, "config": config.model_dump_json()})
        self._slots = [_WorkerSlot(domain.name, hello) for _ in range(config.workers)]

    def handle(self, task: Task) -> EnvironmentHandle:
        return _WorkerHandle(self._slots, task)

    async def close(self) -> None:
        await asyncio.gather(*(slot.close() for slot in self._slots))


class _WorkerHandle:
    _numbers = itertools.count()

    def __init__(self, slots: list[_WorkerSlot], task: Task) -> None:
        self._slots = slots
        self._task = task
        self._number = next(self._numbers)
        self._slot: _WorkerSlot | None = None
        self._worker: WorkerProcess | None = None

    async def run(self, request: Request, seconds: float) -> CallOutcome:
        if self._worker is None:
            self._slot = min(self._slots, key=lambda slot: slot.instances)
            self._slot.instances += 1
            self._worker = await self._slot.ready()
        try:
            line = self._line(request_json(request), seconds)
        except (TypeError, ValueError) as error:
            return None, error  # something in the request is no JSON
        return read_outcome(request, await self._worker.ask(self._named(request.name), line, seconds))

    async def close(self, seconds: float) -> BaseException | None:
        slot, worker, self._slot, self._worker = self._slot, self._worker, None, None
        if slot is not None:
            slot.instances -= 1
        if worker is None:
            return None
        try:
            answer = await worker.ask(self._named("close()"), self._line({"do": "close"}, seconds), seconds)
        except LostEnvironment:
            return None  # whoever asked it last has said so, and nothing is left to close
        return read_error(answer)

    def _line(self, message: Json, seconds: float) -> bytes:
        return packed({**message, "instance": self._number, "seconds": seconds})

    def _named(self, what: str) -> str:
        return f"{what} of task {self._task.id!r}"


class _WorkerSlot:
    """One of the pool's workers, and the one that replaces it."""

    def __init__(self, name: str, hello: bytes) -> None:
        self.instances = 0
        self.worker: WorkerProcess | None = None
        self._name = name
        self._hello = hello
        self._starting: asyncio.Task[WorkerProcess] | None = None
        self._failures = 0

    async def ready(self) -> WorkerProcess:
        """A worker that runs; whoever comes while it starts waits for the same one."""
        if self.worker is not None and self.worker.lost is None:
            return self.worker

        def started(task: asyncio.Task[WorkerProcess]) -> None:
            self._starting = None
            if not task.cancelled():
                task.exception()  # seen by those who waited, if any were left

        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name=f"start worker of {self._name}")
            self._starting.add_done_callback(started)
        return await asyncio.shield(self._starting)

    async def close(self) -> None:
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if self.worker is not None:
            await self.worker.close()

    async def _start(self) -> WorkerProcess:
        if self._failures >= MAX_FAILED_STARTS:
            raise WorkersBroken(
                f"environment {self._name!r}: its worker processes do not start ({self._failures} failed in a row); "
                "what they print stands above, on standard error"
            )
        self._failures += 1
        self.worker = await WorkerProcess.start(self._name, self._hello)
        self._failures = 0
        return self.worker


class WorkerProcess:
    """One worker and the socket to it; requests are queued."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.pid = process.pid
        self.lost: str | None = None
        """Why it is gone."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()
        self._exchanges: set[asyncio.Task[Json]] = set()

    @classmethod
    async def start(cls, name: str, hello: bytes) -> WorkerProcess:
        """Start one and tell it its domain.

        Raises :class:`ConfigError` for what the domain refuses, else :class:`EnvironmentFault`.
        """
        ours, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        with theirs, all_cores():  # the worker's standard input; what it prints goes to our standard error
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "mua.environment.worker"],
                stdin=theirs.fileno(),
                stdout=2,
                env=kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        worker = cls(process, reader, writer)
        try:
            answer = await worker.ask("its import of the domain", hello, START_SECONDS)
        except HungCall:
            raise EnvironmentFault(
                f"environment {name!r}: a worker process was not ready after {START_SECONDS:g} s and is killed"
            ) from None
        except LostEnvironment as lost:
            raise EnvironmentFault(f"environment {name!r}: {lost}") from None
        if (error := read_error(answer)) is not None:
            await worker.close()
            raise (
                error
                if isinstance(error, ConfigError)
                else EnvironmentFault(f"environment {name!r} cannot be made in a worker process: {error}")
            )
        return worker

    async def ask(self, what: str, line: bytes, seconds: float) -> Json:
        """The answer to one request, whose ``seconds`` count from when it is sent.

        Raises :class:`HungCall` and :class:`LostEnvironment`. A cancelled wait leaves the request to be answered.
        """
        exchange = asyncio.create_task(self._exchange(what, line, seconds))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        # What it raises is seen by whoever waits, unless that is cancelled.
        exchange.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(exchange)

    async def close(self) -> None:
        """Close the socket, wait for the process, kill what is left of its group."""
        self.lost = self.lost or "its worker process was closed"
        self._writer.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await self._reaped()
        if self._process.returncode is None:
            await self._kill()

    async def _exchange(self, what: str, line: bytes, seconds: float) -> Json:
        async with self._turn:
            if self.lost is not None:
                raise LostEnvironment(self.lost)
            answer = b""
            try:
                async with asyncio.timeout(seconds):
                    with suppress(ConnectionError, ValueError):  # ValueError: a longer line than the limit
                        self._writer.write(line)
                        await self._writer.drain()
                        answer = await self._reader.readline()
            except TimeoutError:
                await self._gone(f"its worker process was killed, because {what} hung there")
                raise HungCall("its worker process is killed") from None
        if answer.endswith(b"\n"):
            return json.loads(answer)
        await self._gone(f"its worker process ended during {what}")
        status = self._process.returncode
        ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
        with suppress(ValueError):  # a signal without a name
            ended = signal.Signals(-status).name
        raise LostEnvironment(f"{self.lost} ({ended})")

    async def _gone(self, why: str) -> None:
        self.lost = why
        self._writer.close()
        await self._kill()
        log.warning("worker %d: %s", self.pid, self.lost)

    async def _kill(self) -> None:
        # Before the process is reaped its number cannot belong to anybody else.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._reaped()

    async def _reaped(self) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(0.005)
