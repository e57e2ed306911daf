"""One page of the web, within limits of bytes, time and redirects, each hop checked.

::

    fetch(url) ──► text of the URL checked ──► request ──► connection checked (transport) ──► status
                        ▲                                                                      │ redirect
                        └──────────────────────────────────────────────────────────────────────┘
                                            body: streamed, decompressed step by step, cut at ``page_bytes``

Nothing is kept from one page to the next: no cookie, no credential, no referrer.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal, TypeAlias

import httpcore
import httpx

from environments.servers.hosts import HostRules
from environments.servers.page_text import PageError
from environments.servers.transport import CheckedTransport, Resolve, SystemResolver
from environments.servers.web_settings import PagesConfig

Kind: TypeAlias = Literal["html", "text", "pdf"]
_HTML = re.compile(r"(text/html|application/xhtml\+xml)")
_TEXT = re.compile(r"text/[\w.+-]+|application/(json|xml|javascript|yaml|x-yaml|[\w.-]+\+(json|xml)|x-ndjson|toml)")
_CHARSET = re.compile(r'charset\s*=\s*["\']?([^\s"\';]+)', re.IGNORECASE)
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_STEP = 2**16
_MOST_PIECES, _SMALLEST_MEAN = 20_000, 16
"""How many pieces of a body may have fewer bytes in the mean."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a host answered."""

    url: str
    """Of the last hop."""
    kind: Kind
    charset: str
    """As the header says; empty where it does not."""
    body: bytes
    cut: bool
    """Whether there was more than ``page_bytes``."""


class Fetcher:
    """Fetches pages under the rules of one configuration. Belongs to one event loop."""

    def __init__(self, config: PagesConfig, resolve: Resolve | None = None) -> None:
        self._config = config
        self.rules = HostRules(config)
        self._resolver = SystemResolver()
        self._transport = CheckedTransport(
            self.rules, resolve or self._resolver, config.proxy, proxy_resolves=config.proxy_resolves
        )
        self._turns: dict[str, _Turns] = defaultdict(lambda: _Turns(config.per_host))

    async def fetch(self, url: str) -> Fetched:
        """The page. Raises :class:`PageError` for everything that keeps it from being read."""
        seconds = self._config.fetch_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(url)
        except TimeoutError:
            raise PageError(f"no complete answer within {seconds:g} s") from None
        except (httpcore.TimeoutException, httpx.TimeoutException):
            raise PageError("no connection in time") from None
        except (httpcore.ConnectError, httpx.ConnectError):
            raise PageError("no connection to this host") from None
        except (httpcore.NetworkError, httpx.NetworkError, OSError):
            raise PageError("the connection broke before the page was complete") from None
        except (httpcore.ProtocolError, httpcore.UnsupportedProtocol, httpx.ProtocolError):
            raise PageError("the host's answer is no valid HTTP") from None

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()
        self._resolver.close()

    async def _follow(self, url: str) -> Fetched:
        asked: str | httpx.URL = url
        for _ in range(self._config.redirects + 1):
            target = self.rules.target(asked)
            async with self._turn(target.host), self._answer(target.url) as answer:
                if answer.status_code not in _REDIRECTS or "location" not in answer.headers:
                    return await self._page(target.url, answer)
                asked = _joined(target.url, answer.headers["location"])
        raise PageError(f"more than {self._config.redirects} redirects")

    @asynccontextmanager
    async def _turn(self, host: str) -> AsyncIterator[None]:
        turns = self._turns[host]
        turns.users += 1
        try:
            async with turns.slots:
                yield
        finally:
            turns.users -= 1
            if not turns.users:
                del self._turns[host]

    @asynccontextmanager
    async def _answer(self, url: httpx.URL) -> AsyncIterator[httpx.Response]:
        headers = {
            "user-agent": self._config.user_agent,
            "accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.8,application/pdf;q=0.5,"
            "*/*;q=0.1",
            "accept-encoding": "gzip, deflate",
        }
        seconds = self._config.fetch_seconds
        timeout = {"connect": seconds, "read": seconds, "write": seconds, "pool": seconds}
        request = httpx.Request("GET", url, headers=headers, extensions={"timeout": timeout})
        answer = await self._transport.handle_async_request(request)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def _page(self, url: httpx.URL, answer: httpx.Response) -> Fetched:
        status = answer.status_code
        if status not in (HTTPStatus.OK, HTTPStatus.NON_AUTHORITATIVE_INFORMATION):
            known = {one.value: f" {one.phrase}" for one in HTTPStatus}
            raise PageError(f"the host answered with status {status}{known.get(status, '')}")
        said = answer.headers.get("content-type", "")
        kind = _kind_of(said)
        body = bytearray()
        cut = False
        async for piece in _decoded(answer):
            if not body and kind is None:
                kind = _sniffed(piece)
            room = self._config.page_bytes - len(body)
            body += piece[:room]
            if cut := len(piece) > room:
                break
        if not body:
            raise PageError("the page is empty")
        if cut and kind == "pdf":  # what tells where its parts are stands at its end
            raise PageError(f"the page is a PDF of more than {self._config.page_bytes} bytes, which is not read")
        charset = _CHARSET.search(said)
        return Fetched(str(url), kind or "text", charset[1] if charset else "", bytes(body), cut)


class _Turns:
    """Who fetches from one host, or waits to."""

    def __init__(self, at_once: int) -> None:
        self.slots = asyncio.Semaphore(at_once)
        self.users = 0


def _kind_of(content_type: str) -> Kind | None:
    """None where the header says nothing. Raises :class:`PageError` for what is no text."""
    kind = content_type.partition(";")[0].strip().lower()
    if _HTML.fullmatch(kind):
        return "html"
    if _TEXT.fullmatch(kind):
        return "text"
    if kind in ("application/pdf", "application/x-pdf"):
        return "pdf"
    if not kind:
        return None
    shown = kind if len(kind) <= 60 and kind.isascii() and kind.isprintable() else "something else"
    raise PageError(f"the page is {shown}, and only text, HTML and PDF are read")


def _sniffed(first: bytes) -> Kind:
    """What a page without a content type is, by its first bytes."""
    if first.startswith(b"%PDF-"):
        return "pdf"
    head = first[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"\0" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise PageError("the page is no text")
    return "html" if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body", b"<!--")) else "text"


async def _decoded(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body without its content coding, in pieces of at most :data:`_STEP` bytes whatever it inflates to."""
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding in ("", "identity"):
        async for raw in received(answer):
            for at in range(0, len(raw), _STEP):
                yield raw[at : at + _STEP]
        return
    if coding not in ("gzip", "x-gzip", "deflate"):
        raise PageError("the host compresses the page in a way that nobody asked for")
    inflater = _Inflater(coding == "deflate")
    try:
        async for raw in received(answer):
            inflater.take(raw)
            while piece := inflater.some():
                yield piece
                await asyncio.sleep(0)
    except zlib.error:
        raise PageError("the host's compressed answer is broken") from None
    if not inflater.complete:
        raise PageError("the connection broke before the page was complete")


async def received(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes. Raises :class:`PageError` for one in chunks of a few bytes, since each chunk costs time."""
    pieces = size = 0
    async for raw in answer.aiter_raw():
        pieces, size = pieces + 1, size + len(raw)
        if pieces > _MOST_PIECES and size < _SMALLEST_MEAN * pieces:
            raise PageError("the page comes in pieces too small to be read")
        if not pieces % 100:
            await asyncio.sleep(0)
        yield raw


class _Inflater:
    """Decompresses gzip (several members too) or deflate (with a zlib header or without), a step at a time."""

    def __init__(self, deflate: bool) -> None:
        self._deflate = deflate
        self._held = b""
        self._one = zlib.decompressobj(zlib.MAX_WBITS if deflate else 16 + zlib.MAX_WBITS)
        self._begun = False
        self._more = False
        """Whether the last step was full, so that output may wait within."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing of what has begun."""
        return self._one.eof or not self._begun

    def take(self, raw: bytes) -> None:
        """What came next."""
        self._held += raw

    def some(self) -> bytes:
        """At most :data:`_STEP` bytes of what was taken; empty: more has to come first."""
        while self._held or self._more:
            if self._one.eof:
                self._more = False
                if self._deflate or not self._held.startswith(b"\x1f\x8b"):
                    self._held = b""  # what stands behind the end belongs to nothing
                    break
                self._one = zlib.decompressobj(16 + zlib.MAX_WBITS)
            piece = self._step()
            self._held = self._one.unused_data if self._one.eof else self._one.unconsumed_tail
            self._more = len(piece) == _STEP
            if piece:
                return piece
        return b""

    def _step(self) -> bytes:
        try:
            return self._one.decompress(self._held, _STEP)
        except zlib.error:
            if not self._deflate or self._begun:
                raise
            self._one = zlib.decompressobj(-zlib.MAX_WBITS)
            return self._one.decompress(self._held, _STEP)
        finally:
            self._begun = True


def _joined(base: httpx.URL, location: str) -> httpx.URL:
    try:
        return base.join(location)
    except (httpx.InvalidURL, ValueError):
        raise PageError("the host redirects to something that is no url") from None
