"""The HTTP side: OpenAI's chat completions, and what an episode offers its agent. One server a run.

========================================= ==========================================================================
``POST /v1/chat/completions``             a turn of the policy, whole or as server-sent events
``POST /v1/responses``                    the same in the form of OpenAI's responses
``GET /v1/models``                        one model, ``policy``
``GET /v1/episode``                       the task: instructions, first message of the user, tools
``POST /v1/episode/user``                 ``{"text": …}`` is told to the user; answers its words and whether it stops
``POST /v1/episode/tools/NAME``           ``{"arguments": {…}}`` calls a tool of the domain
``POST /v1/episode/report``               ``{"reward": …, "success": …}``, where ``agent.reward`` is report
``POST /v1/episode/mcp``                  the domain's tools over MCP (streamable HTTP)
========================================= ==========================================================================

The session's key stands in ``Authorization: Bearer`` or in the path, ``/session/KEY/v1/…``. Anything but the key of
a living session is answered 401 and touches nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import orjson
from aiohttp import web

import mua
from mua.config.rollout import AgentConfig
from mua.rollout.gateway.chat_calls import (
    PIECE,
    ChatCall,
    Refused,
    ServedTurn,
    chat_call,
    read_object,
    require,
    response_body,
    response_call,
    response_events,
)
from mua.rollout.gateway.session import GatewaySession
from mua.types import Json
from mua.utils.errors import MuaError

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
SessionHandler: TypeAlias = Callable[[web.Request, GatewaySession], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)
RETRY_HEADER = "x-stainless-retry-count"
"""How OpenAI's libraries say that they send a request again: 0, 1, 2."""
OVERRIDDEN_HEADER = "x-mua-overridden"
"""Names the keys of a request whose wish it does not get."""
MCP_SESSION = "Mcp-Session-Id"


class GatewayServer:
    """Serves sessions that are opened and closed by their episodes. Belongs to one event loop."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.url = ""
        """``http://HOST:PORT``, once started."""
        self._sessions: dict[str, GatewaySession] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._more: list[tuple[str, str, Handler]] = []

    async def start(self) -> None:
        """Listen; further calls do nothing."""
        async with self._starting:
            if self._runner is not None:
                return
            runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, self.config.host, self.config.port)
            await site.start()
            self._runner = runner
            self.url = f"http://{self.config.host}:{runner.addresses[0][1]}"

    async def close(self) -> None:
        for key in list(self._sessions):
            await self.close_session(key)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def add_route(self, method: str, path: str, handler: Handler) -> None:
        """Serve something beside sessions; before the start."""
        self._more.append((method, path, handler))

    def open_session(self, session: GatewaySession) -> str:
        """A key for ``session``; 256 bits, nobody guesses it."""
        key = f"mua-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        return key

    async def close_session(self, key: str) -> None:
        """From now on the key is unknown."""
        await self._sessions.pop(key).close()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=self.config.max_request_bytes, middlewares=[_as_openai])
        for added in self._more:
            application.router.add_route(*added)

        def serve(method: str, path: str) -> Callable[[SessionHandler], None]:
            """Serve what follows at ``path``, with the session's key in a header or in the path."""

            def add(answer: SessionHandler) -> None:
                async def handler(request: web.Request) -> web.StreamResponse:
                    scheme, _, told = request.headers.get("Authorization", "").partition(" ")
                    told = told.strip() if scheme.lower() == "bearer" else ""
                    key = request.match_info.get("key") or told
                    session = self._sessions.get(key)
                    if session is None or (told.startswith("mua-") and told != key):
                        raise Refused(401, "no session has this key", "invalid_api_key")
                    session.heard()
                    return await answer(request, session)

                application.router.add_route(method, path, handler)
                application.router.add_route(method, "/session/{key}" + path, handler)

            return add

        @serve("POST", "/v1/chat/completions")
        async def chat(request: web.Request, session: GatewaySession) -> web.StreamResponse:
            raw = await request.read()
            call = chat_call(read_object(raw), raw, self.config.sampling)
            turn = await session.answer(call, retried=_retried(request))
            if call.stream:
                chunks = [b"data: " + orjson.dumps(chunk) for chunk in _chunks(turn, call.model, usage=call.usage)]
                return await _deliver(request, session, call, turn, [*chunks, b"data: [DONE]"])
            message = turn.message | {"content": turn.message["content"] or None, "refusal": None}
            choice = {"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": None}
            about = {"id": f"chatcmpl-{turn.number}", "object": "chat.completion", "created": turn.created}
            body = about | {"model": call.model, "choices": [choice], "usage": _usage(turn)}
            return await _deliver(request, session, call, turn, body)

        @serve("POST", "/v1/responses")
        async def response(request: web.Request, session: GatewaySession) -> web.StreamResponse:
            call = response_call(await request.read(), self.config.sampling)
            turn = await session.answer(call, retried=_retried(request))
            if not call.stream:
                return await _deliver(request, session, call, turn, response_body(turn, call))
            events = response_events(turn, call)
            lines = [b"event: " + event["type"].encode() + b"\ndata: " + orjson.dumps(event) for event in events]
            return await _deliver(request, session, call, turn, lines)

        @serve("GET", "/v1/models")
        async def models(request: web.Request, session: GatewaySession) -> web.Response:
            policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "mua"}
            return _json({"object": "list", "data": [policy]})

        @serve("GET", "/v1/episode")
        async def task(request: web.Request, session: GatewaySession) -> web.Response:
            return _json(session.host.task())

        @serve("POST", "/v1/episode/user")
        async def user(request: web.Request, session: GatewaySession) -> web.Response:
            text = read_object(await request.read()).get("text")
            require(isinstance(text, str), "text: what the user is told, a string", "text")
            return _json(await session.host.tell_user(str(text)))

        @serve("POST", "/v1/episode/tools/{name}")
        async def tool(request: web.Request, session: GatewaySession) -> web.Response:
            body, name = read_object(await request.read()), request.match_info["name"]
            arguments, call_id = body.get("arguments", {}), body.get("call_id")
            require(isinstance(arguments, dict), "arguments: must be a JSON object", "arguments")
            require(call_id is None or isinstance(call_id, str), "call_id: must be a string", "call_id")
            if call_id is None:
                return _json(await session.host.call_tool(name, arguments))
            asked = {"name": name, "arguments": arguments}
            work = partial(session.host.call_tool, name, arguments)
            return _json(await session.do_once(("tool", call_id), asked, work))

        @serve("POST", "/v1/episode/report")
        async def report(request: web.Request, session: GatewaySession) -> web.Response:
            session.host.report(read_object(await request.read()))
            return _json({"taken": True})

        @serve("*", "/v1/episode/mcp")
        async def mcp(request: web.Request, session: GatewaySession) -> web.Response:
            if request.method != "POST":
                raise web.HTTPMethodNotAllowed(request.method, ["POST"])
            message, client = read_object(await request.read()), request.headers.get(MCP_SESSION, "")
            answer = await answer_mcp(message, session, client)
            if answer is None:
                return web.Response(status=202)
            told = _json(answer)
            if message.get("method") == "initialize":  # ids of another client are others
                session.forget("mcp", "")
                told.headers[MCP_SESSION] = secrets.token_hex(16)
            return told

        return application


def _retried(request: web.Request) -> bool:
    return request.headers.get(RETRY_HEADER, "0") not in ("", "0")


async def _deliver(
    request: web.Request, session: GatewaySession, call: ChatCall, turn: ServedTurn, body: Json | Sequence[bytes]
) -> web.StreamResponse:
    """Write the turn, whole or as server-sent events, and note whether its client was there to get it."""
    keys = ", ".join(re.sub(r"[^\w.-]", "?", key, flags=re.ASCII) for key in call.overridden)
    told = {OVERRIDDEN_HEADER: keys} if keys else {}
    if isinstance(body, dict):
        response: web.StreamResponse = _json(body)
        response.headers.update(told)
        await response.prepare(request)
    else:
        events = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=events | told)
        await response.prepare(request)
        for event in body:
            await response.write(event + b"\n\n")
    await response.write_eof()
    if request.transport is not None and not request.transport.is_closing():
        session.received(turn)
    return response


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


@web.middleware
async def _as_openai(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except Refused as refused:
        return _json(refused.body(), refused.status)
    except web.HTTPRequestEntityTooLarge:
        larger = Refused(413, "agent.max_request_bytes: the request is larger", "request_too_large")
        return _json(larger.body(), 413)
    except web.HTTPException as error:
        return _json(Refused(error.status, f"{request.method} {request.path}: {error.reason}").body(), error.status)
    except MuaError as error:  # the episode has it too, and ends by it
        return _json(Refused(503, str(error), "episode_fault").body(), 503)
    except asyncio.CancelledError:
        if request.transport is None or request.transport.is_closing():
            raise
        return _json(Refused(401, "this session is over", "invalid_api_key").body(), 401)
    except ConnectionError:
        raise
    except Exception:
        log.exception("the gateway failed at %s %s", request.method, request.path.replace("\n", " ")[:80])
        return _json(Refused(500, "the gateway failed; its log says how", "internal_error").body(), 500)


def _usage(turn: ServedTurn) -> Json:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.sampled_tokens,
        "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def _chunks(turn: ServedTurn, model: str, *, usage: bool) -> list[Json]:
    """The events of a stream. The turn is sampled whole before the first: a parser of calls needs its end."""
    base = {"id": f"chatcmpl-{turn.number}", "object": "chat.completion.chunk", "created": turn.created, "model": model}
    message = turn.message
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    for key in ("reasoning_content", "content"):
        text = message.get(key) or ""
        deltas += [{key: text[at : at + PIECE]} for at in range(0, len(text), PIECE)]
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(message.get("tool_calls", ()))]
    chunks: list[Json] = [
        {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None}]} for delta in deltas
    ]
    chunks.append({**base, "choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish, "logprobs": None}]})
    return chunks + ([{**base, "choices": [], "usage": _usage(turn)}] if usage else [])


_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
_NO_METHOD, _BAD_REQUEST, _BAD_PARAMETERS = -32601, -32600, -32602


async def answer_mcp(message: Json, session: GatewaySession, client: str = "") -> Json | None:
    """The answer to one JSON-RPC message of a ``client``; None for a notification. A call is executed once, however
    often its client sends its id.

    The server's half of MCP over streamable HTTP, one JSON answer a request and no state. By hand, because the session
    is the gateway's: the SDK's server is an ASGI application with sessions and a lifetime of its own, and what an agent
    needs of it are these four methods. Clients of the SDK speak to it in the tests.
    """
    method, number, host = message.get("method"), message.get("id"), session.host
    if number is None:
        return None
    parameters = message.get("params") if isinstance(message.get("params"), dict) else {}
    assert isinstance(parameters, dict)
    name, arguments = parameters.get("name"), parameters.get("arguments") or {}
    if not isinstance(number, str) and (type(number) not in (int, float) or abs(number) >= 2**53):
        number, method = None, None
    result: Json | None = None
    fault = _NO_METHOD, f"the method {str(method)[:40]!r} is not served"
    if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
        fault = _BAD_REQUEST, "a request of JSON-RPC 2.0 with a method"
    elif method == "initialize":
        asked = parameters.get("protocolVersion")
        version = asked if asked in _VERSIONS else _VERSIONS[0]
        about = {"name": "mua", "version": mua.__version__}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    elif method == "ping":
        result = {}
    elif method == "tools/list":
        tools = host.tools()
        schemas = [{"name": t.name, "description": t.description, "inputSchema": t.parameters} for t in tools]
        result = {"tools": schemas}
    elif method == "tools/call" and isinstance(name, str) and isinstance(arguments, dict):
        try:
            work = partial(host.call_tool, name, arguments)
            told = await session.do_once(("mcp", client, type(number), number), parameters, work)
        except Refused as refused:
            told = {"text": f"error: {refused}", "error": True}
        result = {"content": [{"type": "text", "text": told["text"]}], "isError": told["error"]}
    elif method == "tools/call":
        fault = _BAD_PARAMETERS, "tools/call needs a name and arguments (an object)"
    answer: Json = {"jsonrpc": "2.0", "id": number}
    if result is None:
        return answer | {"error": {"code": fault[0], "message": fault[1]}}
    return answer | {"result": result}
