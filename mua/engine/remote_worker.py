"""``mua engines``: a machine without a trainer gives its engines to a run. Rank 0's side: mua/engine/cluster.py.

    wait for the address file ─► register ─► RemoteWorker: engines start, are filled and asked by rank 0
         ▲                                        │ rank 0 says that the run has ended ──► status 0
         └────── (--rejoin) the run is lost ◄─────┤ rank 0 is silent, or ended too soon ─► status 75
                                                  └ SIGTERM, SIGUSR1: drained, then gone ─► status 75

The process holds no lock of the output folder and writes nothing into it but its engines' logs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from mua.config.schema import ExperimentConfig
from mua.engine.cluster import ADDRESS_FILE, Address, address_towards, check_engine_machine, facts_of, visible_gpus
from mua.engine.server import PATIENCE_SECONDS, SglangServer, engine_server, request_json, serve
from mua.utils.errors import ConfigError, EngineError, Preempted, RankLost, one_line

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
_ALIVE_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_KEY_SECONDS = 5.0
"""A key that is refused for so long is wrong, and not that of a file which is just being replaced."""


def give_engines(
    config: ExperimentConfig, leave: Callable[[], bool], *, address: str | None = None, rejoin: bool = False
) -> None:
    """Give this machine's engines to the run that writes into ``config.output``, until it ends.

    Args:
        leave: whether somebody wants the machine back.
        address: of this machine, as the run sees it; None: the one that it is reached from.
        rejoin: when rank 0 is lost, wait until it answers again or the same run is started again, instead of ending.

    Raises:
        ConfigError: the run was configured otherwise, or the machine's GPUs do not fit.
        EngineError: there was no run within ``engine.start_seconds``.
        RankLost: rank 0 ended before the run was finished, or was silent for ``trainer.silence_seconds``.
        Preempted: the machine left because it was asked to.
    """
    if config.placement != "separate":
        raise ConfigError("mua engines needs placement: separate; with colocated the trainer starts its engines itself")
    check_engine_machine(config, visible_gpus())
    while True:
        member = _Membership(config, leave, address)
        try:
            asyncio.run(member.serve())
            return
        except RankLost as error:
            if not rejoin:
                raise
            _log.warning("%s; waiting for the run to answer, or to be started again", error)
            time.sleep(_ALIVE_SECONDS)  # a rank 0 that answers and has no use for this machine is not asked without end


class _WrongKey(aiohttp.ClientError):
    """Whoever answers has another key."""


class _Membership:
    """One membership, from the wait for the address to the end."""

    def __init__(self, config: ExperimentConfig, leave: Callable[[], bool], address: str | None) -> None:
        self._config, self._leave, self._own = config, leave, address
        self._file = config.output / ADDRESS_FILE
        self._name = f"{socket.gethostname()}:{os.getpid()}"
        self._first = 0

    async def serve(self) -> None:
        """Until the run has ended."""
        rank0 = await self._join()
        url = urlsplit(rank0.url)
        own = self._own or address_towards(str(url.hostname), url.port or 1)
        # It answers on a thread of its own, so that this one may do what takes time.
        host = RemoteWorker(self._config, self._first, rank0.key, address=own)
        try:
            try:
                status, _ = await self._post(rank0, "/ready", {"url": host.url}, _ANSWER_SECONDS)
            except (aiohttp.ClientError, TimeoutError) as error:
                raise RankLost(f"rank 0 at {rank0.url} is gone: {one_line(error)}") from None
            if status != HTTPStatus.OK:
                raise RankLost(f"rank 0 at {rank0.url} answered /ready with {status}")
            await self._live(rank0, host)
        finally:
            await asyncio.to_thread(host.close)

    # ---- joining

    async def _join(self) -> Address:
        """Wait for a run and register with it. A run that was lost may be there still, silent for a while.

        Raises :class:`ConfigError` when the run is configured otherwise.
        """
        seconds = self._config.engine.start_seconds
        began, refused_since = monotonic(), None
        while True:
            if self._leave():
                raise Preempted("asked to leave by a signal before there was a run")
            address, found = Address.read(self._file), "it is not there"
            try:
                if address is not None:
                    asked = {"name": self._name, "count": self._config.engine.count, "facts": facts_of(self._config)}
                    status, answer = await self._post(address, "/register", asked, _ANSWER_SECONDS)
                    if status == HTTPStatus.CONFLICT:
                        raise ConfigError(
                            f"the run of {answer['output']} refuses this machine: {'; '.join(answer['differences'])}; "
                            "start mua engines with the run's own configuration, overrides and installation"
                        )
                    self._first = int(answer["first"])
                    return address
                refused_since = None
            except _WrongKey:
                now = monotonic()
                refused_since = refused_since or now
                found = f"the run at {address and address.url} refuses its key, so it is another run's"
                if now - refused_since > _KEY_SECONDS:
                    raise ConfigError(f"{self._file}: {found}; check output, and copy no address file") from None
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                writer = "" if address is None else f" (written by {address.writer})"
                found = f"it is stale: nobody answers there{writer}: {one_line(error)}"
            if monotonic() - began > seconds:
                raise EngineError(
                    f"{self._file}: {found}, and no run has come within engine.start_seconds = {seconds:g}; start "
                    "mua train with this configuration, and check that both see the same output folder"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    # ---- belonging

    async def _live(self, rank0: Address, host: RemoteWorker) -> None:
        """Give signs of life until there is a reason to stop; see :func:`give_engines` for what is raised."""
        patience, heard = self._config.trainer.silence_seconds, monotonic()
        leave_seconds = self._config.engine.leave_seconds
        said = 0.0
        while True:
            if host.told is not None:
                if host.told["finished"]:
                    _log.info("%s", host.told["why"])
                    return
                raise RankLost(str(host.told["why"]))
            if self._leave():
                _log.warning("leaving the run: requests have engine.leave_seconds = %g", leave_seconds)
                try:  # rank 0 takes the engines out, once what runs on them has ended or its time is over
                    why = {"why": "it was asked to by a signal"}
                    await self._post(rank0, "/leave", why, leave_seconds + PATIENCE_SECONDS)
                except (aiohttp.ClientError, TimeoutError) as error:
                    _log.warning("rank 0 was not told that this machine leaves: %s", one_line(error))
                raise Preempted("asked to leave by a signal; its engines have left the run")
            if (now := monotonic()) - said > _ALIVE_SECONDS:
                said = now
                try:
                    status, _ = await self._post(rank0, "/alive", {}, min(patience, _ANSWER_SECONDS))
                    if status == HTTPStatus.GONE and host.told is None:
                        raise RankLost("rank 0 does not know this machine any more")
                    heard = monotonic()
                except (aiohttp.ClientError, TimeoutError) as error:
                    if monotonic() - heard > patience:
                        raise RankLost(
                            f"rank 0 at {rank0.url} gave no sign of life for {patience:g} s (trainer.silence_seconds): "
                            f"{one_line(error)}; look at its log ({rank0.writer})"
                        ) from None
            await asyncio.sleep(_LOOK_SECONDS)

    async def _post(self, rank0: Address, path: str, body: Any, seconds: float) -> tuple[int, Any]:
        status, answer = await request_json(rank0.url + path, rank0.key, body, seconds=seconds, name=self._name)
        if status == HTTPStatus.UNAUTHORIZED:
            raise _WrongKey
        return status, answer


class RemoteWorker:
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
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine host", daemon=True)
        self._thread.start()
        self._runner, self.url = self._wait(serve(self._routes(), api_key, address), PATIENCE_SECONDS)

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

    def _wait(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def _routes(self) -> web.RouteTableDef:
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

        return routes
