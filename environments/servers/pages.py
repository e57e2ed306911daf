"""Pages by URL, from the web or a corpus, as text that is the same for everybody who reads it in one run.

::

    page(url) ── in memory, not too old ───────────────────────────────────────► Page
        └─ somebody is reading it: wait for that ─┐
        └─ in the cache's file ───────────────────┤
        └─ fetch ──► parse ──► keep ──────────────┘

Only pages are kept, never what went wrong: the next call tries again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import asdict
from time import monotonic

from environments.servers.corpus import Corpus
from environments.servers.fetching import Fetcher
from environments.servers.page_text import CUT, Page, PageError
from environments.servers.parsers import Parsers
from environments.servers.transport import Resolve
from environments.servers.web_settings import PagesConfig
from mua.environment.endpoint.services import JsonCache

_REMEMBERED_CHARACTERS = 64_000_000


class Pages:
    """The pages of one configuration. Belongs to one event loop."""

    def __init__(
        self,
        config: PagesConfig,
        corpus: Corpus | None,
        parsers: Parsers,
        cache: JsonCache | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._parsers = parsers
        self._cache = cache
        self._fetcher = None if corpus is not None else Fetcher(config, resolve)
        self._known: OrderedDict[str, tuple[float, Page]] = OrderedDict()
        self._characters = 0
        self._reading: dict[str, asyncio.Task[Page]] = {}

    async def page(self, url: str) -> Page:
        """The page. Raises :class:`PageError`, and :class:`EnvironmentFault` without parsers."""
        if self._corpus is not None:
            return self._corpus.page(url)
        url = self._address(url)
        until, page = self._known.get(url, (0.0, None))
        if page is not None and monotonic() < until:
            return page
        if (task := self._reading.get(url)) is None:
            # Others may wait for the same: it has deadlines of its own, and no cancellation reaches it.
            task = self._reading[url] = asyncio.create_task(self._read(url), name="read a page")
            task.add_done_callback(lambda done: self._done(url, done))
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connections. What is still being read for nobody is given up."""
        for task in list(self._reading.values()):
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        if self._fetcher is not None:
            await self._fetcher.close()

    def _address(self, url: str) -> str:
        assert self._fetcher is not None
        return str(self._fetcher.rules.target(url.strip()).url)

    async def _read(self, url: str) -> Page:
        key = {"page": url, "links": self._config.links, "bytes": self._config.page_bytes,
               "characters": self._config.text_characters}  # fmt: skip
        if self._cache is not None and (kept := await self._cache.get(key)) is not None:
            return Page(**kept)
        page = await self._fetched(url)
        if self._cache is not None:
            page = Page(**await self._cache.put(key, asdict(page)))
        return page

    async def _fetched(self, url: str) -> Page:
        assert self._fetcher is not None
        config, got = self._config, await self._fetcher.fetch(url)
        text = await self._parsers.parse(
            got.body, html=got.kind == "html", pdf=got.kind == "pdf", charset=got.charset, url=got.url,
            links=config.links, longest=config.text_characters,
        )  # fmt: skip
        if not text.text:
            raise PageError("the page has no text")
        cut = f"only the first {config.page_bytes} bytes of the page were read" if got.cut else ""
        if text.cut:
            cut = CUT.format(config.text_characters)
        return Page(got.url, text.title, text.text, text.how, cut)

    def _done(self, url: str, task: asyncio.Task[Page]) -> None:
        del self._reading[url]
        if task.cancelled() or task.exception() is not None or not self._config.fresh_seconds:
            return
        page = task.result()
        _, before = self._known.pop(url, (0.0, None))
        self._characters += len(page.text) - (len(before.text) if before is not None else 0)
        self._known[url] = (monotonic() + self._config.fresh_seconds, page)
        while self._characters > _REMEMBERED_CHARACTERS:
            _, (_, oldest) = self._known.popitem(last=False)
            self._characters -= len(oldest.text)
