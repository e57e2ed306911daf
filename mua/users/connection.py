"""One OpenAI-compatible endpoint over HTTP: its connections, its limits, its health.

A request waits here for a slot and for its place under the rate limits, and ends as a :class:`Completion` or as a
:class:`Trouble`, never as an exception of the network. The API key is in the headers of the requests and in no message,
representation or exception chain.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import get_args
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from mua.config.schema import EndpointConfig, PolicyEndpointConfig
from mua.masking import HIDDEN, below, credentials, masked
from mua.untrusted import JsonError, read_json
from mua.users.chat import (
    ChatRequest,
    Completion,
    Format,
    Kind,
    Trouble,
    read_completion,
    too_long,
    trouble,
    unreadable,
)
from mua.users.limits import Breaker, Place, Window
from mua.users.tally import Tally

log = logging.getLogger(__name__)

IDLE_SECONDS = 4.0
"""How long an idle connection is kept. Shorter than the 5 s after which uvicorn, and so SGLang, closes its side: a
request sent into a connection that is just being closed is lost."""
MAX_REPLY_BYTES = 4 * 1024 * 1024
"""Of one body, as it is decompressed; the connection is given up at the first byte beyond. Some 200,000 characters of
text, each written as an escape of six bytes, and as many of reasoning."""
_LONGEST_REFUSAL = 500
_SHORTEST_SECRET = 5
"""Shorter ones are words of any text, as the key ``none`` is, which says that there is none."""
_FORMATS: tuple[Format, ...] = get_args(Format)
_REFUSES_FORMAT = frozenset({400, 404, 415, 422, 500, 501})
_RETRIED_STATUS = frozenset({408, 409, 425, 429})
_MENDS = {
    400: "check {here}.model, temperature and max_tokens",
    401: "check {here}.api_key",
    403: "check that {here}.api_key may use this model",
    404: "check {here}.base_url (it usually ends in /v1) and {here}.model",
    429: "lower {here}.concurrency or raise {role}.max_retries and total_seconds",
}


class Connection:
    """Chat completions of one endpoint and model. Belongs to one event loop."""

    def __init__(self, config: EndpointConfig, tally: Tally) -> None:
        self._config = config
        self._tally = tally
        self._slots = asyncio.Semaphore(config.concurrency)
        self._requests = Window(config.requests_per_minute) if config.requests_per_minute else None
        self._tokens = Window(config.tokens_per_minute) if config.tokens_per_minute else None
        self._session: aiohttp.ClientSession | None = None
        self._proxy, self._proxy_headers = _proxy(config.base_url)
        self._url = URL(below(config.base_url, "chat/completions"))
        self._headers = self._request_headers()
        self._format: Format = "json_schema" if config.structured_output == "auto" else config.structured_output
        self.breaker = Breaker(config.breaker_faults, config.breaker_seconds, monotonic)

    def __repr__(self) -> str:
        return f"{masked(self._config.base_url)} (model {self._config.model})"

    def wait(self, request: ChatRequest) -> float:
        """Seconds until ``request`` would have its place under the rate limits."""
        now = monotonic()
        return max((window.wait(amount, now) for window, amount in self._windows(request)), default=0.0)

    async def ask(self, request: ChatRequest, deadline: float) -> Completion | Trouble | None:
        """Send ``request`` once. None if the endpoint broke while it waited for a slot, and it was not sent.

        Raises ``TimeoutError`` when its place under the rate limits comes after ``deadline`` (monotonic seconds).
        """
        async with self._slots:
            if self.breaker.wait() > 0:
                return None
            probe = self.breaker.enter()
            try:
                async with self._places(request, deadline) as places:
                    outcome = await self._converse(request)
                    self._correct(places, outcome)
            except BaseException:
                self.breaker.abandon(probe)
                raise
        self._conclude(probe, outcome)
        return outcome

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def clean(self, text: str) -> str:
        """One line, shortened, without keys and passwords: some endpoints quote them in their refusal."""
        return without_secrets(text, self._config)[:_LONGEST_REFUSAL]

    # ---- limits

    def _windows(self, request: ChatRequest) -> Iterator[tuple[Window, float]]:
        if self._requests is not None:
            yield self._requests, 1.0
        if self._tokens is not None:
            yield self._tokens, float(request.estimated_tokens())

    @asynccontextmanager
    async def _places(self, request: ChatRequest, deadline: float) -> AsyncIterator[list[Place]]:
        """Places under the rate limits, once their time has come; given back if it never comes."""
        now = monotonic()
        reserved = [(window, window.reserve(amount, now)) for window, amount in self._windows(request)]
        start = max((place.start for _, place in reserved), default=now)
        try:
            if start > deadline:
                raise TimeoutError
            if start > now:
                await asyncio.sleep(start - now)
        except BaseException:
            for window, place in reserved:
                window.correct(place, 0.0)
            raise
        yield [place for _, place in reserved]

    def _correct(self, places: list[Place], outcome: Completion | Trouble) -> None:
        used = outcome.tokens_in + outcome.tokens_out if isinstance(outcome, Completion) else 0
        if self._tokens is not None and used:
            self._tokens.correct(places[-1], used)

    def _conclude(self, probe: bool, outcome: Completion | Trouble) -> None:
        """Tell the breaker and the metrics."""
        fault = outcome if isinstance(outcome, Trouble) and outcome.breaking else None
        opened = self.breaker.times_opened
        self.breaker.leave(probe, fault)
        if fault is not None and self.breaker.times_opened > opened:
            self._tally.count("breaker_opened")
            seconds, faults = self._config.breaker_seconds, self._config.breaker_faults
            log.warning("%r: %d faults in a row, left alone for %g s; last: %s", self, faults, seconds,
                        self.clean(fault.reason))  # fmt: skip
        if isinstance(outcome, Trouble):
            self._tally.count(f"errors/{outcome.kind}")

    # ---- HTTP

    async def _converse(self, request: ChatRequest) -> Completion | Trouble:
        """One reply, in the strictest form of structured output that the endpoint does not refuse."""
        outcome = await self._send(request, self._format)
        if request.schema is None or self._config.structured_output != "auto" or not _refuses(outcome):
            return outcome
        for form in _FORMATS[_FORMATS.index(self._format) + 1 :]:
            other = await self._send(request, form)
            if not isinstance(other, Trouble):
                log.info("%r refuses %s and takes %s", self, self._format, form)
                self._format = form
                return other
            if not _refuses(other):
                return other
        return outcome

    async def _send(self, request: ChatRequest, form: Format) -> Completion | Trouble:
        config, started = self._config, monotonic()
        self._tally.count("requests")
        body = json.dumps(request.body(config.model, form, config.extra)).encode()
        try:
            # One bound over all of it: connecting, waiting, and a body that comes byte by byte.
            async with asyncio.timeout(config.request_seconds):
                post = self._opened().post(
                    self._url,
                    data=body,
                    headers=self._headers,
                    proxy=self._proxy,
                    proxy_headers=self._proxy_headers,
                )
                async with post as response:
                    raw = await _body(response)
                    if raw is None:
                        return too_long(f"a body of more than {MAX_REPLY_BYTES} bytes")
        except TimeoutError:
            reason = f"no answer within {config.request_seconds:g} s"
            return trouble("timeout", reason, "raise {here}.request_seconds or look at the server")
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            reason = f"connection failed ({type(error).__name__}: {error})"
            return trouble("connection", reason, "check {here}.base_url and that the server runs")
        except (aiohttp.ClientError, ValueError) as error:
            return unreadable(f"{type(error).__name__}: {error}")
        if response.status >= 300:
            return _refusal(response, raw)
        outcome = read_completion(raw, request)
        if isinstance(outcome, Completion):
            self._book(outcome, monotonic() - started)
        return outcome

    def _book(self, completion: Completion, seconds: float) -> None:
        config = self._config
        self._tally.answered(seconds)
        self._tally.count("tokens_in", completion.tokens_in)
        self._tally.count("tokens_out", completion.tokens_out)
        prices = config.price_per_million_in * completion.tokens_in
        prices += config.price_per_million_out * completion.tokens_out
        self._tally.count("cost", prices / 1e6)
        if completion.truncated:
            self._tally.count("truncated")

    def _opened(self) -> aiohttp.ClientSession:
        """The session, made on the loop that uses it. Its connections are bounded by the slots alone.

        It holds no headers: aiohttp would send those to a proxy too, the key among them.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    def _request_headers(self) -> dict[str, str]:
        parts, headers = urlsplit(self._config.base_url), {"Content-Type": "application/json"}
        if parts.scheme == "http":  # no tunnel: what is meant for a proxy stands in the request itself
            headers |= self._proxy_headers
        if "@" not in parts.netloc:
            headers["Authorization"] = f"Bearer {self._config.api_key.get_secret_value() or 'none'}"
        return headers


def _proxy(url: str) -> tuple[URL | None, dict[str, str]]:
    """The proxy that the environment names for ``url`` (HTTPS_PROXY, NO_PROXY and their like), and what it is told.

    Looked up once: with ``trust_env`` aiohttp would do so for every request, each time in a thread.
    """
    parts = urlsplit(url)
    found = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    if not found:
        return None, {}
    proxy = URL(found)
    if not proxy.user:
        return proxy, {}
    named = b64encode(f"{proxy.user}:{proxy.password or ''}".encode()).decode()
    return proxy.with_user(None), {"Proxy-Authorization": f"Basic {named}"}


async def _body(response: aiohttp.ClientResponse) -> bytes | None:
    """The whole body, or None, and the connection closed, where it is longer than anybody reads."""
    chunks, size = [], 0
    if (response.content_length or 0) <= MAX_REPLY_BYTES:
        async for chunk in response.content.iter_any():
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_REPLY_BYTES:
                break
        else:
            return b"".join(chunks)
    response.close()
    return None


def _refuses(outcome: Completion | Trouble) -> bool:
    """Whether a refusal may be meant for the form of structured output."""
    return isinstance(outcome, Trouble) and outcome.status in _REFUSES_FORMAT


def _refusal(response: aiohttp.ClientResponse, raw: bytes) -> Trouble:
    status = response.status
    retry = status in _RETRIED_STATUS or status >= 500
    kind: Kind = "rate_limit" if status == 429 else "server" if status >= 500 else "refused"
    wait = retry_after_seconds(response.headers.get("retry-after"), datetime.now(UTC)) if retry else 0.0
    return Trouble(
        kind,
        f"HTTP {status} {response.reason}: {_said(raw)}",
        _MENDS.get(status, "look at the server's log" if status >= 500 else "check the section {here}"),
        retry,
        wait,
        breaking=status >= 500 or status in (401, 403, 404),
        status=status,
    )


def _said(raw: bytes) -> str:
    """The message of an error body: OpenAI's ``error.message``, a plain ``message``, or the text as it is."""
    text = raw[:65536].decode("utf-8", errors="replace")
    try:
        body = read_json(text, strict=False)
    except JsonError:
        return text
    for part in (body.get("error"), body) if isinstance(body, dict) else ():
        if isinstance(part, dict) and isinstance(part.get("message"), str):
            return str(part["message"])
    return text


def retry_after_seconds(value: str | None, now: datetime) -> float:
    """Seconds that a Retry-After header (RFC 9110, 10.2.3: seconds or an HTTP date) asks for; 0 if it says nothing."""
    if value is None:
        return 0.0
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - now).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def without_secrets(text: str, config: EndpointConfig | PolicyEndpointConfig) -> str:
    """``text`` on one line, without the endpoint's key and what its address holds of passwords and keys."""
    text = masked(text)
    for secret, shown in [(config.api_key.get_secret_value(), "<api key>"), *_in_address(config.base_url)]:
        if len(secret) >= _SHORTEST_SECRET:
            text = text.replace(secret, shown)
    return " ".join(text.split())


def _in_address(base_url: str) -> Iterator[tuple[str, str]]:
    for secret in credentials(base_url):
        yield secret, HIDDEN
