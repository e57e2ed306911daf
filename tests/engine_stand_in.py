"""A small real HTTP server in place of SGLang: it answers control requests, hangs or dies when told to.

What it cannot show is how SGLang itself behaves; see ``test_engine_faults.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from megatron_bridge.plan import TensorSpec
from megatron_bridge.reshard import lay_out
from mua.config.schema import EngineConfig
from mua.engine.engine_handle import EngineHandle, EnginePlace
from mua.engine.pool import EnginePool
from mua.engine.weight_transfer import WeightBucket, WeightGenerator
from mua.utils.errors import EngineError
from mua.utils.ports import LOOPBACK

KEY = "stand-in"


class StandInServer:
    """Implements :class:`mua.engine.engine_handle.Server`. ``asked`` are the paths of all requests of all its lives."""

    api_key = KEY

    def __init__(self, index: int = 0) -> None:
        self.label = f"engine {index}"
        self.log_file: Path | None = Path(f"engine-{index}.log")
        self.url = ""
        self.running = False
        self.lives = 0
        self.asked: list[str] = []
        self.starts = True
        """Whether the next start succeeds."""
        self.on_request: Callable[[str, int], str | None] = lambda path, life: None
        """Called with the path and the number of the life: "die", "hang" or nothing."""
        self.generated: dict[str, Any] | None = None
        """What ``/generate`` answers, once :attr:`hold` is set; made by the version that was loaded last."""
        self.seconds = 0.0
        """That ``/generate`` takes."""
        self.version = "0"
        self.hold = asyncio.Event()
        self.hold.set()
        self._runner: web.AppRunner | None = None
        self._ended = asyncio.Event()

    async def start(self, model_path: Path) -> None:
        self.lives += 1
        self.version = "0"
        if not self.starts:
            raise EngineError("it does not start")
        self._ended.clear()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, LOOPBACK, 0)
        await site.start()
        self.url = f"http://{LOOPBACK}:{self._runner.addresses[0][1]}"
        self.running = True

    async def stop(self) -> None:
        self.running = False
        self._ended.set()
        self.hold.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    @property
    def controls(self) -> list[str]:
        """The paths of :attr:`asked` without the watch's probes."""
        return [path for path in self.asked if path not in ("/model_info", "/health_generate")]

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        fault = self.on_request(request.path, self.lives)
        if fault == "hang":
            await self._ended.wait()
        if fault == "die":
            self.running = False
            assert request.transport is not None
            request.transport.abort()
        if request.path == "/update_weights_from_tensor":
            self.version = (await request.json()).get("weight_version", self.version)
        if request.path == "/generate" and self.generated is not None:
            began = self.version
            await self.hold.wait()
            await asyncio.sleep(self.seconds)
            meta = self.generated["meta_info"] | {"weight_version": began}
            return web.json_response(self.generated | {"meta_info": meta})
        return web.json_response({"success": True})


class Source:
    """Weights of four small tensors; counts how often they were asked for."""

    def __init__(self) -> None:
        self.moved = self.needed = self.made = 0

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        self.made += 1
        for number in range(4):
            (layout,) = lay_out([TensorSpec(f"t{number}", (8,), torch.float32)], 4096)
            yield WeightBucket(layout, [["handle"]] * len(engines))


def stand_in_pool(servers: Sequence[StandInServer], **changes: object) -> EnginePool:
    """A pool over ``servers``, not started. It probes every 50 ms."""
    fields = {"count": len(servers), "health_seconds": 0.05, "memory_saver": True} | changes
    config = EngineConfig.model_validate(fields)
    pool = EnginePool(config, dtype="float32", context_length=64, seed=1, log_folder=Path("."))
    pool._engines = [EngineHandle(server, 4) for server in servers]
    return pool
