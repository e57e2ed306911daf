"""The engines of a run for samplers in other processes: one address, in front of the pool.

    mua sample: RouterClient ── POST /generate ──► EngineRouter ──► EnginePool.generate ──► an engine
                              ── GET /state ──────►   how loaded they are, whether time stands still, the version

The gate of a weight update, restarts, affinity and turns that go on elsewhere are the pool's, whoever asks. A request
whose sampler goes away is given up. How many episodes samplers start follows from what the engines can take:
:meth:`EngineRouter.room`.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from http import HTTPStatus
from time import monotonic
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson
from aiohttp import web

import mua
from mua.config.rollout import SamplersConfig
from mua.engine import Pauses, SamplingParams, TurnCut
from mua.engine.engine_handle import EngineGone
from mua.engine.server import serve
from mua.types import Generation, Json
from mua.utils.errors import DeadlineExceeded, EngineError, one_line

if TYPE_CHECKING:
    from mua.engine.pool import EnginePool

_log = logging.getLogger(__name__)
CONTRACT = 2
"""Counts every change of what the trainer and the samplers of a run tell each other: requests and answers of the
router, and what leases and rows of results mean to both. Sides that differ in it refuse each other."""
CONTRACT_HEADER = "X-Mua-Sampler-Contract"
_LOOK_SECONDS = 0.5
_ANSWER_SECONDS = 10.0
_AGAIN_SECONDS = 0.5
_ARRAYS = ("ids", "logprobs", "versions", "experts")


class RouterLost(EngineError):
    """The router has not answered for a while: the trainer is gone, or no network leads there."""


class RouterClient:
    """Implements :class:`mua.engine.Sampler`. Belongs to one event loop; use as a context manager.

    A request that loses its connection is asked again until the router has been silent for ``silence_seconds``.
    """

    def __init__(self, url: str, key: str, sampler: str, silence_seconds: float) -> None:
        self.pauses = Pauses()
        """Time that counts to no deadline, because it stands still for the engines."""
        self.state: Json = {}
        """What the router said last."""
        self._url, self._key, self.name, self._silence = url, key, sampler, silence_seconds
        self._unanswered: float | None = None
        """When the first of the questions ended that were not answered since the last answer."""
        self.lost = False
        """Whether the router has been silent for too long: two questions at least, so that a moment in which this
        process itself stood still is not taken for the router's silence."""
        self._refusal = ""
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RouterClient:
        self._session = aiohttp.ClientSession(
            base_url=self._url,
            headers={"Authorization": f"Bearer {self._key}", CONTRACT_HEADER: str(CONTRACT)},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ANSWER_SECONDS),
        )

        async def look() -> None:
            while True:
                await self._ask(wants=False)
                await asyncio.sleep(_LOOK_SECONDS)

        self._watch = asyncio.create_task(look(), name="watch of the router")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self._session.close()

    async def answers(self) -> bool:
        """Whether the router answers now."""
        return await self._ask(wants=False)

    async def room(self) -> int:
        """How many episodes may be started now; 0 where the router does not answer. Raises :class:`EngineError` where
        it refuses samplers of this mua."""
        room = int(self.state["room"]) if await self._ask(wants=True) else 0
        if self._refusal:
            raise EngineError(self._refusal, passing=False)
        return room

    async def started(self, count: int) -> None:
        """So many episodes were."""
        await self._ask(wants=False, started=count)

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        """See :meth:`mua.engine.Sampler.generate`. Raises :class:`RouterLost` too."""
        deadline = self.pauses.deadline(deadline_s)
        while True:
            asked = {"ids": list(map(int, prompt_ids)), "params": asdict(params), "session": session}
            body = orjson.dumps(asked | {"seconds": max(deadline.left, 0.001)})
            try:
                answer = await self._answer(body)
                break
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                if self.lost:
                    raise RouterLost(
                        f"the engines' router at {self._url} has not answered for {self._silence:g} s: "
                        f"{one_line(error)}"
                    ) from None
                if not deadline.left:
                    raise DeadlineExceeded(f"engine request of session {session!r}: {one_line(error)}") from None
                await asyncio.sleep(_AGAIN_SECONDS)
        if "fault" in answer:
            raise fault_of(answer["fault"])
        return generation_of(answer["generation"])

    async def _answer(self, body: bytes) -> Json:
        async def post() -> Json:
            async with self._session.post("/generate", data=body) as response:
                text = await response.read()
                if response.status != HTTPStatus.OK:
                    raise EngineError(
                        f"the engines' router at {self._url} answered {response.status}: "
                        f"{text[:300].decode(errors='replace')}",
                        passing=response.status != HTTPStatus.CONFLICT,
                    )
            found: Json = orjson.loads(text)
            return found

        request = asyncio.ensure_future(post())
        try:
            while not request.done():
                await asyncio.wait({request}, timeout=_LOOK_SECONDS)
                if not request.done() and self.lost:  # nothing tells a client that the machine behind is gone
                    raise TimeoutError("no sign of life")
            return request.result()
        finally:
            request.cancel()

    async def _ask(self, *, wants: bool, started: int = 0) -> bool:
        """Learn the state; whether the router answered."""
        query = {"sampler": self.name, "wants": str(int(wants)), "started": str(started)}
        limit = aiohttp.ClientTimeout(total=_ANSWER_SECONDS)
        state: Json | None = None
        try:
            async with self._session.get("/state", params=query, timeout=limit) as response:
                text = await response.read()
                if response.status == HTTPStatus.CONFLICT:
                    self._refusal = text[:300].decode(errors="replace")
                if response.status == HTTPStatus.OK:
                    state = orjson.loads(text)
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            pass
        if state is None:
            self._unanswered, first = self._unanswered or monotonic(), self._unanswered
            self.lost = first is not None and monotonic() - first > self._silence
            return False
        self.state, self._unanswered, self.lost = state, None, False
        if state["paused"]:
            self.pauses.begin()
        else:
            self.pauses.end()
        return True


# ---- how turns and faults travel


def generation_json(generation: Generation) -> Json:
    """As JSON, arrays in base64 with their dtype and shape; bit for bit."""
    arrays = {}
    for name in _ARRAYS:
        if (array := getattr(generation, name)) is not None:
            data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
            arrays[name] = [array.dtype.str, list(array.shape), data]
    return {
        "finish": generation.finish,
        "version": generation.version,
        "cached_tokens": generation.cached_tokens,
        "waited": generation.waited,
        "engine": generation.engine,
        "arrays": arrays,
    }


def generation_of(body: Json) -> Generation:
    """Reverses :func:`generation_json`. Raises :class:`EngineError` for anything else."""
    try:
        arrays = {
            name: np.frombuffer(base64.b64decode(data, validate=True), np.dtype(dtype)).reshape(shape).copy()
            for name, (dtype, shape, data) in body["arrays"].items()
        }
        return Generation(
            arrays["ids"], arrays["logprobs"], body["finish"], int(body["version"]), arrays["versions"],
            int(body["cached_tokens"]), arrays.get("experts"), float(body["waited"]),
            str(body["engine"]),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"the engines' router gave an answer that cannot be read: {error!r}") from None


def fault_json(fault: EngineError | DeadlineExceeded) -> Json:
    """What the pool raised, as JSON."""
    kind = next(name for name, made in _KINDS.items() if isinstance(fault, made))
    body: Json = {"kind": kind, "message": str(fault), "passing": fault.passing}
    return body | ({"partial": generation_json(fault.partial)} if isinstance(fault, TurnCut) else {})


def fault_of(body: Json) -> EngineError | DeadlineExceeded:
    """Reverses :func:`fault_json`."""
    made, message = _KINDS.get(body.get("kind", ""), EngineError), str(body.get("message", body))
    if made is TurnCut:
        return TurnCut(message, generation_of(body["partial"]))
    fault: EngineError | DeadlineExceeded = made(message)
    fault.passing = bool(body.get("passing", True))
    return fault


_KINDS: dict[str, Any] = {
    "turn_cut": TurnCut, "deadline": DeadlineExceeded, "engine_gone": EngineGone, "engine_error": EngineError,
}  # fmt: skip
"""The more special before the more general."""


_MOST_BYTES = 256 * 2**20
_HEARD_SECONDS = 5.0
"""A sampler that has not asked for so long gets no share of the room."""
_COMING_SECONDS = 1.0
"""How long an episode that was started counts as a request that is about to come."""


class EngineRouter:
    """Serves ``pool``. Belongs to its event loop."""

    def __init__(self, pool: EnginePool, config: SamplersConfig) -> None:
        self._pool, self._config = pool, config
        self.key = secrets.token_urlsafe(32)
        self.url = ""
        """``http://HOST:PORT``, once started."""
        self._runner: web.AppRunner | None = None
        self._heard: dict[str, float] = {}
        self._coming: deque[tuple[float, int]] = deque()

    async def start(self) -> None:
        """Listen. Raises :class:`EngineError` where the address is not this machine's, or the port taken."""

        @web.middleware
        async def same_contract(request: web.Request, handler: Any) -> web.StreamResponse:
            spoken = request.headers.get(CONTRACT_HEADER)
            if spoken != str(CONTRACT):
                told = (
                    f"the trainer is mua {mua.__version__} with sampler contract {CONTRACT}, this sampler speaks "
                    f"{spoken or 'none'}; install the trainer's mua here"
                )
                _log.warning("a sampler at %s is refused: %s", request.remote, told)
                raise web.HTTPConflict(text=told)
            answer: web.StreamResponse = await handler(request)
            return answer

        routes = web.RouteTableDef()

        @routes.get("/state")
        async def state(request: web.Request) -> web.Response:
            load, wants = self._pool.load(), request.query.get("wants") == "1"
            self.started(int(request.query.get("started", "0")))
            return _json({
                "paused": load.paused, "version": self._pool.version, "capacity": load.capacity,
                "running": load.running, "waiting": load.waiting,
                "room": self.room(request.query.get("sampler", "")) if wants else 0,
            })  # fmt: skip

        @routes.post("/generate")
        async def generate(request: web.Request) -> web.Response:
            try:
                asked = orjson.loads(await request.read())
                stops = {"stop_token_ids": tuple(asked["params"]["stop_token_ids"])}
                params = SamplingParams(**asked["params"] | stops)
                ids, session, seconds = asked["ids"], str(asked["session"]), float(asked["seconds"])
            except (ValueError, TypeError, KeyError) as error:
                raise web.HTTPBadRequest(text=f"no request of a sampler of this version: {error!r}") from None
            try:
                found = await self._pool.generate(ids, params, session=session, deadline_s=seconds)
            except (EngineError, DeadlineExceeded) as fault:
                return _json({"fault": fault_json(fault)})
            except asyncio.CancelledError:
                _log.debug("a sampler has gone away from its request of session %s", session)
                raise
            return _json({"generation": generation_json(found)})

        address, port = self._config.address, self._config.port
        try:
            self._runner, self.url = await serve(
                routes, self.key, address, port or 0, same_contract, most_bytes=_MOST_BYTES
            )
        except OSError as error:
            raise EngineError(
                f"samplers.address {address}, samplers.port {port}: cannot listen there "
                f"({error.strerror or error}); name an address of this machine and a free port",
                passing=False,
            ) from None

    async def close(self) -> None:
        """Requests under way are given up."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def room(self, sampler: str) -> int:
        """How many episodes ``sampler`` may start now, at most: its share of what the engines could run beyond what
        runs and waits there. It counts on their coming."""
        now = monotonic()
        self._heard[sampler] = now
        self._heard = {name: at for name, at in self._heard.items() if now - at < _HEARD_SECONDS}
        while self._coming and now - self._coming[0][0] > _COMING_SECONDS:
            self._coming.popleft()
        load = self._pool.load()
        if load.paused:
            return 0
        coming = sum(count for _, count in self._coming)
        left = int(self._config.load * load.capacity) - load.running - load.waiting - coming
        return -(-max(0, left) // len(self._heard))

    def started(self, count: int) -> None:
        """So many episodes were started, whose requests are about to come."""
        self._coming.append((monotonic(), count))


class OwnRoom:
    """The router's word on room for a sampler in its process."""

    def __init__(self, router: EngineRouter, sampler: str) -> None:
        self._router, self._sampler = router, sampler

    async def room(self) -> int:
        """How many episodes may be started now."""
        return self._router.room(self._sampler)

    async def started(self, count: int) -> None:
        """So many were."""
        self._router.started(count)


def _json(body: Json) -> web.Response:
    return web.Response(body=orjson.dumps(body), content_type="application/json")
