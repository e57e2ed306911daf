"""A chat endpoint on this machine that answers as a test says: well, badly or not at all, over real HTTP."""

from __future__ import annotations

import asyncio
import http.server
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from mua.config.schema import LlmConfig
from mua.environment.endpoint.services import ChatClient, Role

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Clock:
    """The machine's clock, which a test may put forward: timers of asyncio that are due then fire at once."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self._loop_time = asyncio.BaseEventLoop.time

    def __call__(self) -> float:
        return time.monotonic() + self.ahead

    def of_loop(self, loop: asyncio.BaseEventLoop) -> float:
        """What stands for the method ``time`` of every event loop."""
        return self._loop_time(loop) + self.ahead

    def forward(self, seconds: float, step: Handler) -> Handler:
        """``step``, but ``seconds`` pass as soon as the request is there."""

        async def handler(request: web.Request) -> web.StreamResponse:
            self.ahead += seconds
            return await step(request)

        return handler


class Server:
    """Answers request ``i`` with step ``i`` of a script; the last step repeats. Remembers what it received."""

    def __init__(self) -> None:
        self.script: list[Handler] = []
        self.received: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.queries: list[dict[str, str]] = []
        self.times: list[float] = []
        self.peers: set[object] = set()
        self.in_flight = self.most_in_flight = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.times.append(time.monotonic())
        self.headers.append(dict(request.headers))
        self.queries.append(dict(request.query))
        self.received.append(await request.json())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self.script[min(len(self.received), len(self.script)) - 1](request)
        finally:
            self.in_flight -= 1


@asynccontextmanager
async def serving(*script: Handler, path: str = "/v1/chat/completions") -> AsyncIterator[Server]:
    """A running server with this script for what is posted to ``path``, a pattern of aiohttp's."""
    server = Server()
    server.script = list(script)
    app = web.Application()
    app.router.add_post(path, server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def client_of(config: LlmConfig, role: Role = "user") -> AsyncIterator[ChatClient]:
    """A client of the endpoints of ``config``, which is closed in the end."""
    client = ChatClient(config, role)
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def asked(*script: Handler, role: Role = "user", **settings: Any) -> AsyncIterator[tuple[Server, ChatClient]]:
    """A running server with this script, and a client of it with these settings."""
    async with (
        serving(*script) as server,
        client_of(LlmConfig(base_url=server.url, model="m", **settings), role) as client,
    ):
        yield server, client


@contextmanager
def nobody() -> Iterator[str]:
    """``host:port`` where nobody listens; the port is held, so that nobody begins to."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@contextmanager
def answering(answer: Callable[[], tuple[int, bytes] | None]) -> Iterator[str]:
    """The address of a server with threads of its own, for tests without a loop: each request is given what ``answer``
    says then, a status and a body; with None it is hung up on."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if (given := answer()) is None:
                self.close_connection = True
                return
            self.send_response(given[0])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(given[1])))
            self.end_headers()
            self.wfile.write(given[1])

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def completion(text: object, calls: list[dict] | None = None, usage: tuple[int, int] | None = None) -> web.Response:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "finish_reason": "stop", "message": message}
    body: dict[str, Any] = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    if usage:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return web.json_response(body)


def says(text: object, *, usage: tuple[int, int] | None = None, seconds: float = 0.0) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return completion(text, usage=usage)

    return handler


def acts(*calls: tuple[str, object], text: str | None = None) -> Handler:
    """Tool calls; arguments that are no string are written as JSON."""
    listed = [
        {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": _written(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]

    async def handler(_: web.Request) -> web.StreamResponse:
        return completion(text, listed)

    return handler


def _written(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def fails(status: int, headers: dict[str, str] | None = None, body: str | None = None) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        text = body if body is not None else json.dumps({"error": {"message": "not today"}})
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")

    return handler


def together(count: int, step: Handler) -> Handler:
    """``step``, but nobody is answered before ``count`` requests have come, and more have had the time to."""
    all_here = asyncio.Barrier(count)

    async def handler(request: web.Request) -> web.StreamResponse:
        await all_here.wait()
        for _ in range(200):  # turns of the loop, which client and server share
            await asyncio.sleep(0)
        return await step(request)

    return handler


async def drops(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    return web.Response()


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


async def dribbles(request: web.Request) -> web.StreamResponse:
    """A byte now and then: no gap between bytes is long, but the answer never ends."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.01)


def raw(body: str, content_type: str = "application/json") -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text=body, content_type=content_type)

    return handler
