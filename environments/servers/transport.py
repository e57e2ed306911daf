"""Connections for pages: a host's addresses are checked in the same step that connects to one of them.

::

    httpx.Request ──► CheckedTransport ──► pool ──► CheckedBackend: resolve, check all, connect to a number

Nothing resolves the name a second time, so an answer of the DNS that changes between the check and the connection
(rebinding) changes nothing. Certificates are verified against the host's name. A kept connection serves only the host
and port that it was made for.

Through a proxy (``pages.proxy``) it is the proxy that connects, to what the name means to it: then the addresses that
are known here are checked before each request, unless ``pages.proxy_resolves`` leaves that to the proxy.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import httpcore
import httpx

from environments.servers.hosts import HostRules
from environments.servers.page_text import PageError
from mua.utils.errors import EnvironmentFault
from mua.utils.strict_json import printable

_Stream: TypeAlias = httpcore.AsyncNetworkStream
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""The numeric addresses of a host; raises OSError."""
_TRIED = 4
"""Addresses of one host that are connected to, one after the other."""
_RESOLVERS = 32
_PORTS = {"http": 80, "https": 443}


class SystemResolver:
    """The machine's own resolver, in threads of its own: a slow name server holds up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await loop.run_in_executor(self._threads, look_up)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    def close(self) -> None:
        """Let the threads go, once their look-ups have ended."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class AddressLookup:
    """Looks hosts up and checks what is found."""

    def __init__(self, rules: HostRules, resolve: Resolve) -> None:
        self._rules = rules
        self._resolve = resolve

    async def addresses(self, host: str, port: int) -> list[str]:
        """All addresses of ``host``, each of which may be connected to. Raises :class:`PageError`."""
        name = host.lower().removesuffix(".")
        try:
            found = await self._resolve(name, port)
        except (OSError, UnicodeError):
            found = ()
        if not found:
            raise PageError(f"no host {name} is known")
        return self._rules.check_addresses(name, port, found)


class CheckedBackend(httpcore.AnyIOBackend):
    """Connects to addresses that the rules allow."""

    def __init__(self, checked: AddressLookup) -> None:
        self._checked = checked

    async def connect_tcp(self, host: str, port: int, timeout: float | None = None, *rest: Any, **how: Any) -> _Stream:
        addresses = (await self._checked.addresses(host, port))[:_TRIED]
        until = None if timeout is None else monotonic() + timeout
        for place, address in enumerate(addresses):
            left = None if until is None else max(0.001, (until - monotonic()) / (len(addresses) - place))
            try:
                return await super().connect_tcp(address, port, left, *rest, **how)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                if place + 1 == len(addresses):
                    raise
        raise AssertionError("there is an address")


class ProxyBackend(httpcore.AnyIOBackend):
    """Connects to the proxy alone: where that fails, no page and no policy is to blame."""

    def __init__(self, shown: str) -> None:
        """``shown``: the proxy in messages."""
        self._shown = shown

    async def connect_tcp(self, *target: Any, **how: Any) -> _Stream:
        try:
            return await super().connect_tcp(*target, **how)
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise EnvironmentFault(f"pages.proxy {self._shown}: no connection: {error}") from None


class CheckedTransport(httpx.AsyncBaseTransport):
    """Connections of one reader. Belongs to one event loop. Refusals are :class:`PageError`."""

    def __init__(self, rules: HostRules, resolve: Resolve, proxy: str = "", *, proxy_resolves: bool = False) -> None:
        checked, self._proxied = AddressLookup(rules, resolve), bool(proxy)
        self._ask_first = None if proxy_resolves or not proxy else checked
        kept: dict[str, Any] = {
            "ssl_context": httpx.create_ssl_context(), "max_connections": None, "max_keepalive_connections": 64,
            "keepalive_expiry": 15.0,
        }  # fmt: skip
        if proxy:
            parts = urlsplit(proxy)
            login = (unquote(parts.username or ""), unquote(parts.password or "")) if parts.username else None
            address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
            self._pool: httpcore.AsyncConnectionPool = httpcore.AsyncHTTPProxy(
                address, proxy_auth=login, network_backend=ProxyBackend(address), **kept
            )
        else:
            self._pool = httpcore.AsyncConnectionPool(network_backend=CheckedBackend(checked), **kept)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if self._ask_first is not None:
            await self._ask_first.addresses(url.host, url.port or _PORTS[url.scheme])
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=request.extensions,
        )
        try:
            answer = await self._pool.handle_async_request(asked)
        except httpcore.ProxyError as error:
            self._refused(str(error))
            raise PageError(f"the proxy refused to connect: {printable(str(error), 100)}") from None
        self._refused(str(answer.status))
        assert isinstance(answer.stream, AsyncIterable)
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer.stream))

    def _refused(self, status: str) -> None:
        """What a proxy says that wants another name and password is about the configuration, not about a page."""
        if self._proxied and status.startswith("407"):
            raise EnvironmentFault(
                "pages.proxy asks for a name and password (407); write http://NAME:PASSWORD@HOST:PORT"
            )

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
