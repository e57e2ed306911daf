"""The client of chat endpoints: a role's endpoint and those that stand in for it, behind one question.

::

    chat() ──► cache ──► the first endpoint, in order, that may be asked now ──► reply that the caller accepts
                              ▲     none may: wait for the soonest                   │ trouble
                              └── another one, or the same after a pause ◄───────────┘
                                        all used up, or the deadline past ──► the role's fault

An endpoint may not be asked while its breaker is open, while its rate limit is reached, and, by the request that met
trouble there, before the pause is over that jittered exponential backoff and Retry-After ask for. Policies that are
evaluated, users and judges are roles.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, time
from typing import Any, Literal, Self, TypeAlias, TypeVar

from mua.config.schema import JudgeConfig, LlmConfig, PolicyEndpointConfig, UserConfig
from mua.environment.blame import Blame
from mua.environment.endpoint.chat import ChatRequest, Completion, Message, RequestError
from mua.environment.endpoint.connection import Accounts, Connection
from mua.store.recorder import current_episode
from mua.types import Json
from mua.utils.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    JudgeFault,
    MuaError,
    Refusal,
    UserFault,
    UserFaultKind,
)
from mua.utils.masking import mask_secrets
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import read_json

log = logging.getLogger(__name__)

T = TypeVar("T")
Role: TypeAlias = Literal["user", "judge", "policy"]
Accept: TypeAlias = Callable[[Completion], Refusal | None]
"""Why a reply cannot be used; None if it can."""
FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
_SECTIONS: dict[Role, str] = {"user": "user.llm", "judge": "judge.llm", "policy": "evaluation.policy.endpoint"}
_NOT_ASKED = RequestError(
    "rate_limit", "no free slot yet, or no place under the rate limit", "raise {here}.concurrency"
)


class ContextLengthExceeded(EngineError):
    """The conversation no longer fits the policy's context."""


class PromptRefused(EngineError):
    """The endpoint refuses to go on with what the policy wrote (a content filter)."""


class ChatClient:
    """Chat completions for one role. Belongs to one event loop; holds connections until it is closed."""

    def __init__(self, config: LlmConfig | PolicyEndpointConfig, role: Role = "user") -> None:
        """Raises :class:`ConfigError` when ``config.cache`` cannot be used."""
        self._config = config
        self._role = role
        self._section = _SECTIONS[role]
        self._accounts = Accounts()
        self._members = [Connection(endpoint, self._accounts) for endpoint in config.endpoints]
        self._cache: JsonCache | None = None
        if isinstance(config, LlmConfig) and config.cache is not None:
            key = f"{self._section}.cache"
            self._cache = JsonCache(config.cache, key, "replies", lambda: self.count("cache_errors"))

    def __repr__(self) -> str:
        return f"ChatClient({mask_secrets(self._config.base_url)}, model {self._config.model})"

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        seed: int,
        temperature: float | None = None,
        tools: Sequence[Json] = (),
        tool_choice: str | None = None,
        response_format: Json | None = None,
        may_be_empty: bool = False,
        accept: Accept = lambda reply: None,
    ) -> Completion:
        """The reply to ``messages`` under the settings of a user or judge: text, or calls of the offered ``tools``.

        ``seed`` makes sampling repeatable where the endpoint respects it; every retry has one of its own.
        ``response_format`` is the JSON Schema of an answer in JSON, passed on as far as the endpoint takes it: the
        caller still checks. What ``accept`` finds unusable is asked for again. Raises as :meth:`ask`.
        """
        config, plain = self._config, [dict(message) for message in messages]
        assert isinstance(config, LlmConfig), "a policy's requests say all of it themselves: ask"
        temperature = config.temperature if temperature is None else temperature
        request = ChatRequest(
            plain, seed, temperature, config.max_tokens, tools, tool_choice, response_format, may_be_empty=may_be_empty
        )
        return await self.ask(request, config.total_seconds, accept)

    async def ask(self, request: ChatRequest, seconds: float, accept: Accept = lambda reply: None) -> Completion:
        """The reply to ``request``.

        Raises when no endpoint gives one within ``max_retries`` and ``seconds`` (waiting for limits included), as the
        role has it: :class:`UserFault`, :class:`JudgeFault`, and for a policy
        :class:`ContextLengthExceeded`, :class:`PromptRefused`, :class:`DeadlineExceeded`, :class:`ConfigError` for
        what no retry helps, or :class:`EngineError`.
        """
        config = self._config
        # Everything that the reply depends on.
        asked: Json = {"url": mask_secrets(config.base_url), "model": config.model, "extra": config.extra}
        if self._cache is not None:
            asked |= asdict(request)
            kept = await self._cache.get(asked)
            cached = None if kept is None else self._cache.parsed(Completion.of, kept)
            if cached is not None and accept(cached) is None:
                self.count("cache_hits")
                self._note(request, cached, time(), 0.0, "cache", config.model)
                return cached
        way = _Way(self._members, request, monotonic() + seconds)
        late = False
        try:
            async with asyncio.timeout(seconds):
                if reply := await self._travel(way, accept):
                    if self._cache is None:
                        return reply
                    # The one that was kept before, if there is one, so that everybody goes on with the same.
                    first = self._cache.parsed(Completion.of, await self._cache.put(asked, asdict(reply)))
                    return first if accept(first) is None else reply
        except TimeoutError:
            late = True
        # Raised outside the handlers: a chained exception would carry the request and its headers.
        raise self._fault(way, seconds if late else None)

    def _note(
        self, request: ChatRequest, outcome: Completion | RequestError | str, began: float, seconds: float,
        endpoint: str, model: str, *, error: str | None = None,
    ) -> None:  # fmt: skip
        """Have the record of the episode under way hold the request."""
        if (record := current_episode.get()) is None:
            return
        values: Json = {"sampling": {"seed": request.seed, "temperature": request.temperature} | request.sampling}
        reply: Json | None = None
        if isinstance(outcome, Completion):
            counted = ("prompt_tokens", "completion_tokens", "cached_tokens")
            values |= {name: outcome.usage.get(name) for name in counted}
            values["finish"] = "length" if outcome.truncated else "stop"
            reply = {"role": "assistant", "content": outcome.text}
            if outcome.calls:
                reply["tool_calls"] = [call.openai() for call in outcome.calls]
            if outcome.reasoning is not None:
                reply["reasoning_content"] = outcome.reasoning
        elif error is None:
            error = outcome if isinstance(outcome, str) else outcome.kind
        record.request(
            self._role, began, messages=list(request.messages), tools=request.tools, reply=reply,
            seconds=seconds, endpoint=endpoint, model=model, error=error, **values,
        )  # fmt: skip

    def count(self, name: str) -> None:
        """Add one to the metric ``name``."""
        self._accounts.count(name)

    def metrics(self) -> dict[str, float]:
        """Counters, cost and latencies since the last call; see docs/users.md for each."""
        return self._accounts.take()

    async def close(self) -> None:
        """Close the connections and the cache."""
        for member in self._members:
            await member.close()
        if self._cache is not None:
            await self._cache.close()

    async def _travel(self, way: _Way, accept: Accept) -> Completion | None:
        """The first usable reply; None when every endpoint was asked as often as it may be."""
        at = 0
        while places := way.open(self._config.max_retries):
            place = min(places, key=way.wait)
            if seconds := way.held(place):
                await way.sleep(place, seconds)
                continue
            self._accounts.count("retries", float(way.tried > 0))
            self._accounts.count("failovers", float(place != at))
            at = place
            # A policy's retry is the same request again: it follows faults of the endpoint, not of what it wrote.
            again = way.tried and not way.request.verbatim
            seed = derived_seed(way.request.seed, way.tried) if again else way.request.seed
            member, began, clock = self._members[place], time(), monotonic()
            asked = replace(way.request, seed=seed)
            try:
                outcome = await member.ask(asked, way.deadline)
            except BaseException as error:  # its time is up, or the episode's
                self._note(asked, type(error).__name__, began, monotonic() - clock, *member.named)
                raise
            if outcome is not None:
                refused = accept(outcome) if isinstance(outcome, Completion) else None
                reason = refused.reason if refused else member.clean(getattr(outcome, "reason", "")) or None
                self._note(asked, outcome, began, monotonic() - clock, *member.named, error=reason)
            if isinstance(outcome, Completion):
                if (refusal := refused) is None:
                    return outcome
                self.count("errors/rejected")
                reason = f"unusable reply: {refusal.reason}"
                outcome = RequestError("rejected", reason, "try another {here}.model", refusal.kind)
            if outcome is not None:
                if self._role == "user" and outcome.fault is not UserFaultKind.UNREACHABLE:
                    self.count(f"refused/{outcome.fault}")
                way.note(place, outcome)
                log.info("%r: %s", self._members[place], self._members[place].clean(outcome.reason))
        return None

    def _fault(self, way: _Way, late: float | None) -> MuaError:
        """What happened at each endpoint, and what fixes it; ``late``: the seconds that have passed in vain."""
        asked = {place: way.met(place) for place in way.last or (0,)}
        stories = []
        for place, met in asked.items():
            member = self._members[place]
            reason = member.clean(met.reason)
            if late is not None:
                reason = f"nothing usable within {late:g} s; last: {reason}"
            tries = f" after {way.tries[place]} requests" if met.retry or late is not None else ""
            here = f"{self._section}.fallbacks.{place - 1}" if place else self._section
            fix = met.fix.replace("{here}", here).replace("{role}", self._section)
            stories.append(f"{self._role} endpoint {member!r}: {reason}{tries}; {fix}")
        text = "; ".join(stories)
        # What an endpoint refuses or garbles, somebody has to fix.
        passing = any(met.kind in ("timeout", "connection", "rate_limit", "server") for met in asked.values())
        last = list(asked.values())[-1]
        by_policy = last.blame in (Blame.CONTEXT, Blame.POLICY)  # whose words and results are all that is asked about
        if self._role != "policy":
            fault: MuaError = JudgeFault(text, passing=passing)
            if self._role == "user":
                fault = UserFault(text, last.fault, passing=passing)
            fault.by_policy = by_policy and late is None
            return fault
        if late is not None:
            named = f"policy endpoint {self._members[0]!r}"
            return DeadlineExceeded(f"rollout.generate_seconds: {named} did not answer within {late:g} s")
        if by_policy:
            return ContextLengthExceeded(text) if last.blame is Blame.CONTEXT else PromptRefused(text)
        if last.blame is Blame.PERSON and not any(member.answered for member in self._members):
            return ConfigError(text)
        return EngineError(text, passing=last.kind != "unreadable")


class _Way:
    """One request's way through the endpoints: what it met at each, and when it may ask there again."""

    def __init__(self, members: Sequence[Connection], request: ChatRequest, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.last: dict[int, RequestError] = {}
        self.tries = [0] * len(members)
        self._members = members
        self._not_before = [0.0] * len(members)

    @property
    def tried(self) -> int:
        """Tries at all endpoints together."""
        return sum(self.tries)

    def met(self, place: int) -> RequestError:
        """What that endpoint gave last."""
        return self.last.get(place) or self._members[place].breaker.trouble or _NOT_ASKED

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

    def note(self, place: int, met: RequestError) -> None:
        """One try more, in vain."""
        longest = min(FIRST_BACKOFF_SECONDS * 2 ** self.tries[place], LONGEST_BACKOFF_SECONDS)
        self.last[place] = met
        self.tries[place] += 1
        if met.kind not in ("empty", "tool_call", "rejected"):  # these may be asked for again at once
            # Jitter on top of Retry-After too: the endpoint tells every waiting request the same moment.
            self._not_before[place] = monotonic() + met.wait_seconds + random.uniform(longest / 2, longest)


@dataclass(frozen=True, slots=True)
class Services:
    """The language models of a run that are not the policy: one client for users, one for judges.

    What domains and users share. Belongs to one event loop; either may be absent.
    """

    user: ChatClient | None = None
    judge: ChatClient | None = None

    @classmethod
    def from_config(cls, user: UserConfig, judge: JudgeConfig | None) -> Self:
        """Clients for the roles that the sections ``user`` and ``judge`` ask for."""
        return cls(
            user=ChatClient(user.llm) if user.llm is not None and user.asks_model else None,
            judge=ChatClient(judge.llm, "judge") if judge else None,
        )

    def metrics(self) -> dict[str, float]:
        """What users and judges cost since the last call, as ``user/llm/...`` and ``judge/llm/...``."""
        roles = {"user/llm": self.user, "judge/llm": self.judge}
        taken = {role: client.metrics() for role, client in roles.items() if client is not None}
        return {f"{role}/{name}": value for role, metrics in taken.items() for name, value in metrics.items()}

    async def close(self) -> None:
        """Close the connections."""
        for client in (self.user, self.judge):
            if client is not None:
                await client.close()


LOCK_SECONDS = 30.0
"""How long a write waits for another process's."""


class JsonCache:
    """Objects by request. Works in a thread of its own, so that a lock held elsewhere never holds up the event loop."""

    def __init__(self, path: Path, key: str, what: str, on_fault: Callable[[], None] = lambda: None) -> None:
        """``key`` names the setting in messages, ``what`` what is kept. Raises :class:`ConfigError` if the
        file is no cache.

        ``on_fault`` is called when the file cannot be read or written later: a disk that is full ends no run, because
        whoever was asked still answers.
        """
        self._named = f"{key}: {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False, isolation_level=None)
            self._store.execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            self._store.execute("SELECT request, reply FROM replies LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{key}: cannot keep {what} in {path}: {error}; name another file, or remove this one"
            ) from error
        self._on_fault = on_fault
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reply cache")

    async def get(self, request: Json) -> Json | None:
        """The reply kept for ``request``."""
        return await self._ask(request, None)

    async def put(self, request: Json, reply: Json) -> Json:
        """Keep ``reply`` unless there is one already; the one that is kept now."""
        return await self._ask(request, json.dumps(reply, ensure_ascii=False)) or reply

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    def parsed(self, read: Callable[[Any], T], kept: Any) -> T:
        """What ``read`` makes of something kept. Raises :class:`ConfigError` where it is not what was written."""
        try:
            return read(kept)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(
                f"{self._named} holds a reply that cannot be read; name another file, or remove this one"
            ) from error

    async def _ask(self, request: Json, reply: str | None) -> Json | None:
        text = json.dumps(request, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._kept, digest, reply)
        except sqlite3.Error as error:
            self._on_fault()
            log.warning("%s: %s", self._named, error)
        return None

    def _kept(self, digest: str, reply: str | None) -> Json | None:
        """The reply of that request, which is ``reply`` if there was none."""
        if reply is not None:
            self._store.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (digest, reply))
        row = self._store.execute("SELECT reply FROM replies WHERE request = ?", (digest,)).fetchone()
        return None if row is None else self.parsed(lambda text: dict(read_json(text)), row[0])
