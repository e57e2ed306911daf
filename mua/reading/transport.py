"""Connections for pages: a host's addresses are checked in the same step that connects to one of them.

::

    httpx.Request ──► CheckedTransport ──► pool ──► CheckedBackend: resolve, check all, connect to a number

Nothing resolves the name a second time, so an answer of the DNS that changes between the check and the connection
(rebinding) changes nothing. Certificates are verified against the host's name. A kept connection serves only the host
and port that it was made for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeAlias

import httpcore
import httpx

from mua.reading.hosts import HostRules
from mua.reading.page_error import PageError

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""The numeric addresses of a host; raises OSError."""
_TRIED = 4
"""Addresses of one host that are connected to, one after the other."""
_RESOLVERS = 32


class SystemResolver:
    """The machine's own resolver, in threads of its own: a slow name server holds up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, _looked_up, host, port)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        """Let the threads go, once their look-ups have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to addresses that the rules allow."""

    def __init__(self, rules: HostRules, resolve: Resolve) -> None:
        self._rules = rules
        self._resolve = resolve
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        name = host.lower().removesuffix(".")
        try:
            found = await self._resolve(name, port)
        except (OSError, UnicodeError):
            found = ()
        if not found:
            raise PageError(f"no host {name} is known")
        addresses = self._rules.check_addresses(name, port, found)[:_TRIED]
        until = None if timeout is None else monotonic() + timeout
        for place, address in enumerate(addresses):
            left = None if until is None else max(0.001, (until - monotonic()) / (len(addresses) - place))
            try:
                return await self._inner.connect_tcp(
                    address, port, timeout=left, local_address=local_address, socket_options=socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if place + 1 == len(addresses):
                    raise
        raise AssertionError("there is an address")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class CheckedTransport(httpx.AsyncBaseTransport):
    """Connections of one reader. Belongs to one event loop. Refusals are :class:`PageError`."""

    def __init__(self, rules: HostRules, resolve: Resolve) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(),
            max_connections=None,
            max_keepalive_connections=64,
            keepalive_expiry=15.0,
            network_backend=CheckedBackend(rules, resolve),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        answer = await self._pool.handle_async_request(asked)
        assert isinstance(answer.stream, AsyncIterable)
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer.stream))

    async def aclose(self) -> None:
        await self._pool.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


def _looked_up(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
