"""A server behind a URL: streamable HTTP over connections that all sessions share, each message within its limit."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

from mua.config.mcp import McpServerConfig
from mua.environment.mcp.health import Flood, Health
from mua.environment.mcp.server_faults import ServerFaultKind
from mua.errors import one_line
from mua.masking import mask_credentials

SESSION_HEADER = "mcp-session-id"
_EVENTS = "text/event-stream"


class CappedBody(httpx2.AsyncByteStream):
    """A response's body, counted as it comes."""

    def __init__(self, body: httpx2.AsyncByteStream, health: Health, longest: int | None) -> None:
        """``longest``: bytes of the whole body; None for a stream of events, each of which the SDK limits."""
        self._body = body
        self._health = health
        self._longest = longest

    async def __aiter__(self) -> AsyncIterator[bytes]:
        total = 0
        async for chunk in self._body:
            total += len(chunk)
            try:
                self._health.budget.spend(chunk.count(b"\n\n") + chunk.count(b"\r\n\r\n"), len(chunk))
                if self._longest is not None and total > self._longest:
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
            response = await self._inner.handle_async_request(request)
        except httpx2.TransportError as error:
            health.lose(ServerFaultKind.CRASHED, f"no connection: {one_line(error)}", passing=True)
            raise
        if response.status_code >= 400 and request.method == "POST":
            health.status = response.status_code
        health.session_id = response.headers.get(SESSION_HEADER, health.session_id)
        if response.headers.get("content-encoding", "identity") != "identity":
            health.lose(ServerFaultKind.GARBAGE, "it compresses its answers, although it was told not to")
            raise httpx2.TransportError("compressed answer")
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        events = response.headers.get("content-type", "").startswith(_EVENTS)
        response.stream = CappedBody(response.stream, health, None if events else self._longest)
        return response

    async def aclose(self) -> None:
        """Nothing: other sessions use the connections."""


def connections(config: McpServerConfig) -> httpx2.AsyncHTTPTransport:
    """What all sessions with one server share."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=config.max_sessions)
    return httpx2.AsyncHTTPTransport(limits=limits, verify=config.url.startswith("https:"))  # certificates load slowly


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


def shown_url(config: McpServerConfig) -> str:
    """The address without credentials."""
    return mask_credentials(config.url)
