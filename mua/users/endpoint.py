"""A role's language model: an endpoint and those that stand in for it, behind one question.

::

    chat() ──► cache ──► the first endpoint, in order, that may be asked now ──► reply that the caller accepts
                              ▲     none may: wait for the soonest                   │ trouble
                              └── another one, or the same after a pause ◄───────────┘
                                        all used up, or ``total_seconds`` past ──► UserFault or JudgeFault

An endpoint may not be asked while its breaker is open, while its rate limit is reached, and, by the request that met
trouble there, before the pause is over that jittered exponential backoff and Retry-After ask for.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from time import monotonic
from typing import Literal, TypeAlias

from mua.config.schema import LlmConfig
from mua.errors import JudgeFault, UserFault, UserFaultKind
from mua.masking import masked
from mua.types import Json
from mua.users.cache import ResponseCache
from mua.users.chat import ChatRequest, Completion, Message, Trouble, trouble
from mua.users.connection import Connection, retry_after_seconds
from mua.users.protocol import Refusal
from mua.users.tally import Tally

__all__ = ["Accept", "ChatEndpoint", "Role", "retry_after_seconds"]

log = logging.getLogger(__name__)

Role: TypeAlias = Literal["user", "judge"]
Accept: TypeAlias = Callable[[Completion], Refusal | None]
"""Why a reply cannot be used; None if it can."""
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
_NOT_ASKED = trouble("rate_limit", "no free slot yet, or no place under the rate limit", "raise {here}.concurrency")


class ChatEndpoint:
    """Chat completions for one role. Belongs to one event loop; holds connections until it is closed."""

    def __init__(self, config: LlmConfig, role: Role = "user") -> None:
        """Raises :class:`mua.errors.ConfigError` when ``config.cache`` cannot be used."""
        self._config = config
        self._role = role
        self._tally = Tally()
        self._members = [Connection(endpoint, self._tally) for endpoint in config.endpoints]
        self._cache = ResponseCache(config.cache, f"{role}.llm.cache") if config.cache is not None else None

    def __repr__(self) -> str:
        return f"ChatEndpoint({masked(self._config.base_url)}, model {self._config.model})"

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float | None = None,
        response_format: Json | None = None,
        accept: Accept = lambda reply: None,
    ) -> str:
        """The text of :meth:`chat`, reasoning blocks removed, never empty."""
        reply = await self.chat(
            messages, seed=seed, temperature=temperature, response_format=response_format, accept=accept
        )
        return reply.text

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float | None = None,
        tools: Sequence[Json] = (),
        tool_choice: str | None = None,
        response_format: Json | None = None,
        accept: Accept = lambda reply: None,
    ) -> Completion:
        """The reply to ``messages``: text, or calls of the offered ``tools`` (OpenAI schemas).

        ``seed`` makes sampling repeatable where the endpoint heeds it; every retry has one of its own.
        ``response_format`` is the JSON Schema of an answer in JSON, passed on as far as the endpoint takes it: the
        caller still checks. What ``accept`` finds unusable is asked for again. Raises
        :class:`mua.errors.UserFault`, in the judge's role :class:`mua.errors.JudgeFault`, when no endpoint gives a
        reply within ``max_retries`` and ``total_seconds`` (waiting for limits included).
        """
        warmth = self._config.temperature if temperature is None else temperature
        request = ChatRequest(
            [dict(message) for message in messages], seed, warmth, self._config.max_tokens, tools, tool_choice,
            response_format,
        )  # fmt: skip
        cached = await self._recall(request)
        if cached is not None and accept(cached) is None:
            self._tally.count("cache_hits")
            return cached
        way = _Way(self._members, request, monotonic() + self._config.total_seconds)
        late = False
        try:
            async with asyncio.timeout(self._config.total_seconds):
                if reply := await self._travel(way, accept):
                    return await self._keep(request, reply, accept)
        except TimeoutError:
            late = True
        # Raised outside the handlers: a chained exception would carry the request and its headers.
        raise self._fault(way, late)

    def count(self, name: str) -> None:
        """Add one to the metric ``name``."""
        self._tally.count(name)

    def metrics(self) -> dict[str, float]:
        """Counters, cost and latencies since the last call; see docs/users.md for each."""
        return self._tally.take()

    async def close(self) -> None:
        """Close the connections and the cache."""
        for member in self._members:
            await member.close()
        if self._cache is not None:
            await self._cache.close()

    # ---- asking

    async def _travel(self, way: _Way, accept: Accept) -> Completion | None:
        """The first usable reply; None when every endpoint was asked as often as it may be."""
        at = 0
        while places := way.open(self._config.max_retries):
            place = min(places, key=way.wait)
            if seconds := way.held(place):
                await way.sleep(place, seconds)
                continue
            self._tally.count("retries", float(way.tried > 0))
            self._tally.count("failovers", float(place != at))
            at = place
            request = replace(way.request, seed=way.request.seed + way.tried)
            outcome = await self._members[place].ask(request, way.deadline)
            if isinstance(outcome, Completion):
                if (refusal := accept(outcome)) is None:
                    return outcome
                self._tally.count("errors/rejected")
                reason = f"unusable reply: {refusal.reason}"
                outcome = trouble("rejected", reason, "try another {here}.model", refusal.kind)
            if outcome is not None:
                if self._role == "user" and outcome.fault is not UserFaultKind.UNREACHABLE:
                    self._tally.count(f"refused/{outcome.fault}")
                way.note(place, outcome)
                log.info("%r: %s", self._members[place], self._members[place].clean(outcome.reason))
        return None

    def _fault(self, way: _Way, late: bool) -> UserFault | JudgeFault:
        asked = list(way.last) or [0]
        text = "; ".join(self._story(way, place, late) for place in asked)
        passing = any(self._last(way, place).passing for place in asked)
        if self._role == "judge":
            return JudgeFault(text, passing=passing)
        return UserFault(text, self._last(way, asked[-1]).fault, passing=passing)

    def _story(self, way: _Way, place: int, late: bool) -> str:
        """What happened at one endpoint, and the mend."""
        member, section = self._members[place], f"{self._role}.llm"
        last = self._last(way, place)
        reason = member.clean(last.reason)
        if late:
            reason = f"nothing usable within {self._config.total_seconds:g} s; last: {reason}"
        tries = f" after {way.tries[place]} requests" if last.retry or late else ""
        here = f"{section}.fallbacks.{place - 1}" if place else section
        mend = last.mend.replace("{here}", here).replace("{role}", section)
        return f"{self._role} endpoint {member!r}: {reason}{tries}; {mend}"

    def _last(self, way: _Way, place: int) -> Trouble:
        """What one endpoint met last."""
        return way.last.get(place) or self._members[place].breaker.trouble or _NOT_ASKED

    # ---- the cache

    async def _recall(self, request: ChatRequest) -> Completion | None:
        if self._cache is None:
            return None
        try:
            return await self._cache.get(self._whole(request))
        except sqlite3.Error as error:
            self._cache_fails(error)
        return None

    async def _keep(self, request: ChatRequest, reply: Completion, accept: Accept) -> Completion:
        """``reply``, or the one that was kept before, so that everybody goes on with the same."""
        if self._cache is None:
            return reply
        try:
            kept = await self._cache.put(self._whole(request), reply)
            return kept if accept(kept) is None else reply
        except sqlite3.Error as error:
            self._cache_fails(error)
        return reply

    def _cache_fails(self, error: sqlite3.Error) -> None:
        """A disk that is full ends no run: the endpoint still answers."""
        self._tally.count("cache_errors")
        log.warning("%s.llm.cache: %s: %s", self._role, self._config.cache, error)

    def _whole(self, request: ChatRequest) -> Json:
        """Everything that the reply depends on."""
        config = self._config
        named = {"url": masked(config.base_url), "model": config.model, "extra": config.extra}
        return asdict(request) | named


class _Way:
    """One request's way through the endpoints: what it met at each, and when it may ask there again."""

    def __init__(self, members: Sequence[Connection], request: ChatRequest, deadline: float) -> None:
        self.request = request
        self.last: dict[int, Trouble] = {}
        self.tries = [0] * len(members)
        self._members = members
        self.deadline = deadline
        self._not_before = [0.0] * len(members)

    @property
    def tried(self) -> int:
        """Tries at all endpoints together."""
        return sum(self.tries)

    def open(self, max_retries: int) -> list[int]:
        """The endpoints that may be asked again, now or later."""
        refused = {place for place, met in self.last.items() if not met.retry}
        return [i for i, tries in enumerate(self.tries) if tries <= max_retries and i not in refused]

    def wait(self, place: int) -> float:
        """Seconds until that endpoint may be asked and has a place under its rate limits."""
        return max(self.held(place), self._members[place].wait(self.request))

    def held(self, place: int) -> float:
        """Seconds until that endpoint may be asked; under its rate limits requests then queue in order."""
        return max(0.0, self._not_before[place] - monotonic(), self._members[place].breaker.wait())

    async def sleep(self, place: int, seconds: float) -> None:
        """Wait for that endpoint. While it is broken, the fate of whatever request probes it is this one's too."""
        breaker = self._members[place].breaker
        if breaker.closed:
            if monotonic() + seconds >= self.deadline:
                raise TimeoutError
            await asyncio.sleep(seconds)
            return
        failed = breaker.failed_probes
        await breaker.change(seconds)
        if breaker.failed_probes > failed and breaker.trouble is not None:
            self.note(place, breaker.trouble)

    def note(self, place: int, met: Trouble) -> None:
        """One try more, in vain."""
        longest = min(FIRST_BACKOFF_SECONDS * 2 ** self.tries[place], LONGEST_BACKOFF_SECONDS)
        self.last[place] = met
        self.tries[place] += 1
        if met.pause:
            # Jitter on top of Retry-After too: the endpoint tells every waiting request the same moment.
            self._not_before[place] = monotonic() + met.wait_seconds + random.uniform(longest / 2, longest)
