"""A search service on the web instead of the corpus: the tool servers' client with the options of this gym.

The request is ``POST search_url`` with ``{"q": query, "num": count}`` and the key, if there is one, in a header; the
answer is an object with a list of results, each with a link, a title and a snippet. Whatever goes wrong is a fault of
the infrastructure, never an empty result: the episode is tried again, not scored.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from environments.kit.options import Option
from environments.kit.ranking import Document
from environments.servers.page_text import PageError
from environments.servers.search_service import SearchService
from environments.servers.web_settings import SearchTool
from mua.utils.errors import ConfigError, EnvironmentFault

OPTIONS: Mapping[str, Option] = {
    "search_url": "",
    "search_key_env": "",
    "search_key_header": "X-API-KEY",
    "search_results": "organic",
    "search_seconds": 10.0,
}
"""``search_url`` empty: the local corpus. ``search_key_env`` names the environment variable that holds the key."""
_BODY = {"q": "{query}", "num": "{count}"}
_FIELDS = {"url": "link", "title": "title", "snippet": "snippet"}


class WebSearch:
    """One service, with a client for each event loop; safe to share among episodes."""

    def __init__(self, options: Mapping[str, Option]) -> None:
        """Raises :class:`ConfigError` when the named environment variable is not set."""
        headers = {}
        if variable := str(options["search_key_env"]):
            if not (key := os.environ.get(variable)):
                raise ConfigError(f"environment.options.search_key_env: {variable} is not set; export the key there")
            headers = {str(options["search_key_header"]): key}
        self._tool = SearchTool.model_validate(
            {"url": options["search_url"], "headers": headers, "body": _BODY, "results": options["search_results"],
             "fields": _FIELDS, "answer_seconds": options["search_seconds"], "snippet_characters": 4000, "retries": 0}
        )  # fmt: skip
        self._services: WeakKeyDictionary[asyncio.AbstractEventLoop, SearchService] = WeakKeyDictionary()

    async def search(self, query: str, count: int) -> list[Document]:
        """At most ``count`` results; raises :class:`EnvironmentFault` for anything but a readable answer in time."""
        loop = asyncio.get_running_loop()
        if (service := self._services.get(loop)) is None:
            service = self._services[loop] = SearchService(self._tool, None, "environment.options.search")
        try:
            found = await service.search(query, count)
        except PageError as error:
            raise EnvironmentFault(f"environment.options.search_url: {error}") from None
        return [Document(one.title, one.snippet) for one in found[:count]]
