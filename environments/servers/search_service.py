"""A search service behind a URL that answers with JSON.

Whose fault it is that there is no answer says :mod:`mua.environment.blame`. What a query brings about is the policy's
to read. What may be the query's or the service's is decided by a query of our own: where the service answers that, the
policy is told that its query cannot be answered. Else it is an :class:`EnvironmentFault`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx

from environments.servers.fetching import received
from environments.servers.page_text import PageError
from environments.servers.web_settings import SearchTool
from mua.environment.blame import Blame, blame
from mua.environment.endpoint.services import JsonCache
from mua.types import Json
from mua.utils.errors import EnvironmentFault
from mua.utils.masking import mask_secrets
from mua.utils.strict_json import JsonError, printable, read_json

log = logging.getLogger(__name__)

NO_LIST = "has no list of results in its answer"
CONTROL = "weather"
"""A query that every service answers."""
_AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 507, 520, 521, 522, 523, 524, 529})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_LONGEST_URL, _LONGEST_TITLE = 2000, 300
_MOST_READ = 500


class SearchResult(NamedTuple):
    """One result."""

    url: str
    title: str
    snippet: str


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """Why there was no answer; ``again``: whether to ask once more, after ``wait`` seconds at least."""

    reason: str
    again: bool = True
    wait: float = 0.0
    blame: Blame = Blame.CONTROL


class SearchService:
    """Asks one service. Belongs to one event loop."""

    def __init__(self, config: SearchTool, cache: JsonCache | None, key: str) -> None:
        """``key`` names the section in messages."""
        self._config = config
        self._cache = cache
        self._key = key
        self._slots = asyncio.Semaphore(config.concurrency)
        self._listed = False
        """Whether an answer ever had a list where ``results`` says: services leave out one that would be empty."""
        self._client = httpx.AsyncClient(
            headers={name: value.get_secret_value() for name, value in config.headers.items()},
            timeout=httpx.Timeout(config.answer_seconds),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency),
        )

    async def search(self, query: str, count: int) -> list[SearchResult]:
        """The results in the service's order. Raises :class:`PageError` and :class:`EnvironmentFault`."""
        asked: Json = {"search": mask_secrets(self._config.url), "body": self._config.body, "query": query,
                       "count": count, "results": self._config.results, "fields": self._config.fields}  # fmt: skip
        if self._cache is not None and (kept := await self._cache.get(asked)) is not None:
            return [SearchResult(*one) for one in kept["found"]]
        found = await self._asked(query, count)
        if self._cache is not None:
            found = [SearchResult(*one) for one in (await self._cache.put(asked, {"found": found}))["found"]]
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _asked(self, query: str, count: int, tries: int | None = None) -> list[SearchResult]:
        trouble = _NoAnswer("")
        for attempt in range(tries or self._config.retries + 1):
            if attempt:
                longest = min(_FIRST_PAUSE_S * 2**attempt, _LONGEST_PAUSE_S)
                await asyncio.sleep(trouble.wait + random.uniform(longest / 2, longest))
            async with self._slots:
                outcome = await self._once(query, count)
            if not isinstance(outcome, _NoAnswer):
                self._listed = True
                return outcome
            trouble = outcome
            log.info("%s: %s", self._key, trouble.reason)
            if not trouble.again:
                break
        if trouble.blame is Blame.CONTROL and query != CONTROL:
            try:
                await self._asked(CONTROL, count, tries=1)
            except (EnvironmentFault, PageError):
                pass
            else:  # the service is well
                if trouble.reason == NO_LIST:
                    return []
                raise PageError("the search cannot answer this query")
        named = mask_secrets(self._config.url.partition("?")[0])
        raise EnvironmentFault(
            f"{self._key}: the search service {named} {trouble.reason}; check {self._key}.url, headers and results",
            passing=trouble.again,
        )

    async def _once(self, query: str, count: int) -> list[SearchResult] | _NoAnswer:
        config = self._config
        url = config.url.replace("{query}", quote(query, safe="")).replace("{count}", str(count))
        body = _filled(config.body, query, count) if config.body else None
        seconds = config.answer_seconds
        try:
            async with (
                asyncio.timeout(seconds),
                self._client.stream("POST" if body else "GET", url, json=body, headers=_ACCEPT) as answer,
            ):
                if answer.status_code != 200:
                    found, again = blame("search", [answer.status_code]), answer.status_code in _AGAIN
                    if found is Blame.POLICY:
                        raise PageError("the search refuses this query")
                    return _NoAnswer(f"answers with status {answer.status_code}", again, _retry_after(answer), found)
                text = bytearray()
                try:
                    async for piece in received(answer):
                        text += piece
                        if len(text) > config.answer_bytes:
                            told = f"answers with more than {config.answer_bytes} bytes (answer_bytes)"
                            return _NoAnswer(told, False)
                except PageError:
                    return _NoAnswer("answers in pieces too small to be read", False)
        except TimeoutError:
            return _NoAnswer(f"does not answer within {seconds:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            return _NoAnswer(f"cannot be asked: {type(error).__name__}")
        try:
            return self._results(read_json(bytes(text), strict=False), count)
        except JsonError as error:
            return _NoAnswer(f"answers with no JSON: {error}")

    def _results(self, answer: Any, count: int) -> list[SearchResult] | _NoAnswer:
        listed = _at(answer, self._config.results)
        if not isinstance(listed, list):
            if error := isinstance(answer, dict) and (answer.get("error") or answer.get("errors")):
                whose = blame("search", (), str(error))  # some say so that they have found nothing
                return [] if whose is Blame.POLICY else _NoAnswer(f"says {printable(str(error), 200)}", blame=whose)
            return [] if listed is None and self._listed else _NoAnswer(NO_LIST, again=False)
        found = []
        for one in listed[:_MOST_READ]:
            parts = {name: _at(one, path) for name, path in self._config.fields.items()}
            url = parts.get("url")
            if isinstance(url, str) and 0 < len(url) <= _LONGEST_URL and url.isprintable() and " " not in url:
                title = _line(parts.get("title"), _LONGEST_TITLE)
                found.append(
                    SearchResult(url, title or url, _line(parts.get("snippet"), self._config.snippet_characters))
                )
        if listed and not found:
            return _NoAnswer(f"has no address at {self._config.fields['url']!r} in any result", False)
        return found


_ACCEPT = {"accept": "application/json", "accept-encoding": "identity"}


def _retry_after(answer: httpx.Response) -> float:
    said = answer.headers.get("retry-after", "")
    return min(float(said), _LONGEST_PAUSE_S) if said.isascii() and said.isdigit() else 0.0


def _filled(value: Any, query: str, count: int) -> Any:
    """``value`` with the query and the count in its texts; a text that is ``{count}`` alone becomes a number."""
    if isinstance(value, dict):
        return {name: _filled(item, query, count) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, query, count) for item in value]
    if not isinstance(value, str):
        return value
    if value == "{count}":
        return count
    return query.join(part.replace("{count}", str(count)) for part in value.split("{query}"))


def _at(value: Any, path: str) -> Any:
    """What stands in nested objects (lists by number) under keys joined by dots; None where nothing does."""
    for key in path.split(".") if path else ():
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _line(value: Any, longest: int) -> str:
    text = " ".join(value[: 20 * longest].split()) if isinstance(value, str) else ""
    return printable(text, longest)


def numbered(found: Sequence[SearchResult]) -> str:
    """Results as the policy reads them."""
    return "\n\n".join(
        f"{place}. {one.title}\n   {one.url}" + (f"\n   {one.snippet}" if one.snippet else "")
        for place, one in enumerate(found, 1)
    )
