"""A search service on the web instead of the corpus: one HTTP request a search, JSON both ways.

The request is ``POST search_url`` with ``{"q": query, "num": count}`` and the key, if there is one, in a header; the
answer is an object with a list of results, each with a title and a snippet. Whatever goes wrong is a fault of the
infrastructure, never an empty result: the episode is tried again, not scored.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from environments.gyms._shared.game import Option
from environments.kit.ranking import Document
from mua.utils.errors import ConfigError, EnvironmentFault
from mua.utils.masking import mask_secrets

OPTIONS: Mapping[str, Option] = {
    "search_url": "",
    "search_key_env": "",
    "search_key_header": "X-API-KEY",
    "search_results": "organic",
    "search_seconds": 10.0,
}
"""``search_url`` empty: the local corpus. ``search_key_env`` names the environment variable that holds the key."""
CONNECTIONS = 32


class WebSearch:
    """One service. Connections are pooled for each event loop; safe to share among episodes."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        """Raises :class:`ConfigError` when the named environment variable is not set."""
        self._url = str(options["search_url"])
        self._field = str(options["search_results"])
        self._seconds = float(options["search_seconds"])
        self._headers = {}
        if variable := str(options["search_key_env"]):
            if not (key := os.environ.get(variable)):
                raise ConfigError(f"environment.options.search_key_env: {variable} is not set; export the key there")
            self._headers = {str(options["search_key_header"]): key}
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    async def search(self, query: str, count: int) -> list[Document]:
        """At most ``count`` results; raises :class:`EnvironmentFault` for anything but a readable answer in time."""
        try:
            async with asyncio.timeout(self._seconds):
                response = await self._client().post(self._url, json={"q": query, "num": count}, headers=self._headers)
            response.raise_for_status()
            return [_document(one) for one in response.json()[self._field][:count]]
        except TimeoutError:
            raise EnvironmentFault(
                f"{self}: no answer within {self._seconds:g} s (environment.options.search_seconds)",
                passing=True,
            ) from None
        except httpx.HTTPStatusError as error:
            # Not chained: the request's headers hold the key.
            trouble, passing = f"HTTP {error.response.status_code}", error.response.is_server_error
        except httpx.HTTPError as error:
            trouble, passing = f"{type(error).__name__}: {error}", True
        except (ValueError, KeyError, TypeError) as error:
            passing = False
            trouble = f"no list {self._field!r} of results with title and snippet in the answer ({error!r})"
        raise EnvironmentFault(f"{self}: {mask_secrets(trouble)}", passing=passing)

    def __str__(self) -> str:
        return f"search service {mask_secrets(self._url)}"

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
            self._clients[loop] = httpx.AsyncClient(limits=limits, timeout=self._seconds)
        return self._clients[loop]


def _document(result: Any) -> Document:
    title, text = result["title"], result["snippet"]
    if not (isinstance(title, str) and isinstance(text, str)):
        raise TypeError("title and snippet must be texts")
    return Document(title, text)
