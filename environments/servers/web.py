"""Tool server ``web``: ``read_page``, ``browse`` and ``search``, over pages of the web or of a corpus.

::

    start of the server ──► corpus read and ranked, or a parser started
    call ──► text, or one line that says why there is none (the policy's to read)
         └─► JudgeFault (the endpoint of ``browse``) or EnvironmentFault (parsers, the search service)

What a URL, a page or a query brings about is never a fault: else a policy could have an episode that goes badly
repeated by reading something broken. All rollouts of a domain read from one server (``isolation: shared``): it has one
corpus, one memory of pages and one set of parsers, and whatever a page does to it, it does not do to the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from environments.kit.ranking import Ranking, extract
from environments.servers.corpus import Corpus
from environments.servers.hosts import HostRules
from environments.servers.page_answers import LONGEST_QUESTION, PageAnswers
from environments.servers.page_text import Page, PageError, parts_of
from environments.servers.pages import Pages
from environments.servers.parsers import Parsers
from environments.servers.search_service import SearchResult, SearchService, numbered
from environments.servers.serving import ServedTool, ToolError, serve
from environments.servers.transport import Resolve
from environments.servers.web_settings import SearchTool, WebSettings
from mua.environment.endpoint.services import ChatClient, JsonCache
from mua.types import Json, ToolSchema

LONGEST_QUERY = 500
_URL = {"type": "string", "description": "Address of the page.", "minLength": 1}


@asynccontextmanager
async def web_tools(settings: WebSettings, resolve: Resolve | None = None) -> AsyncIterator[Sequence[ServedTool]]:
    """The tools that ``settings`` offer, ready to be called; ``resolve`` in place of the machine's resolver.

    Raises :class:`ConfigError` for a corpus or a package that is not there, :class:`EnvironmentFault` where no parser
    starts.
    """
    config, corpus, tools = settings.pages, None, list[ServedTool]()
    source = "the web" if config.corpus is None else "the collection"
    async with AsyncExitStack() as stack:
        parsers = Parsers(config.parsers, config.parse_seconds, "pages")
        stack.push_async_callback(parsers.close)
        cache = None if config.cache is None else JsonCache(config.cache, "pages.cache", "pages")
        if cache is not None:
            stack.push_async_callback(cache.close)
        if config.corpus is not None:
            corpus = await Corpus.load(
                config.corpus, parsers, "pages.corpus", links=config.links, longest=config.text_characters
            )
        elif settings.read_page is not None or settings.browse is not None:
            await parsers.start()
        pages = Pages(config, corpus, parsers, cache, resolve)
        stack.push_async_callback(pages.close)
        if settings.read_page is not None:
            tools.append(_read_page(pages, settings.read_page.page_characters, source))
        if settings.browse is not None:
            assert settings.judge is not None
            judge = ChatClient(settings.judge, "judge")
            stack.push_async_callback(judge.close)
            tools.append(_browse(pages, PageAnswers(settings.browse, judge), source))
        if settings.search is not None and settings.search.url:
            service = SearchService(settings.search, cache, "search")
            stack.push_async_callback(service.close)
            tools.append(_search_of_service(service, HostRules(config), settings.search))
        elif settings.search is not None:
            assert corpus is not None
            ranking = await asyncio.to_thread(Ranking[Page], corpus.pages)
            tools.append(_search_of_corpus(ranking, settings.search))
        yield tools


def _read_page(pages: Pages, longest: int, source: str) -> ServedTool:
    async def read_page(url: str, page: int = 1) -> str:
        found = await pages.page(url)
        parts = parts_of(found.text, longest)
        if page > len(parts):
            raise PageError(f"there is no page {page}; the last one is {len(parts)}")
        return f"{found.heading()}\npage {page} of {len(parts)}\n\n{parts[page - 1].strip()}"

    number = {"type": "integer", "minimum": 1, "description": "Which part of a long page; 1 if left out."}
    said = f"Read a page of {source} as text. Long pages come in parts, which are numbered."
    return _tool("read_page", said, {"url": _URL, "page": number}, ["url"], read_page)


def _browse(pages: Pages, answers: PageAnswers, source: str) -> ServedTool:
    async def browse(url: str, question: str) -> str:
        return await answers.answer(await pages.page(url), question)

    asked = {"type": "string", "minLength": 1, "maxLength": LONGEST_QUESTION,
             "description": "What you want to know from the page."}  # fmt: skip
    said = f"Ask a question about a page of {source} and get an answer from it, with quotations."
    return _tool("browse", said, {"url": _URL, "question": asked}, ["url", "question"], browse)


def _search_of_service(service: SearchService, rules: HostRules, config: SearchTool) -> ServedTool:
    async def search(query: str, k: int | None = None) -> str:
        if not query.strip():
            raise PageError("query is empty")
        count = k or config.count
        every = await service.search(query, count)
        found = [one for one in every if rules.allows(one.url)]
        told = numbered(found[:count]) if found else "There are no results."
        left_out = len(every) - len(found)
        return f"{told}\n\n({left_out} more are on hosts that may not be read)" if left_out else told

    return _search_tool("the web", config, search)


def _search_of_corpus(ranking: Ranking[Page], config: SearchTool) -> ServedTool:
    def best(query: str, count: int) -> list[SearchResult]:
        longest = config.snippet_characters
        return [
            SearchResult(page.url, page.title, extract(page.text, query, longest))
            for page in ranking.best(query, count)
        ]

    async def search(query: str, k: int | None = None) -> str:
        if not query.strip():
            raise PageError("query is empty")
        found = await asyncio.to_thread(best, query, k or config.count)
        return numbered(found) if found else "There are no results."

    return _search_tool("the collection", config, search)


def _search_tool(source: str, config: SearchTool, run: Any) -> ServedTool:
    query = {"type": "string", "minLength": 1, "maxLength": LONGEST_QUERY, "description": "Words to look for."}
    count = {"type": "integer", "minimum": 1, "maximum": config.most,
             "description": f"How many results; {config.count} if left out."}  # fmt: skip
    said = f"Search {source} and get addresses, titles and extracts."
    return _tool("search", said, {"query": query, "k": count}, ["query"], run)


def _tool(name: str, said: str, properties: Json, required: list[str], run: Any) -> ServedTool:
    async def told(**arguments: Any) -> str:
        try:
            text: str = await run(**arguments)
        except PageError as error:
            raise ToolError(f"error: {error}") from None
        return text

    form = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return ServedTool(ToolSchema(name, said, form), told, read_only=True)


if __name__ == "__main__":
    serve("web", WebSettings, web_tools)
