"""A server behind a URL: streamable HTTP over connections that all sessions share, each message within its limit."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from mua.config.environment import McpServerConfig
from mua.environment.mcp.health import Flood, Health, ServerFaultKind
from mua.utils.errors import ConfigError, one_line
from mua.utils.strict_json import JsonError, read_json

MOST_PIECES, SMALLEST_MEAN = 20_000, 16
"""How many pieces of a body may have fewer bytes in the mean: each costs the time of hundreds of bytes."""
SESSION_HEADER = "mcp-session-id"
_EVENTS = "text/event-stream"
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
HTTP_ERROR = -32999
"""The code of an HTTP error whose body is no error of JSON-RPC."""
_LONGEST_ERROR = 2000
"""Bytes that are read of the body of an HTTP error."""
_RECONNECT_MESSAGES = 20
"""What one more request for a stream counts as: 50 at once, then 10 per second."""


class CappedBody(httpx2.AsyncByteStream):
    """A response's body, counted as it comes."""

    def __init__(self, body: httpx2.AsyncByteStream, health: Health, longest: int, *, events: bool) -> None:
        """``longest``: bytes of the whole body, or of each event of a stream of ``events``."""
        self._body = body
        self._health = health
        self._longest = longest
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total, before, pieces, size = 0, b"", 0, 0
        async for chunk in self._body:
            total += len(chunk)
            pieces, size = pieces + 1, size + len(chunk)
            if not pieces % 100:  # what has come already is given without a turn for others
                await asyncio.sleep(0)
            ends = []
            if self._events:  # a blank line ends an event, also where chunks are cut within it
                seen = before + chunk
                ends = [end for found in _BLANK_LINE.finditer(seen) if (end := found.end()) > len(before)]
                total = len(seen) - ends[-1] if ends else total
                before = seen[max(ends[-1] if ends else 0, len(seen) - 3) :]
            try:
                self._health.budget.spend(len(ends), len(chunk))
                if pieces > MOST_PIECES and size < SMALLEST_MEAN * pieces:
                    raise Flood(f"its answers come in pieces of {size / pieces:.1f} bytes")
                if total > self._longest:
                    raise Flood(f"it sent a message of more than {self._longest} bytes (message_bytes)")
            except Flood as flood:
                self._health.lose(ServerFaultKind.FLOODED, str(flood))
                raise httpx2.StreamError(str(flood)) from None
            yield chunk

    async def aclose(self) -> None:
        await self._body.aclose()


class SessionTransport(httpx2.AsyncBaseTransport):
    """One session's view of the shared connections: limits what comes, and notes what the SDK does not tell."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, health: Health, message_bytes: int) -> None:
        self._inner = inner
        self._health = health
        self._longest = message_bytes

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        health = self._health
        if request.method == "POST":
            health.budget.asked()
        try:
            if request.method == "GET":  # the SDK takes up a stream that the server ends again and again, at its pace
                health.budget.spend(_RECONNECT_MESSAGES, 0)
            response = await self._inner.handle_async_request(request)
        except Flood as flood:
            health.lose(ServerFaultKind.FLOODED, f"it ends its streams without end: {flood}")
            raise httpx2.TransportError(str(flood)) from None
        except httpx2.TransportError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
                cause = cause.__cause__ or cause.__context__
            if cause is not None:
                hint = "set ca_file to the certificate of the authority that signed it, or correct the url"
                told = f"its certificate is not trusted: {cause.verify_message}; {hint}"
                health.lose(ServerFaultKind.REFUSED, told, passing=False)
            health.lose(ServerFaultKind.CRASHED, f"no connection: {one_line(error)}", passing=True)
            raise
        if response.status_code >= 400 and request.method == "POST":
            return await self._told(request, response)
        health.session_id = response.headers.get(SESSION_HEADER, health.session_id)
        if response.headers.get("content-encoding", "identity") != "identity":
            health.lose(ServerFaultKind.GARBAGE, "it compresses its answers, although it was told not to")
            raise httpx2.TransportError("compressed answer")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").startswith(_EVENTS)
        response.stream = CappedBody(response.stream, health, self._longest, events=events)
        return response

    async def _told(self, request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
        """An HTTP error as the answer of JSON-RPC to the request that met it, because it says nothing of others. Its
        ``data`` holds the ``status``; the SDK would tell neither."""
        said = bytearray()
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        async for chunk in response.stream:
            said += chunk[: _LONGEST_ERROR - len(said)]
            if len(said) >= _LONGEST_ERROR:
                break
        await response.aclose()
        try:
            asked, body = read_json(request.content), read_json(bytes(said))
        except JsonError:
            asked, body = read_json(request.content), {}
        if "id" not in asked:  # a notification, which is not answered
            return httpx2.Response(202)
        error = body.get("error") if isinstance(body, dict) else None
        error = error if isinstance(error, dict) else {"message": error}
        told = {
            "code": code if isinstance(code := error.get("code"), int) else HTTP_ERROR,
            "message": str(error.get("message") or said.decode(errors="replace"))[:_LONGEST_ERROR],
            "data": {"status": response.status_code},
        }
        return httpx2.Response(200, json={"jsonrpc": "2.0", "id": asked["id"], "error": told})

    async def aclose(self) -> None:
        """Nothing: other sessions use the connections."""


def connections(config: McpServerConfig) -> httpx2.AsyncHTTPTransport:
    """What all sessions with one server share. Raises :class:`ConfigError` for a ``ca_file`` that is none."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=config.max_sessions)
    verify: ssl.SSLContext | bool = config.url.startswith("https:")  # certificates load slowly
    if config.ca_file is not None:
        try:
            verify = ssl.create_default_context(cafile=config.ca_file)
        except OSError as error:  # of which SSLError is one
            raise ConfigError(
                f"environment.mcp, server {config.name!r}: ca_file {config.ca_file}: {error.strerror or error}; name a "
                "file of certificates in PEM form"
            ) from None
    return httpx2.AsyncHTTPTransport(limits=limits, verify=verify)


@asynccontextmanager
async def http_streams(
    config: McpServerConfig, health: Health, shared: httpx2.AsyncHTTPTransport
) -> AsyncIterator[tuple[Any, Any]]:
    """The messages of one session: the streams to read from and to write to."""
    headers = {name: value.get_secret_value() for name, value in config.headers.items()}
    # Reading has no deadline here: the stream of notifications is silent for long, and calls have their own.
    timeout = httpx2.Timeout(None, connect=config.start_seconds, write=config.call_seconds)
    async with httpx2.AsyncClient(
        transport=SessionTransport(shared, health, config.message_bytes),
        headers=headers | {"accept-encoding": "identity"},
        timeout=timeout,
        trust_env=False,
    ) as client:
        opened = streamable_http_client(config.url, http_client=client, max_sse_event_size=config.message_bytes)
        async with opened as streams:
            yield streams
