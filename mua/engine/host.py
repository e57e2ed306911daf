"""Engines on other machines: a process there runs them, rank 0 asks for it.

    rank 0: EnginePool                               another machine
    RemoteServer.start ── POST /start/<place> ─────► EngineHost ── SglangServer.start ──► SGLang
    RemoteServer.running ◄─ GET /status, every s ─── EngineHost
    EngineClient ── /generate, weights, probes ──────────────────────────────────────────► SGLang

The process is the leader of a trainer's machine, with a thread beside its training, or ``mua engines`` on a machine
without a trainer (mua/engine/joining.py). Only life and death go through the host; everything else goes straight to the
server. Both want the run's key. When the process ends, however it ends, its engines' guardians end the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from mua.config.schema import EngineConfig, ExperimentConfig
from mua.engine.server import SglangServer, engine_server
from mua.utils.errors import ConfigError, EngineError, one_line

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger(__name__)
_STATUS_SECONDS = 1.0
PATIENCE_SECONDS = 30.0
"""How long a host may stay silent before its engines count as dead; also what is added to an engine's deadlines."""


@dataclass(frozen=True, slots=True)
class Joining:
    """How other machines may join a run."""

    address: str
    """Of this machine, as they see it."""
    output: Path
    facts: Mapping[str, str] = field(repr=False)
    nodes: int = 0
    """So many are waited for at the start."""


@dataclass(frozen=True, slots=True)
class Hosts:
    """What rank 0 needs to use the engines of all machines."""

    api_key: str = field(repr=False)
    urls: tuple[str, ...] = ()
    """Of the trainer's machines 1, 2, ...: where the engines of each are looked after."""
    own: bool = True
    """Whether rank 0's machine has engines too."""
    first_gpu: int = 0
    """The first GPU there that is an engine's."""
    joining: Joining | None = None
    """How machines without a trainer join; None: they cannot."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of a run. Machine 0 is rank 0's."""

    own: int
    """This rank's machine."""
    leaders: tuple[int, ...]
    """Of each machine, the rank that looks after its engines: the one with local rank 0."""
    ranks: tuple[tuple[int, ...], ...] = ((0,),)
    """Of each machine its ranks in order of their local rank, which is the number of their GPU."""

    @property
    def several(self) -> bool:
        return len(self.leaders) > 1


def find_nodes(group: dist.ProcessGroup | None) -> Nodes:
    """Ask all ranks of ``group`` (all of the run; None for a single process). Collective.

    Reads what torchrun sets: LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK (or the rank divided by the local size).
    Raises :class:`ConfigError` when a machine has no local rank 0.
    """
    if group is None:
        return Nodes(0, (0,))
    import torch.distributed as dist

    from mua.utils.collective import gathered

    rank = dist.get_rank()
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    mine = (int(os.environ.get("GROUP_RANK", rank // local_size)), int(os.environ.get("LOCAL_RANK", rank)))
    found = gathered(mine, group)
    numbers = list(dict.fromkeys(node for node, _ in found))
    leaders = {node: rank for rank, (node, local) in enumerate(found) if local == 0}
    if missing := [node for node in numbers if node not in leaders]:
        raise ConfigError(f"machine {missing[0]} of the run has no process with LOCAL_RANK 0; check the launcher")
    local = {node: sorted((local, rank) for rank, (of, local) in enumerate(found) if of == node) for node in numbers}
    ranks = tuple(tuple(rank for _, rank in local[node]) for node in numbers)
    return Nodes(numbers.index(mine[0]), tuple(leaders[node] for node in numbers), ranks)


def authorised(key: str) -> Any:
    """aiohttp's middleware that lets only those pass who have ``key``."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), f"Bearer {key}".encode()):
            raise web.HTTPUnauthorized
        answer: web.StreamResponse = await handler(request)
        return answer

    return check


class EngineHost:
    """Starts and stops this machine's servers when rank 0 says so. Lives on a thread of its own until :meth:`close`.

    They are engines ``first`` and following of the run, and answer at ``address``, as this host does.
    """

    def __init__(self, config: ExperimentConfig, first: int, api_key: str, *, address: str, first_gpu: int = 0) -> None:
        self.told: dict[str, Any] | None = None
        """What rank 0 said when it had no more use for this machine: ``why``, and whether the run has ``finished``."""
        self._servers = [
            engine_server(
                config.engine,
                dtype=config.model.dtype,
                context_length=config.model.max_length,
                seed=config.seed,
                index=first + place,
                place=place,
                first_gpu=first_gpu,
                log_folder=config.output / "logs",
                host=address,
                api_key=api_key,
                fp32_lm_head=config.model.fp32_lm_head,
            )
            for place in range(config.engine.count)
        ]
        self._key = api_key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine host", daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(self._application(), access_log=None, handler_cancellation=True)

        async def serve() -> None:
            await self._runner.setup()
            await web.TCPSite(self._runner, address, 0).start()

        self._wait(serve(), PATIENCE_SECONDS)
        self.url = f"http://{address}:{self._runner.addresses[0][1]}"

    def close(self) -> None:
        """Stop the servers and the thread. Safe to call twice."""
        if self._loop.is_closed():
            return

        async def stop() -> None:
            await self._runner.cleanup()
            await asyncio.gather(*(server.stop() for server in self._servers))

        longest = max(server.stop_seconds for server in self._servers)
        self._wait(stop(), longest + PATIENCE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, None], seconds: float) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _application(self) -> web.Application:
        routes = web.RouteTableDef()

        def server_of(request: web.Request) -> SglangServer:
            place = request.match_info["place"]
            if not place.isdigit() or int(place) >= len(self._servers):
                raise web.HTTPNotFound
            return self._servers[int(place)]

        @routes.post("/start/{place}")
        async def start(request: web.Request) -> web.Response:
            server, asked = server_of(request), await request.json()
            try:
                await server.start(Path(asked["model_path"]))
            except EngineError as error:
                return web.json_response({"error": str(error)})
            return web.json_response({"url": server.url})

        @routes.post("/stop/{place}")
        async def stop(request: web.Request) -> web.Response:
            await server_of(request).stop()
            return web.json_response({})

        @routes.get("/status")
        async def status(request: web.Request) -> web.Response:
            return web.json_response({"running": [server.running for server in self._servers]})

        @routes.post("/end")
        async def end(request: web.Request) -> web.Response:
            self.told = await request.json()
            return web.json_response({})

        application = web.Application(middlewares=[authorised(self._key)])
        application.add_routes(routes)
        return application


class RemoteServer:
    """Engine ``index`` of the run, server ``place`` of the machine whose host is at ``url``.

    Implements :class:`mua.engine.member.Server`. Use it on one asyncio loop. ``where`` is the machine in messages.
    """

    def __init__(
        self, config: EngineConfig, url: str, api_key: str, *, index: int, place: int, log_folder: Path, where: str
    ) -> None:
        self.label = f"engine {index}"
        self.log_file: Path | None = log_folder / f"engine-{index}.log"
        self.url = ""
        self.running = False
        self.api_key = api_key
        self.abandoned = False
        """Whether the host is gone, or ends its servers itself."""
        self._config, self._place, self._host, self._where = config, place, url, where
        self._watch: asyncio.Task[None] | None = None

    async def start(self, model_path: Path) -> None:
        """See :meth:`mua.engine.server.SglangServer.start`; an unreachable host is an :class:`EngineError` too."""
        seconds = self._config.start_seconds + PATIENCE_SECONDS
        asked = {"model_path": str(model_path.resolve())}
        try:
            answer = await self._ask("POST", f"/start/{self._place}", seconds, asked)
        except (aiohttp.ClientError, TimeoutError) as error:
            host = f"its host {self._host} on {self._where}"
            raise EngineError(f"{self.label}: {host} did not start it: {one_line(error)}") from error
        if "error" in answer:
            raise EngineError(f"{self._where}: {answer['error']}")
        self.url, self.running = answer["url"], True

        async def observe() -> None:
            """Keep :attr:`running` true while the host says so, or has been silent for less than its patience."""
            loop = asyncio.get_running_loop()
            heard = loop.time()
            while self.running:
                await asyncio.sleep(_STATUS_SECONDS)
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    self.running = (await self._ask("GET", "/status", PATIENCE_SECONDS / 3))["running"][self._place]
                    heard = loop.time()
                self.running = self.running and loop.time() - heard < PATIENCE_SECONDS

        self._watch = asyncio.create_task(observe(), name=f"observe {self.label}")

    async def stop(self) -> None:
        """End the server; a host that does not answer is logged, for its engines end with it."""
        self.running = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self.abandoned:
            return
        try:
            await self._ask("POST", f"/stop/{self._place}", self._config.stop_seconds + PATIENCE_SECONDS)
        except (aiohttp.ClientError, TimeoutError) as error:
            _log.warning("%s: its host %s did not stop it: %s", self.label, self._host, one_line(error))

    async def _ask(self, method: str, path: str, seconds: float, body: Any = None) -> Any:
        key, timeout = {"Authorization": f"Bearer {self.api_key}"}, aiohttp.ClientTimeout(total=seconds)
        async with (
            aiohttp.ClientSession(headers=key, timeout=timeout, raise_for_status=True) as session,
            session.request(method, self._host + path, json=body) as response,
        ):
            return await response.json()
