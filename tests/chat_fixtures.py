"""An OpenAI-compatible endpoint on a real port whose replies are a function of the request."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from mua.types import Json

Reply = Callable[[Json], Any]


class ChatServer:
    """``reply`` gets the request's body and gives an assistant message or a whole response, now or later."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[Json] = []
        self.keys: list[str] = []
        self.base_url = ""

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        answer = self.reply(body)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer if isinstance(answer, web.Response) else completion(answer)


def completion(message: Json, finish: str | None = None, usage: Json | None = None) -> web.Response:
    """A chat completion with one choice."""
    reason = finish or ("tool_calls" if message.get("tool_calls") else "stop")
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}],
        "usage": usage or {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
    }
    return web.json_response(body)


def says(text: str, **more: Any) -> Json:
    return {"content": text, **more}


def calls(*wanted: tuple[str, Json | str], text: str | None = None, **more: Any) -> Json:
    """A message with native tool calls; arguments that are a text go out as they are."""
    return {
        "content": text,
        "tool_calls": [
            {
                "id": f"id-{index}-{name}",
                "type": "function",
                "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
            }
            for index, (name, given) in enumerate(wanted)
        ],
        **more,
    }


def in_order(*messages: Json | web.Response) -> Reply:
    """The given messages, one a request."""
    left = list(messages)
    return lambda body: left.pop(0)


def held_back(reply: Reply, when: Callable[[], bool]) -> Reply:
    """``reply``, but requests that come while ``when`` holds wait until it no longer does."""

    async def held(body: Json) -> Any:
        while when():
            await asyncio.sleep(0.01)
        return reply(body)

    return held


@asynccontextmanager
async def chat_server(reply: Reply) -> AsyncIterator[ChatServer]:
    server = ChatServer(reply)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    server.base_url = f"http://127.0.0.1:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextmanager
def chat_server_beside(reply: Reply) -> Iterator[ChatServer]:
    """A :func:`chat_server` in a thread of its own, for what blocks this one."""
    with ThreadPoolExecutor(1) as threads:
        made: Future[ChatServer] = Future()
        loop, done = asyncio.new_event_loop(), asyncio.Event()

        async def serve() -> None:
            async with chat_server(reply) as server:
                made.set_result(server)
                await done.wait()

        serving = threads.submit(loop.run_until_complete, serve())
        try:
            yield made.result(30)
        finally:
            loop.call_soon_threadsafe(done.set)
            serving.result(30)
            loop.close()
