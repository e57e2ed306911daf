"""One OpenAI-compatible endpoint: its connections, its rate limits, and a breaker while it is broken.

A request waits here for a slot and for its place under the rate limits, and ends as a :class:`Completion` or as a
:class:`RequestError`, never as an exception of the network. The API key is in the headers of the requests and in no
message, representation or exception chain.

A breaker's states::

    closed ── ``faults`` in a row ──► open ── ``seconds`` pass ──► half-open: one request probes
      ▲                                ▲                              │
      └────────── probe answered ──────┼──────────────────────────────┤
                                       └────────── probe failed ──────┘
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import monotonic
from typing import get_args
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
import numpy as np
from yarl import URL

from mua.config.environment import EndpointConfig
from mua.environment.blame import Blame
from mua.environment.endpoint.chat import (
    ChatRequest,
    Completion,
    Format,
    RequestError,
    read_refusal,
    too_long,
    unreadable,
)
from mua.environment.endpoint.replies import read_completion
from mua.utils.masking import HIDDEN, below, mask_secrets, secret_parts

log = logging.getLogger(__name__)

IDLE_SECONDS = 4.0
"""How long an idle connection is kept. Shorter than the 5 s after which uvicorn, and so SGLang, closes its side: a
request sent into a connection that is just being closed is lost."""
MAX_REPLY_BYTES = 4 * 1024 * 1024
"""Of one body, as it is decompressed; the connection is given up at the first byte beyond. Some 200,000 characters of
text, each written as an escape of six bytes, and as many of reasoning."""
LATENCIES = 100_000
"""Latencies kept between two readings; a longer interval keeps its first ones."""
_ALWAYS = ("requests", "retries", "failovers", "tokens_in", "tokens_out", "cost", "cache_hits")
_TOKENS = ("prompt_tokens", "completion_tokens")
_LONGEST_REFUSAL = 500
_LONGEST_BODY = 65536
_SHORTEST_SECRET = 5
"""Shorter ones are words of any text, as the key ``none`` is, which says that there is none."""
_FORMATS: tuple[Format, ...] = get_args(Format)
_REFUSES_FORMAT = frozenset({400, 404, 415, 422, 500, 501})


class Accounts:
    """Counts of one role. Every reading begins anew."""

    def __init__(self) -> None:
        self._amounts: dict[str, float] = {}
        self._latencies: list[float] = []

    def count(self, name: str, amount: float = 1.0) -> None:
        self._amounts[name] = self._amounts.get(name, 0.0) + amount

    def answered(self, seconds: float) -> None:
        """A request was answered after ``seconds``."""
        if len(self._latencies) < LATENCIES:
            self._latencies.append(seconds)

    def take(self) -> dict[str, float]:
        """Everything since the last call. Latencies are left out where there was no answer."""
        amounts, self._amounts = self._amounts, {}
        latencies, self._latencies = self._latencies, []
        metrics = dict.fromkeys(_ALWAYS, 0.0) | amounts
        if latencies:  # by nearest rank: latencies that occurred
            half, most = np.quantile(latencies, (0.50, 0.95), method="inverted_cdf").tolist()
            metrics |= {"latency_p50_seconds": half, "latency_p95_seconds": most}
        return metrics


class Connection:
    """Chat completions of one endpoint and model. Belongs to one event loop."""

    def __init__(self, config: EndpointConfig, accounts: Accounts) -> None:
        import openai  # over a second, which no run without endpoints should pay

        self._openai = openai
        self._config = config
        self._accounts = accounts
        self._slots = asyncio.Semaphore(config.concurrency)
        per_minute = (config.requests_per_minute, config.tokens_per_minute)
        self._limits = [RateLimit(limit or math.inf) for limit in per_minute]
        self._format: Format = "json_schema" if config.structured_output == "auto" else config.structured_output
        self.answered = False
        """Whether it ever gave a reply: then its address, key and model are right."""
        self._said: set[str] = set()
        # What may be secret of the address stays in the transport, because httpx logs the addresses it asks. Retries
        # are not the library's, because they may turn to another endpoint; a request's time is bounded in one place.
        self._client = openai.AsyncOpenAI(
            base_url=mask_secrets(config.base_url).partition("?")[0],
            api_key=config.api_key.get_secret_value() or "none",
            max_retries=0,
            timeout=None,
            http_client=httpx.AsyncClient(transport=_Transport(config.base_url), timeout=None),
        )
        self.breaker = Breaker(config.breaker_faults, config.breaker_seconds, monotonic)

    def __repr__(self) -> str:
        return f"{mask_secrets(self._config.base_url)} (model {self._config.model})"

    @property
    def named(self) -> tuple[str, str]:
        """Address without credentials, and model."""
        return mask_secrets(self._config.base_url), self._config.model

    def wait(self, request: ChatRequest) -> float:
        """Seconds until ``request`` would have its place under the rate limits."""
        now = monotonic()
        return max(limit.wait(amount, now) for limit, amount in self._amounts(request))

    async def ask(self, request: ChatRequest, deadline: float) -> Completion | RequestError | None:
        """Send ``request`` once. None if the endpoint broke while it waited for a slot, and it was not sent.

        Raises ``TimeoutError`` when its place under the rate limits comes after ``deadline`` (monotonic seconds).
        """
        async with self._slots:
            if self.breaker.wait() > 0:
                return None
            probe = self.breaker.enter()
            try:
                # The places under both limits, given back if their time never comes.
                now = monotonic()
                reserved = [(limit, limit.reserve(amount, now)) for limit, amount in self._amounts(request)]
                start = max(place.start for _, place in reserved)
                try:
                    if start > deadline:
                        raise TimeoutError
                    if start > now:
                        await asyncio.sleep(start - now)
                except BaseException:
                    for limit, place in reserved:
                        limit.correct(place, 0.0)
                    raise
                outcome = await self._converse(request)
            except BaseException:
                self.breaker.abandon(probe)
                raise
        if isinstance(outcome, Completion):
            self.breaker.leave(probe, None)
            if used := sum(outcome.usage.get(name, 0) for name in _TOKENS):
                self._limits[1].correct(reserved[1][1], used)
        else:
            self._accounts.count(f"errors/{outcome.kind}")
            # What speaks against the endpoint itself, and not only against this request.
            breaking = outcome.kind in ("timeout", "connection", "server", "unreadable")
            breaking = breaking or (outcome.blame is Blame.PERSON and not self.answered)
            if self.breaker.leave(probe, outcome if breaking else None):
                self._accounts.count("breaker_opened")
                told = (self._config.breaker_faults, self._config.breaker_seconds, self.clean(outcome.reason))
                log.warning("%r: %d faults in a row, left alone for %g s; last: %s", self, *told)
        return outcome

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def clean(self, text: str) -> str:
        """One line, shortened, without keys and passwords: some endpoints quote them in their refusal."""
        text, secrets = mask_secrets(text), {self._config.api_key.get_secret_value(): "<api key>"}
        for secret, shown in (secrets | dict.fromkeys(secret_parts(self._config.base_url), HIDDEN)).items():
            if len(secret) >= _SHORTEST_SECRET:
                text = text.replace(secret, shown)
        return " ".join(text.split())[:_LONGEST_REFUSAL]

    def _amounts(self, request: ChatRequest) -> list[tuple[RateLimit, float]]:
        """What ``request`` takes of each limit: requests, tokens."""
        return list(zip(self._limits, (1.0, request.estimated_tokens()), strict=True))

    async def _converse(self, request: ChatRequest) -> Completion | RequestError:
        """One reply, in the strictest form of structured output that the endpoint does not refuse."""
        chosen = request.schema is not None and self._config.structured_output == "auto"
        refused: list[RequestError] = []
        for form in _FORMATS[_FORMATS.index(self._format) :] if chosen else (self._format,):
            outcome = await self._send(request, form)
            if isinstance(outcome, RequestError) and outcome.status in _REFUSES_FORMAT:
                refused.append(outcome)  # perhaps meant for the form
                continue
            if isinstance(outcome, Completion) and refused:
                log.info("%r refuses %s and takes %s", self, self._format, form)
                self._format = form
            return outcome
        return refused[0]

    async def _send(self, request: ChatRequest, form: Format) -> Completion | RequestError:
        config, started = self._config, monotonic()
        self._accounts.count("requests")
        try:
            # One bound over all of it: connecting, waiting, and a body that comes byte by byte.
            async with asyncio.timeout(config.request_seconds):
                # As bytes: the library would refuse characters that only an escape can carry.
                body = json.dumps(request.body(config, form)).encode()
                response = await self._client.post("/chat/completions", cast_to=httpx.Response, body=body)
        except TimeoutError:
            reason = f"no answer within {config.request_seconds:g} s"
            return RequestError("timeout", reason, "raise {here}.request_seconds or look at the server")
        except self._openai.APIStatusError as error:
            waits = retry_after_seconds(error.response.headers.get("retry-after"), datetime.now(UTC))
            return read_refusal(error.status_code, error.body, error.response.text[:_LONGEST_BODY], waits)
        except self._openai.APIConnectionError as error:  # nobody answered, or not in HTTP
            cause = error.__cause__ or error
            if isinstance(cause, _TooLongError):
                return too_long(f"a body of more than {MAX_REPLY_BYTES} bytes")
            if isinstance(cause, aiohttp.ClientPayloadError | aiohttp.ClientConnectionError | OSError):
                reason = f"connection failed ({type(cause).__name__}: {cause})"
                return RequestError("connection", reason, "check {here}.base_url and that the server runs")
            return unreadable(f"{type(cause).__name__}: {cause}")
        reply = read_completion(response.content, request)
        if isinstance(reply, RequestError):
            return reply
        self.answered = True
        for what in {*reply.as_text} - self._said:
            self._said.add(what)
            log.warning("%r: %s", self, _PARSERS[what])
        self._accounts.answered(monotonic() - started)
        read, written = (reply.usage.get(name, 0) for name in _TOKENS)
        cost = (config.price_per_million_in * read + config.price_per_million_out * written) / 1e6
        for name, amount in (("tokens_in", read), ("tokens_out", written), ("cost", cost)):
            self._accounts.count(name, amount)
        if reply.truncated:
            self._accounts.count("truncated")
        return replace(reply, cost=cost)


class _Transport(httpx.AsyncBaseTransport):
    """Carries what the library asks to one address, by aiohttp, through the proxy that the environment names for it.

    The transport of httpx looks through all its connections for every request: with 256 requests in flight it takes
    11 ms of CPU for each, and this one, library included, 0.9 ms.
    """

    def __init__(self, base_url: str) -> None:
        self._url = URL(below(base_url, "chat/completions"))
        # Looked up once: with ``trust_env`` aiohttp would do so for every request, each time in a thread.
        parts = urlsplit(base_url)
        named = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
        self._proxy = URL(named).with_user(None) if named else None
        self._proxy_headers = {}
        if named and (user := URL(named).user):
            login = b64encode(f"{user}:{URL(named).password or ''}".encode()).decode()
            self._proxy_headers = {"Proxy-Authorization": f"Basic {login}"}
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = {"Content-Type": "application/json"}
        if not self._url.user:
            headers["Authorization"] = request.headers["Authorization"]
        if self._url.scheme == "http":  # no tunnel: what is meant for a proxy stands in the request itself
            headers |= self._proxy_headers
        if self._session is None:  # Holds no headers: aiohttp would send those to a proxy too, the key among them.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        post = self._session.post(
            self._url, data=request.content, headers=headers, proxy=self._proxy, proxy_headers=self._proxy_headers
        )
        async with post as response:
            told = {name: value for name, value in response.headers.items() if name.lower() == "retry-after"}
            if (response.content_length or 0) <= MAX_REPLY_BYTES:
                try:
                    await response.content.readexactly(MAX_REPLY_BYTES + 1)
                except asyncio.IncompleteReadError as read:
                    return httpx.Response(response.status, headers=told, content=read.partial)
            response.close()
            raise _TooLongError

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _TooLongError(Exception):
    """A body of more than :data:`MAX_REPLY_BYTES`."""


_PARSERS = {
    "calls": "it leaves tool calls in the text, which is read all the same; start the server with its parser "
    "(SGLang: --tool-call-parser, vLLM: --enable-auto-tool-choice --tool-call-parser)",
    "reasoning": "it leaves reasoning in the text, which is taken out; start the server with --reasoning-parser",
}
"""What to set on a server, told once."""


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


MINUTE = 60.0
Clock = Callable[[], float]


@dataclass(slots=True)
class Reservation:
    """A reservation in a :class:`RateLimit`."""

    start: float
    """When it may be used, by the clock of the window."""
    amount: float
    counted: bool = True


class RateLimit:
    """At most ``limit`` units within any ``seconds``: a sliding window, places given in order of asking.

    An amount above the limit waits for an empty window and then fills it.
    """

    def __init__(self, limit: float, seconds: float = MINUTE) -> None:
        self._limit = limit
        self._seconds = seconds
        self._places: deque[Reservation] = deque()
        self._used = 0.0

    def wait(self, amount: float, now: float) -> float:
        """Seconds until ``amount`` would have its place, if it were asked for now."""
        return self._start(min(amount, self._limit), now) - now

    def reserve(self, amount: float, now: float) -> Reservation:
        """The next place for ``amount``; use it no earlier than its start."""
        place = Reservation(self._start(min(amount, self._limit), now), min(amount, self._limit))
        while self._places and self._places[0].start <= place.start - self._seconds:
            gone = self._places.popleft()
            gone.counted = False
            self._used -= gone.amount
        self._places.append(place)
        self._used += place.amount
        return place

    def correct(self, place: Reservation, amount: float) -> None:
        """``place`` took ``amount`` in the end; 0 gives it back."""
        if place.counted:
            self._used += min(amount, self._limit) - place.amount
            place.amount = min(amount, self._limit)

    def _start(self, amount: float, now: float) -> float:
        """When ``amount`` fits: after all places given before, once enough of them have left the window."""
        start = max(now, self._places[-1].start) if self._places else now
        used = self._used
        for place in self._places:
            if place.start > start - self._seconds and used + amount <= self._limit:
                break
            start = max(start, place.start + self._seconds)
            used -= place.amount
        return start


class Breaker:
    """Leaves a broken endpoint alone; see the drawing above. Belongs to one event loop."""

    def __init__(self, faults: int, seconds: float, clock: Clock) -> None:
        self._limit = faults
        self._seconds = seconds
        self._clock = clock
        self._faults = 0
        self._opens_at: float | None = None
        self._probing = False
        self._changed = asyncio.Event()
        self.trouble: RequestError | None = None
        """The last fault."""
        self.failed_probes = 0

    @property
    def closed(self) -> bool:
        return self._opens_at is None

    def wait(self) -> float:
        """Seconds until a request may be sent, 0 for now. While a probe is out nobody knows: one more period."""
        if self._opens_at is None:
            return 0.0
        return self._seconds if self._probing else max(0.0, self._opens_at - self._clock())

    async def change(self, seconds: float) -> None:
        """Sleep until the state changes, ``seconds`` at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def enter(self) -> bool:
        """A request is about to be sent; whether it is the probe."""
        if self._opens_at is None or self._probing:
            return False
        self._probing = True
        return True

    def leave(self, probe: bool, fault: RequestError | None) -> bool:
        """The request has ended: with an answer of whatever kind, or with a fault of the endpoint.

        Gives whether the endpoint, which was asked until now, is left alone because of it.
        """
        if fault is None:
            self._faults = 0
            self._set(None)
            return False
        self.trouble = fault
        self._faults += 1
        self.failed_probes += probe
        opens = self.closed and self._faults >= self._limit
        if probe or opens:
            self._set(self._clock() + self._seconds)
        return opens

    def abandon(self, probe: bool) -> None:
        """The request was cancelled: it says nothing about the endpoint."""
        if probe:
            self._set(self._opens_at)

    def _set(self, opens_at: float | None) -> None:
        """Whoever waits wakes up and looks again."""
        self._opens_at = opens_at
        self._probing = False
        self._changed.set()
        self._changed = asyncio.Event()
