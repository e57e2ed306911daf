"""A machine that gives engines, beside a rank 0 that falls silent: with ``rejoin`` it comes back to the same run.

Rank 0 is a stand-in that speaks its protocol; no engine starts. Real ones: tests/e2e/test_separate.py.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.engine import remote_worker
from mua.engine.cluster import ADDRESS_FILE, Address
from mua.utils.errors import RankLost
from mua.utils.ports import LOOPBACK, free_port

ROOT = Path(__file__).resolve().parents[2]
KEY = "a key"


class RankZero:
    """Answers in a thread of its own; falls silent after the first sign of life, once, and ends the run later."""

    def __init__(self, output: Path) -> None:
        self.output, self.registered, self.hosts = output, 0, list[str]()
        self.silent, self.over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._up = threading.Event()

    def __enter__(self) -> RankZero:
        self._thread.start()
        assert self._up.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join(30)

    async def _serve(self) -> None:
        app = web.Application()
        app.add_routes([web.post("/{what}", self._answer)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        port = free_port(LOOPBACK)
        await web.TCPSite(runner, LOOPBACK, port).start()
        url = f"http://{LOOPBACK}:{port}"
        Address(url, KEY, "the run", "here", os.getpid(), "now").write(self.output / ADDRESS_FILE)
        self._up.set()
        while not self.over.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        what = request.match_info["what"]
        if what == "register":
            self.registered += 1
            return web.json_response({"first": 1})
        if what == "ready":
            self.hosts.append((await request.json())["url"])
        if what == "alive" and self.registered == 1:
            self.silent.set()
            await asyncio.sleep(60)
        if what == "alive" and self.registered == 2:
            await self._end()
        return web.json_response({})

    async def _end(self) -> None:
        headers: dict[str, Any] = {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            await session.post(f"{self.hosts[-1]}/end", json={"why": "the run has ended", "finished": True})


@pytest.fixture
def config(tmp_path: Path) -> ExperimentConfig:
    (tmp_path / ADDRESS_FILE).parent.mkdir(parents=True)
    separate = ["placement=separate", "engine.nodes=1", "trainer.max_staleness=1", "algorithm.old_logprobs=engine"]
    model = f"model.path={ROOT / 'tools/base'}"
    return load_config(
        ROOT / "configs/demo.yaml", [f"output={tmp_path}", model, *separate, "trainer.silence_seconds=1"]
    )


def test_a_run_that_was_silent_for_a_while_is_joined_again(config: ExperimentConfig, tmp_path: Path) -> None:
    with RankZero(tmp_path) as rank0:
        remote_worker.give_engines(config, lambda: False, address=LOOPBACK, rejoin=True)
    assert rank0.silent.is_set()
    assert rank0.registered == 2


def test_without_rejoin_its_silence_is_the_end(config: ExperimentConfig, tmp_path: Path) -> None:
    with RankZero(tmp_path) as rank0, pytest.raises(RankLost, match="no sign of life for 1 s"):
        remote_worker.give_engines(config, lambda: False, address=LOOPBACK)
    assert rank0.registered == 1
