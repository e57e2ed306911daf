"""One engine of a pool: the HTTP client of its server, and what the pool knows of it. And several, for one operation.

EngineClient    native ``/generate`` with token ids, and the control endpoints
EngineHandle    the server, its client, its state and its slots for requests
Targets         the engines of one control operation
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import heapq
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, get_args

import aiohttp
import numpy as np
import orjson

from mua.engine import SamplingParams
from mua.engine.server import RemoteServer, SglangServer
from mua.observe.timeline import EngineClock
from mua.types import ExpertArray, FinishReason, Generation, Int32Array
from mua.utils.errors import EngineError

_log = logging.getLogger(__name__)
_JSON = {"Content-Type": "application/json"}
_KEEP_ALIVE_S = 2.0
"""Idle connections are given up long before the server does it (``mua.engine.server.IDLE_CONNECTION_SECONDS``)."""
_LEAST_BYTES_PER_SECOND = 50e6
"""Whoever loads weights slower than that counts as stuck."""
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "max_new_tokens",
    "stop_token_ids",
)  # fmt: skip
"""What SGLang calls as :class:`SamplingParams` does."""


class EngineGone(EngineError):
    """The connection failed or the server answered 5xx: nothing more is to be expected from this engine."""


class EngineClient:
    """Talks to one server. Lives on one asyncio loop; ``close`` it there."""

    def __init__(self, url: str, label: str, api_key: str | None = None) -> None:
        self.label = label
        self._session = aiohttp.ClientSession(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None),
            json_serialize=lambda value: orjson.dumps(value).decode(),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(self, path: str, body: Any = None, *, timeout: float | None = None) -> Any:
        """POST ``body`` as JSON and return the parsed answer (None when it is not JSON).

        Raises :class:`EngineGone` when the server is not there any more or is broken, and
        :class:`EngineError` when it refuses.
        """
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.post(path, data=data, headers=_JSON, timeout=limit) as response:
                answer = await response.read()
                status = response.status
        except TimeoutError:
            raise EngineGone(f"{self.label} did not answer {path} within {timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise EngineGone(f"{self.label} is gone: {path}: {type(error).__name__} {error}") from error
        if status >= 400:
            kind = EngineGone if status >= 500 else EngineError
            raise kind(f"{self.label} answered {path} with {status}: {answer[:500].decode(errors='replace')}")
        with contextlib.suppress(orjson.JSONDecodeError):
            return orjson.loads(answer)
        return None

    async def control(self, path: str, body: Any, *, timeout: float) -> Any:
        """Like :meth:`call`, and an answer that does not say ``success`` is an :class:`EngineError`."""
        answer = await self.call(path, body, timeout=timeout)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise EngineError(f"{self.label} refused {path}: {answer}")
        return answer

    async def answers(self, path: str, timeout: float) -> bool:
        """Whether a GET of ``path`` succeeds in time."""
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.get(path, timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def flush(self, wait: float, *, timeout: float | None = None) -> None:
        """Wait ``wait`` seconds at most until the server is idle, and empty its prefix cache.

        A response reaches the client before the scheduler is idle, so this is also the barrier that a weight
        update needs. With ``wait`` 0 the answer comes at once: on a paused server, retracted requests do not
        count as running there, while a flush that waits (SGLang 0.5.23) would wait for them too.
        """
        await self.call(f"/flush_cache?timeout={wait:g}", timeout=wait + 30 if timeout is None else timeout)

    async def generate(self, rid: str, prompt_ids: Sequence[int] | Int32Array, params: SamplingParams) -> Generation:
        """Sample once; the caller bounds the time. Raises like :meth:`call`."""
        sampling: dict[str, Any] = {name: getattr(params, name) for name in _SAMPLING}
        if params.seed is not None:
            sampling["sampling_seed"] = params.seed
        body: dict[str, Any] = {
            "rid": rid,
            "input_ids": prompt_ids if isinstance(prompt_ids, np.ndarray) else list(prompt_ids),
            "sampling_params": sampling,
            "return_logprob": True,
        }
        if params.experts_from is None:
            return parse_generation(await self.call("/generate", body), self.label)
        body |= {"return_routed_experts": True, "routed_experts_start_len": params.experts_from}
        routed = len(prompt_ids) - params.experts_from
        return parse_generation(await self.call("/generate", body), self.label, routed_prompt=routed)


def parse_generation(answer: Any, label: str, *, routed_prompt: int | None = None) -> Generation:
    """Read the answer of ``/generate``. Raises :class:`EngineError` when ids and log-probabilities disagree.

    With ``routed_prompt`` the answer must hold the experts of the last so many prompt tokens and of all sampled ones
    but the last, ``[tokens, layers * top k]`` in the narrowest type: four bytes a choice is what the server sends, one
    or two are what is kept. A request that was aborted before anything was sampled has none.
    """
    try:
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort" and not answer["output_ids"]:  # it waited in the engine's queue
            version, nothing = int(meta["weight_version"]), np.zeros(0, np.int32)
            return Generation(nothing, np.zeros(0, np.float32), "abort", version, nothing, 0)
        ids = np.asarray(answer["output_ids"], dtype=np.int32)
        pairs = meta["output_token_logprobs"]
        logprobs = np.asarray([pair[0] for pair in pairs], dtype=np.float32)
        logged = np.asarray([pair[1] for pair in pairs], dtype=np.int32)
        versions = np.full(len(ids), int(meta["weight_version"]), dtype=np.int32)
        for span in meta.get("weight_versions") or ():
            versions[span["start"] : span["end"]] = int(span["version"])
        finish = meta["finish_reason"]["type"]
        cached = int(meta["cached_tokens"])
        experts: ExpertArray | None = None
        if routed_prompt is not None:  # SGLang's base64 of int32 [rows, layers, top k]
            rows = routed_prompt + len(ids) - 1
            flat = np.frombuffer(base64.b64decode(meta["routed_experts"], validate=True), dtype="<i4")
            if rows < 1 or flat.size == 0 or flat.size % rows:
                raise ValueError(f"{flat.size} expert choices for {rows} tokens")
            if flat.min() < 0 or flat.max() > np.iinfo(np.uint16).max:
                raise ValueError(f"expert choices from {flat.min()} to {flat.max()}")
            narrow: Any = np.uint8 if flat.max() <= np.iinfo(np.uint8).max else np.uint16
            experts = flat.reshape(rows, -1).astype(narrow)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"{label} gave an answer that cannot be read ({error!r}): {str(answer)[:300]}") from error
    if finish not in get_args(FinishReason):
        raise EngineError(f"{label} ended a request for an unknown reason: {finish}")
    if not np.array_equal(ids, logged):
        raise EngineError(f"{label} gave {len(ids)} ids but log-probabilities of {len(logged)} others")
    if not np.isfinite(logprobs).all():
        raise EngineError(f"{label} gave log-probabilities that are not finite")
    return Generation(ids, logprobs, finish, int(meta["weight_version"]), versions, cached, experts)


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


Server = SglangServer | RemoteServer
"""A server process of this machine or of another."""


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

            async def end() -> None:
                client, self._client = self._client, None
                try:
                    await self.server.stop()
                finally:
                    if client is not None:
                        await client.close()

            self._ending = asyncio.create_task(end(), name=f"end {self.label}")
        return asyncio.shield(self._ending)

    async def abort(self, rid: str = "") -> None:
        """Have the engine answer what it has sampled of request ``rid``, or of all; it may not know it, or be gone."""
        with contextlib.suppress(EngineError):
            await self.client.call("/abort_request", {"rid": rid, "abort_all": not rid}, timeout=5.0)

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
