"""One engine of a pool: its server, its client and what the pool knows about it. And several, for one operation."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar

from mua.engine.client import EngineClient, EngineGone
from mua.engine.server import RemoteServer
from mua.observe.timeline import EngineClock
from mua.utils.errors import EngineError

_log = logging.getLogger(__name__)
_LEAST_BYTES_PER_SECOND = 50e6
"""Whoever loads weights slower than that counts as stuck."""


class EngineState(Enum):
    STARTING = "starting"
    AWAITING = "awaiting weights"
    SERVING = "serving"
    LEAVING = "leaving"
    STOPPED = "stopped"


class EnginePlace(NamedTuple):
    """Where an engine is: ``node`` numbers the machines of the run, ``place`` the engines of one machine."""

    node: int
    place: int


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What the engines in rotation do, all together."""

    capacity: int
    """Requests that they can run at once."""
    running: int
    waiting: int
    paused: bool
    """They get or wait for weights, or the trainer has their memory."""


class Server(Protocol):
    """A server process here (:class:`mua.engine.server.SglangServer`) or on another machine."""

    label: str
    log_file: Path | None
    api_key: str

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> bool:
        """Whether the server's process is there; it may still be loading."""
        ...

    async def start(self, model_path: Path) -> None:
        """Start and wait until the server takes requests. Raises :class:`EngineError`."""
        ...

    async def stop(self) -> None:
        """End the server and everything it started. Never raises."""
        ...


@dataclass(eq=False)
class Machine:
    """One that has registered."""

    name: str
    """For people: its host and process."""
    number: int
    """It is machine ``number`` of the run."""
    first: int
    """Number of its first engine among those of the run."""
    count: int
    url: str = ""
    """Of its RemoteWorker, once it is ready."""
    engines: list[EngineHandle] = field(default_factory=list)
    heard: float = field(default_factory=monotonic)
    leaving: bool = False


class EngineHandle:
    """One server, its client and what the pool knows about it."""

    def __init__(
        self, server: Server, slots: int, node: int = 0, machine: Machine | None = None, place: int = 0
    ) -> None:
        self.server = server
        self.machine = machine
        """The engine node it came with, and may go with; None: it belongs to the run."""
        self.leaving = False
        """Whether it is not to be started any more."""
        self.label = server.label
        self.node = node
        """Machine of the run it is on; 0 is this one."""
        self.place = place
        """Number among the engines of its machine."""
        self.stops = 0
        """Times it was stopped: tells one that is, or was, restarted from the one before."""
        self.slots = Slots(slots)
        self.clock = EngineClock(slots)
        self.control = asyncio.Lock()
        """Held by whoever changes what the engine holds."""
        self.probing = asyncio.Lock()
        """Held by a probe that generates, and by who must have none in the engine."""
        self.suspect = asyncio.Event()
        self.state = EngineState.STOPPED
        self.in_flight = 0
        self.queued = 0
        self.restarts = 0
        self.spared = False
        """Whether it was stopped through no fault of its own: that restart does not count."""
        self.version = 0
        self.released: set[str] = set()
        """Tags of the memory it has given back."""
        self.paused = False
        """Whether requests that were running on it wait to go on."""
        self._client: EngineClient | None = None
        self._ending: asyncio.Task[None] | None = None
        """The last end of the server."""

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise EngineGone(f"{self.label} is {self.state.value}")
        return self._client

    @property
    def up(self) -> bool:
        return self.state in (EngineState.SERVING, EngineState.AWAITING)

    async def start(self, model_path: Path) -> None:
        self.state = EngineState.STARTING
        await self.server.start(model_path)
        self.released.clear()
        self.paused = False
        self._client = EngineClient(self.server.url, self.label, self.server.api_key)
        self.version = 0

    def stop(self) -> asyncio.Future[None]:
        """End the server, also when the one that waits for it is cancelled; the result is there when it is gone.

        It counts in :attr:`stops` from the call on. Several calls at once share one end: a second one, of a server that
        whoever awaited the first is starting again, would kill what starts.
        """
        self.state = EngineState.STOPPED
        self.stops += 1
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end(), name=f"end {self.label}")
        return asyncio.shield(self._ending)

    async def _end(self) -> None:
        client, self._client = self._client, None
        try:
            await self.server.stop()
        finally:
            if client is not None:
                await client.close()

    async def part(self) -> None:
        """Have no more to do with the server, wherever it is; what runs on it ends with :class:`EngineGone`."""
        self.leaving = True
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if isinstance(self.server, RemoteServer):
            self.server.abandoned = True
        await self.stop()


class Slots:
    """Places for requests on one engine. Of those that wait for one, the lowest number gets it first, and of equal
    numbers the one that came first."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._came = itertools.count()

    async def acquire(self, number: int = 0) -> None:
        """Wait for a place; :meth:`release` gives it back."""
        if self._free > 0:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (number, next(self._came), given))
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():  # the place came together with the cancellation
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            _, _, given = heapq.heappop(self._waiting)
            if not given.done():
                given.set_result(None)
                return
        self._free += 1


class Loaded(Protocol):
    """What a request's engine is chosen by."""

    in_flight: int
    queued: int


Chosen = TypeVar("Chosen", bound=Loaded)


def least_loaded(engines: Iterable[Chosen]) -> Chosen:
    """The engine for a session that has none."""
    return min(engines, key=lambda engine: engine.in_flight + engine.queued)


class Targets:
    """The engines of one control operation; one that dies, or is silent for ``seconds``, is left out of the rest."""

    def __init__(self, engines: Sequence[EngineHandle], seconds: float) -> None:
        self.engines = list(engines)
        self.seconds = seconds
        self.lost: dict[EngineHandle, EngineGone] = {}
        self._stops = {engine: engine.stops for engine in engines}

    def same(self, engines: Iterable[EngineHandle]) -> list[EngineHandle]:
        """Those of ``engines`` that were not stopped since the beginning; the watch may have restarted the others."""
        return [engine for engine in engines if engine.stops == self._stops[engine]]

    def lose(self, engine: EngineHandle, error: EngineGone) -> None:
        _log.warning("%s is left out: %s", engine.label, error)
        self.lost[engine] = error
        self.engines.remove(engine)

    async def each(
        self, work: Callable[[EngineHandle], Awaitable[Any]], engines: Sequence[EngineHandle] | None = None
    ) -> dict[EngineHandle, Any]:
        """Run ``work`` on all that are left (of ``engines``) and wait for every one; what each of them gave.

        An engine that was stopped since the beginning is left out: if it is back, it knows nothing of the operation.
        Raises the first refusal, and :class:`EngineGone` when no engine is left.
        """
        for engine in [engine for engine in self.engines if engine not in self.same(self.engines)]:
            self.lose(engine, EngineGone(f"{engine.label} was stopped in the middle of it"))
        if self.lost and not self.engines:
            raise next(reversed(self.lost.values()))
        asked = [engine for engine in self.engines if engines is None or engine in engines]
        results = dict(zip(asked, await asyncio.gather(*map(work, asked), return_exceptions=True), strict=True))
        gone = {engine: result for engine, result in results.items() if isinstance(result, EngineGone)}
        for engine, error in gone.items():
            self.lose(engine, error)
        for engine, result in results.items():
            if isinstance(result, BaseException) and not (engine in gone and self.engines):
                raise result
        return {engine: result for engine, result in results.items() if engine not in gone}

    async def control(
        self, path: str, body: Callable[[EngineHandle], dict[str, Any]], seconds: float
    ) -> dict[EngineHandle, Any]:
        """POST to :meth:`each` engine, which must answer ``success`` within ``seconds``."""
        return await self.each(lambda engine: engine.client.control(path, body(engine), timeout=seconds))

    async def take_part(self, engine: EngineHandle, path: str, body: dict[str, Any], seconds: float) -> None:
        """POST to one of several engines that cannot do it without each other: every failure is a fault of all."""
        try:
            await engine.client.control(path, body, timeout=seconds)
        except EngineGone as error:
            self.lose(engine, error)
            raise
        except EngineError as error:  # its process group's, when another engine has left it
            raise EngineGone(str(error)) from error

    def loading_seconds(self, nbytes: int) -> float:
        """Deadline of a request after which an engine has taken ``nbytes``."""
        return self.seconds + nbytes / _LEAST_BYTES_PER_SECOND
