"""The engines of a run for samplers in other processes: one address, in front of the pool.

    mua sample: RoutedEngines ── POST /generate ──► EngineRouter ──► EnginePool.generate ──► an engine
                              ── GET /state ──────►   how loaded they are, whether time stands still, the version

The gate of a weight update, restarts, affinity and turns that go on elsewhere are the pool's, whoever asks. A request
whose sampler goes away is given up. How many episodes samplers start follows from what the engines can take:
:meth:`EngineRouter.room`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from time import monotonic
from typing import Any, Protocol

import orjson
from aiohttp import web

import mua
from mua.config.samplers_section import SamplersConfig
from mua.engine.host import authorised
from mua.engine.member import EngineLoad
from mua.engine.routed import CONTRACT, CONTRACT_HEADER, fault_json, generation_json
from mua.engine.sampler import Sampler, SamplingParams
from mua.types import Json
from mua.utils.errors import DeadlineExceeded, EngineError

log = logging.getLogger(__name__)
_MOST_BYTES = 256 * 2**20
_HEARD_SECONDS = 5.0
"""A sampler that has not asked for so long gets no share of the room."""
_COMING_SECONDS = 1.0
"""How long an episode that was started counts as a request that is about to come."""


class RoutedPool(Sampler, Protocol):
    """What the router needs of :class:`mua.engine.pool.EnginePool`."""

    version: int

    def load(self) -> EngineLoad:
        """What the engines do now."""


class EngineRouter:
    """Serves ``pool``. Belongs to its event loop."""

    def __init__(self, pool: RoutedPool, config: SamplersConfig) -> None:
        self._pool, self._config = pool, config
        self.key = secrets.token_urlsafe(32)
        self.url = ""
        """``http://HOST:PORT``, once started."""
        self._runner: web.AppRunner | None = None
        self._heard: dict[str, float] = {}
        self._coming: deque[tuple[float, int]] = deque()

    async def start(self) -> None:
        """Listen. Raises :class:`EngineError` where the address is not this machine's, or the port taken."""
        application = web.Application(client_max_size=_MOST_BYTES, middlewares=[authorised(self.key), _same_contract])
        application.router.add_post("/generate", self._generate)
        application.router.add_get("/state", self._state)
        runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        address = self._config.address
        try:
            await web.TCPSite(runner, address, self._config.port or 0).start()
        except OSError as error:
            await runner.cleanup()
            raise EngineError(
                f"samplers.address {address}, samplers.port {self._config.port}: cannot listen there "
                f"({error.strerror or error}); name an address of this machine and a free port",
                passing=False,
            ) from None
        self._runner = runner
        self.url = f"http://{address}:{runner.addresses[0][1]}"

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

    async def _state(self, request: web.Request) -> web.Response:
        load = self._pool.load()
        wants = request.query.get("wants") == "1"
        self.started(int(request.query.get("started", "0")))
        return _json({
            "paused": load.paused, "version": self._pool.version, "capacity": load.capacity, "running": load.running,
            "waiting": load.waiting, "room": self.room(request.query.get("sampler", "")) if wants else 0,
        })  # fmt: skip

    async def _generate(self, request: web.Request) -> web.Response:
        try:
            asked = orjson.loads(await request.read())
            params = SamplingParams(**asked["params"] | {"stop_token_ids": tuple(asked["params"]["stop_token_ids"])})
            ids, session, seconds = asked["ids"], str(asked["session"]), float(asked["seconds"])
        except (ValueError, TypeError, KeyError) as error:
            raise web.HTTPBadRequest(text=f"no request of a sampler of this version: {error!r}") from None
        try:
            found = await self._pool.generate(ids, params, session=session, deadline_s=seconds)
        except (EngineError, DeadlineExceeded) as fault:
            return _json({"fault": fault_json(fault)})
        except asyncio.CancelledError:
            log.debug("a sampler has gone away from its request of session %s", session)
            raise
        return _json({"generation": generation_json(found)})


@web.middleware
async def _same_contract(request: web.Request, handler: Any) -> web.StreamResponse:
    spoken = request.headers.get(CONTRACT_HEADER)
    if spoken != str(CONTRACT):
        told = (
            f"the trainer is mua {mua.__version__} with sampler contract {CONTRACT}, this sampler speaks "
            f"{spoken or 'none'}; install the trainer's mua here"
        )
        log.warning("a sampler at %s is refused: %s", request.remote, told)
        raise web.HTTPConflict(text=told)
    answer: web.StreamResponse = await handler(request)
    return answer


class OwnRoom:
    """The router's word on room for a sampler in its process; an ``EngineRoom``."""

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
