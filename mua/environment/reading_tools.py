"""The tools ``read_page``, ``browse`` and ``search`` beside a domain's: pages of the web or of a corpus.

::

    start() ──► corpus read and ranked, a parser started      once for all domains of a run
    open()  ──► ReadingSession ── call ──► text, or one line that says why there is none (the policy's to read)
                                     ├──► JudgeFault          the endpoint of ``browse``: judge_error
                                     └──► ReadingFault        parsers, the search service: environment_error

What a URL, a page or a query brings about is never a fault: else a policy could have an episode that goes badly
repeated by reading something broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from mua.config.tools import ReadingKind, ToolsConfig
from mua.environment.endpoint.services import ChatClient, JsonCache
from mua.environment.extras import ExtraTool, ExtraToolFault, ExtraToolsNotStarted
from mua.environment.protocol import Task, ToolResult
from mua.environment.reading.answers import LONGEST_QUESTION, PageAnswers
from mua.environment.reading.corpus import Corpus, check_corpus
from mua.environment.reading.hosts import HostRules
from mua.environment.reading.page import parts_of
from mua.environment.reading.page_error import PageError
from mua.environment.reading.pages import Pages
from mua.environment.reading.parsers import Parsers
from mua.environment.reading.ranking import Ranking, extract
from mua.environment.reading.search_service import SearchResult, SearchService, numbered
from mua.environment.reading.transport import Resolve
from mua.environment.tool_arguments import validate_arguments
from mua.types import Json, ToolSchema
from mua.utils.errors import ConfigError, EnvironmentFault

LONGEST_QUERY = 500
_SECTION = "environment.tools"
_URL = {"type": "string", "description": "Address of the page.", "minLength": 1}


class ReadingFault(ExtraToolFault):
    """Reading failed by no doing of the policy."""


class ReadingNotStarted(ExtraToolsNotStarted):
    """Pages cannot be read at all."""


class ReadingTools:
    """The reading tools of ``environment.tools`` for one domain; see :class:`mua.environment.extras.ExtraTools`."""

    def __init__(self, config: ToolsConfig, judge: ChatClient | None, resolve: Resolve | None = None) -> None:
        """``resolve`` in place of the machine's resolver. Raises :class:`ConfigError` for what is not there."""
        self._offered = [
            ExtraTool(_schema(kind, config), f"{_SECTION}.{kind}", f"set {_SECTION}.{kind}.name")
            for kind in config.reading
        ]
        self._kinds = {tool.name: kind for kind, tool in config.reading.items()}
        if config.browse is not None and judge is None:
            raise ConfigError(f"{_SECTION}.browse asks the endpoint of judge.llm, which there is none of here")
        if config.pages.corpus is not None:
            check_corpus(config.pages.corpus, f"{_SECTION}.pages.corpus")
        self._shared = SharedLibraries(config, judge, resolve)
        self._library: Library | None = None

    async def start(self) -> Sequence[ExtraTool]:
        """Read the corpus, start a parser. Raises :class:`ConfigError` and :class:`ReadingNotStarted`."""
        if self._library is None:
            try:
                self._library = await self._shared.take()
            except EnvironmentFault as fault:
                raise ReadingNotStarted(str(fault), passing=fault.passing) from fault
        return self._offered

    async def open(self, task: Task, seed: int) -> ReadingSession:
        """For one rollout; it holds nothing of its own."""
        assert self._library is not None
        return ReadingSession(self._offered, self._kinds, self._library)

    async def close(self) -> None:
        """Give back what domains share; the last one closes it."""
        library, self._library = self._library, None
        if library is not None:
            await self._shared.give_back()


class ReadingSession:
    """One rollout's view of the tools; see :class:`mua.environment.extras.ExtraSession`."""

    def __init__(self, offered: Sequence[ExtraTool], kinds: dict[str, ReadingKind], library: Library) -> None:
        self.tools = offered
        self._kinds = kinds
        self._library = library

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run a tool. Raises :class:`ReadingFault` and :class:`JudgeFault`."""
        schema = next(tool.schema for tool in self.tools if tool.schema.name == name)
        if wrong := validate_arguments(schema, arguments):
            return ToolResult(f"error: {wrong}", error=True)
        library = self._library
        do: Any = {"read_page": library.read_page, "browse": library.browse, "search": library.search}
        try:
            return ToolResult(await do[self._kinds[name]](**arguments))
        except PageError as error:
            return ToolResult(f"error: {error}", error=True)
        except EnvironmentFault as fault:
            raise ReadingFault(str(fault), passing=fault.passing) from fault

    async def close(self) -> None:
        return None


class Library:
    """What all rollouts of a run read from. Started once; a start that failed may be tried again."""

    def __init__(self, config: ToolsConfig, judge: ChatClient | None, resolve: Resolve | None) -> None:
        self.started = False
        self._config = config
        pages, section = config.pages, f"{_SECTION}.pages"
        self._rules = HostRules(pages)
        self._parsers = Parsers(pages.parsers, pages.parse_seconds, section)
        self._cache = None if pages.cache is None else JsonCache(pages.cache, f"{section}.cache", "pages")
        self._resolve = resolve
        self._pages: Pages | None = None
        self._ranking: Ranking | None = None
        self._service: SearchService | None = None
        self._answers = None if config.browse is None or judge is None else PageAnswers(config.browse, judge)

    async def start(self) -> None:
        """Read the corpus and rank it, or show that pages can be parsed; get ready for searches."""
        config, pages, corpus = self._config, self._config.pages, None
        if pages.corpus is not None:
            corpus = await Corpus.load(
                pages.corpus, self._parsers, f"{_SECTION}.pages.corpus", links=pages.links,
                longest=pages.text_characters,
            )  # fmt: skip
        if config.read_page is not None or config.browse is not None:
            if corpus is None:
                await self._parsers.start()
            self._pages = Pages(pages, corpus, self._parsers, self._cache, self._resolve)
        if config.search is not None and config.search.url:
            self._service = SearchService(config.search, self._cache, f"{_SECTION}.search")
        elif config.search is not None and corpus is not None:
            self._ranking = await asyncio.to_thread(Ranking, corpus.pages)
        self.started = True

    async def read_page(self, url: str, page: int = 1) -> str:
        """A part of a page, under its heading."""
        assert self._pages is not None
        assert self._config.read_page is not None
        found = await self._pages.page(url)
        parts = parts_of(found.text, self._config.read_page.page_characters)
        if page > len(parts):
            raise PageError(f"there is no page {page}; the last one is {len(parts)}")
        return f"{found.heading()}\npage {page} of {len(parts)}\n\n{parts[page - 1].strip()}"

    async def browse(self, url: str, question: str) -> str:
        """An answer from a page."""
        assert self._pages is not None
        assert self._answers is not None
        return await self._answers.answer(await self._pages.page(url), question)

    async def search(self, query: str, k: int | None = None) -> str:
        """Pages that fit a query, best first."""
        config = self._config.search
        assert config is not None
        count, left_out = k or config.count, 0
        if not query.strip():
            raise PageError("query is empty")
        if self._service is not None:
            every = await self._service.search(query, count)
            found = [one for one in every if self._rules.allows(one.url)]
            left_out, found = len(every) - len(found), found[:count]
        else:
            assert self._ranking is not None
            found = await asyncio.to_thread(_of_corpus, self._ranking, query, count, config.snippet_characters)
        told = numbered(found) if found else "There are no results."
        return f"{told}\n\n({left_out} more are on hosts that may not be read)" if left_out else told

    async def close(self) -> None:
        """Close connections, files and processes."""
        if self._pages is not None:
            await self._pages.close()
        if self._service is not None:
            await self._service.close()
        await self._parsers.close()
        if self._cache is not None:
            await self._cache.close()


class SharedLibraries:
    """One library for all domains of a run: same loop, same configuration, same judge."""

    open: ClassVar[dict[Any, tuple[asyncio.Lock, list[SharedLibraries], Library]]] = {}

    def __init__(self, config: ToolsConfig, judge: ChatClient | None, resolve: Resolve | None) -> None:
        self._config, self._judge, self._resolve = config, judge, resolve

    async def take(self) -> Library:
        """The library, started."""
        loop = asyncio.get_running_loop()
        self._key = (loop, self._config.model_dump_json(), id(self._judge), id(self._resolve))
        if self._key not in self.open:
            library = Library(self._config, self._judge, self._resolve)
            self.open[self._key] = (asyncio.Lock(), [], library)
        lock, users, library = self.open[self._key]
        users.append(self)
        try:
            async with lock:
                if not library.started:
                    await library.start()
        except BaseException:
            await self.give_back()
            raise
        return library

    async def give_back(self) -> None:
        """The last one closes it."""
        _, users, library = self.open[self._key]
        users.remove(self)
        if not users:
            del self.open[self._key]
            await library.close()


def _of_corpus(ranking: Ranking, query: str, count: int, longest: int) -> list[SearchResult]:
    return [
        SearchResult(page.url, page.title, extract(page.text, query, longest)) for page in ranking.best(query, count)
    ]


def _schema(kind: ReadingKind, config: ToolsConfig) -> ToolSchema:
    tool = config.reading[kind]
    source = "the collection" if config.pages.corpus is not None else "the web"
    if kind == "read_page":
        said = f"Read a page of {source} as text. Long pages come in parts, which are numbered."
        properties: Json = {
            "url": _URL,
            "page": {"type": "integer", "minimum": 1, "description": "Which part of a long page; 1 if left out."},
        }
        required = ["url"]
    elif kind == "browse":
        said = f"Ask a question about a page of {source} and get an answer from it, with quotations."
        question = {"type": "string", "minLength": 1, "maxLength": LONGEST_QUESTION}
        properties = {"url": _URL, "question": question | {"description": "What you want to know from the page."}}
        required = ["url", "question"]
    else:
        assert config.search is not None
        said = f"Search {'the web' if config.search.url else source} and get addresses, titles and extracts."
        query = {"type": "string", "minLength": 1, "maxLength": LONGEST_QUERY, "description": "Words to look for."}
        k = {"type": "integer", "minimum": 1, "maximum": config.search.most}
        properties = {"query": query, "k": k | {"description": f"How many results; {config.search.count} if left out."}}
        required = ["query"]
    form = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return ToolSchema(tool.name, tool.description or said, form)
