"""One OpenAI-compatible chat endpoint, shared by every user that speaks through it.

Bounds requests in flight, retries what may pass (429, 5xx, timeouts, dropped connections, unusable replies) with
jittered exponential backoff, and turns everything else into one :class:`mua.errors.UserFault`. The API key is
handed to the client and appears in no message, representation or exception chain of this module.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import openai

from mua.config.schema import LlmUserConfig
from mua.errors import UserFault

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 30.0
_RETRIED_STATUS = frozenset({408, 409, 425, 429})
_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_MENDS = {
    400: "check user.llm.model, temperature and max_tokens",
    401: "check user.llm.api_key",
    403: "check that user.llm.api_key may use this model",
    404: "check user.llm.base_url (it usually ends in /v1) and user.llm.model",
    429: "lower user.llm.concurrency or raise user.llm.max_retries and total_seconds",
}


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why one request gave no reply."""

    reason: str
    mend: str
    retry: bool
    wait_seconds: float = 0.0
    """What the endpoint asked for by Retry-After."""


class ChatEndpoint:
    """Chat completions of one endpoint and model; at most ``concurrency`` requests in flight."""

    def __init__(self, config: LlmUserConfig) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.concurrency)
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=config.api_key.get_secret_value() or "none",
            max_retries=0,
            timeout=config.request_seconds,
        )

    def __repr__(self) -> str:
        return f"ChatEndpoint({_without_credentials(self._config.base_url)}, model {self._config.model})"

    async def complete(self, messages: Sequence[Mapping[str, str]], *, seed: int) -> str:
        """The reply to ``messages``, reasoning blocks removed, never empty.

        Raises :class:`mua.errors.UserFault` when the endpoint refuses, when ``max_retries`` retries are used up,
        or when ``total_seconds`` pass (waiting for a free slot included).
        """
        seconds, trouble = self._config.total_seconds, _Trouble("no free slot yet", "raise user.llm.concurrency", True)
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(deadline):
                for attempt in range(self._config.max_retries + 1):
                    reply = await self._request(messages, seed + attempt)
                    if isinstance(reply, str):
                        return reply
                    trouble = reply
                    if not trouble.retry or attempt == self._config.max_retries:
                        break
                    await self._back_off(attempt, trouble, deadline)
        except TimeoutError:
            trouble = _Trouble(f"nothing usable within {seconds:g} s; last: {trouble.reason}", trouble.mend, True)
        # Raised outside the handlers: a chained exception would carry the request and its headers.
        tries = f" after {attempt + 1} requests" if trouble.retry else ""
        raise UserFault(f"{self._named()}: {self._clean(trouble.reason)}{tries}; {trouble.mend}")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _request(self, messages: Sequence[Mapping[str, str]], seed: int) -> str | _Trouble:
        seconds = self._config.request_seconds
        try:
            # httpx's own timeouts count from byte to byte; this one bounds the whole request.
            async with self._slots, asyncio.timeout(seconds):
                return _text(await self._create(messages, seed))
        except (TimeoutError, openai.APITimeoutError):
            return _Trouble(
                f"no answer within {seconds:g} s", "raise user.llm.request_seconds or look at the server", True
            )
        except openai.APIStatusError as error:
            return _status_trouble(error)
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            reason = f"connection failed ({type(cause).__name__}: {cause})"
            return _Trouble(reason, "check user.llm.base_url and that the server runs", True)
        except (ValueError, openai.APIError) as error:
            # ValueError: a body announced as JSON that is none.
            return _garbage(f"{type(error).__name__}: {error}")

    async def _create(self, messages: Sequence[Mapping[str, str]], seed: int) -> Any:
        return await self._client.chat.completions.create(
            model=self._config.model,
            messages=[dict(message) for message in messages],  # type: ignore[misc]
            temperature=self._config.temperature,
            max_tokens=self._config.max_tokens,
            seed=seed & 0x7FFFFFFF,
        )

    async def _back_off(self, attempt: int, trouble: _Trouble, deadline: float) -> None:
        longest = min(FIRST_BACKOFF_SECONDS * 2**attempt, LONGEST_BACKOFF_SECONDS)
        # Jitter on top of Retry-After too: the endpoint tells every waiting request the same moment.
        delay = trouble.wait_seconds + random.uniform(longest / 2, longest)
        log.info("%r: %s; retry %d in %.1f s", self, self._clean(trouble.reason), attempt + 1, delay)
        if asyncio.get_running_loop().time() + delay >= deadline:
            raise TimeoutError
        await asyncio.sleep(delay)

    def _named(self) -> str:
        return f"user endpoint {_without_credentials(self._config.base_url)} (model {self._config.model})"

    def _clean(self, text: str) -> str:
        """One line, shortened, without the key: some endpoints quote it in their refusal."""
        key = self._config.api_key.get_secret_value()
        if len(key) > len("none"):
            text = text.replace(key, "<api key>")
        return " ".join(text.split())[:500]


def _text(response: Any) -> str | _Trouble:
    try:
        content = response.choices[0].message.content
    except (AttributeError, IndexError, TypeError):
        return _garbage("no choices[0].message.content")
    if not isinstance(content, str):
        return _garbage(f"message content is {type(content).__name__}, not text")
    text = _THINKING.sub("", content).strip()
    return text or _garbage("the reply is empty")


def _garbage(reason: str) -> _Trouble:
    return _Trouble(
        f"unusable reply: {reason}", "check that user.llm.base_url is an OpenAI-compatible chat endpoint", True
    )


def _status_trouble(error: openai.APIStatusError) -> _Trouble:
    status = error.status_code
    retry = status in _RETRIED_STATUS or status >= 500
    mend = _MENDS.get(status, "look at the server's log" if status >= 500 else "check the section user.llm")
    wait = retry_after_seconds(error.response.headers.get("retry-after"), datetime.now(UTC)) if retry else 0.0
    return _Trouble(f"HTTP {status} {error.response.reason_phrase}: {error.message}", mend, retry, wait)


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


def _without_credentials(url: str) -> str:
    """``https://name:password@host`` is legal and would show the password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
