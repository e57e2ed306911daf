"""Another local user against a running engine: no request without the key, and the key nowhere that user can look.

The session's shared engine. Not covered: ``mua serve`` (``tests/e2e/test_users_served.py``); the ports by which
SGLang's own processes find each other.
"""

from __future__ import annotations

import stat
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from key_support import answers_without, routes

from mua.config.schema import EngineConfig
from mua.engine.pool import EnginePool
from mua.engine.server import RemoteServer, SglangServer
from mua.utils.errors import EngineError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]


def server_of(pool: EnginePool) -> SglangServer:
    server = pool._engines[0].server
    assert isinstance(server, SglangServer)
    return server


async def test_nobody_without_the_key_is_answered(engine_pool: EnginePool) -> None:
    server = server_of(engine_pool)
    known = await routes(server.url, server.api_key)
    assert ("POST", "/update_weights_from_disk") in known
    assert ("POST", "/generate") in known
    assert len(known) > 80
    for header in (None, "Bearer ", "Bearer none", "Basic none"):
        assert await answers_without(server.url, known, header) == {}


async def test_a_websocket_is_refused(engine_pool: EnginePool) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{server_of(engine_pool).url}/v1/realtime")
    assert refused.value.status in (401, 403)  # uvicorn without its library for WebSockets takes it for a GET


async def test_the_key_is_nowhere_another_user_can_look(engine_pool: EnginePool) -> None:
    server = server_of(engine_pool)
    assert server._process is not None
    guardian = psutil.Process(server._process.pid)
    processes = [guardian, *guardian.children(recursive=True)]
    assert len(processes) >= 4
    for process in processes:
        assert server.api_key not in " ".join(process.cmdline())
        assert server.api_key not in " ".join(process.environ().values())
    assert server.log_file is not None
    log = server.log_file.read_text()
    assert "'api_key': '<redacted>'" in log, "SGLang says its arguments in another way"
    assert server.api_key not in log
    assert stat.S_IMODE(server.log_file.stat().st_mode) == 0o600
    for file in server.log_file.parent.iterdir():
        assert server.api_key not in file.read_text()
    headers = {"Authorization": f"Bearer {server.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{server.url}/server_info") as answer:
        told = await answer.text()
    assert '"launch_command"' in told
    assert server.api_key not in told, "not even to whoever has it"


async def test_a_host_that_refuses_does_not_bring_the_key_into_errors_and_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp's error of a refused request holds the headers that were sent, in its repr."""

    async def refuse(request: web.Request) -> web.Response:
        raise web.HTTPUnauthorized

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as host:
        url = str(host.make_url("")).rstrip("/")
        server = RemoteServer(
            EngineConfig(), url, "a-secret-key", index=1, place=0, log_folder=tmp_path, where="machine 1"
        )
        with pytest.raises(EngineError, match=" 401") as refused:
            await server.start(tmp_path)
        await server.stop()
    assert "did not stop it" in caplog.text
    assert " 401" in caplog.text
    assert "a-secret-key" not in str(refused.value) + caplog.text
