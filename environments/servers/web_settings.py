"""Settings of the tool server ``web``: ``pages``, the tools ``read_page``, ``browse`` and ``search``, and ``judge``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, model_validator

from mua.config.environment import LlmConfig
from mua.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?::(?P<port>[0-9]{1,5}))?")


def host_and_port(entry: str) -> tuple[str, int | None]:
    """Both parts of an entry such as ``example.org``, ``10.0.0.7:8080`` or ``[fd00::1]:80``.

    Raises ValueError for anything else, a URL for instance.
    """
    found = _HOST.fullmatch(entry)
    if found is None or int(found["port"] or 1) not in range(1, 65_536):
        raise ValueError(f"{entry!r} is no host; write example.org, example.org:8080, 10.0.0.7:80 or [fd00::1]:80")
    return found["host"].strip("[]").lower(), int(found["port"]) if found["port"] else None


class PagesConfig(Section):
    """Where pages come from, whom tools may turn to, and how much of a page is read."""

    corpus: Annotated[Path, Field(strict=False)] | None = None
    """A file of JSON lines (``url``, ``title``, ``text``), or a folder of such files and of ``.html``, ``.pdf``,
    ``.md`` and ``.txt``, whose URLs are their paths in it. Only its pages are read then; null: the web."""
    allow: list[str] = []
    """Only these hosts, each with everything below it (``example.org`` is ``docs.example.org`` too), or with a port
    only there (``example.org:8080``); empty: all. Counts for every redirect, and for what ``search.url`` finds."""
    block: list[str] = []
    """Not these, in the same form; comes before ``allow``."""
    allow_private: list[str] = []
    """``host:port`` that may be at a private address, such as ``wiki.corp:443``; every other host must be at public
    ones alone."""
    fetch_seconds: PositiveFloat = 20.0
    """Deadline of fetching one page, redirects included, however slowly it comes."""
    page_bytes: Annotated[int, Field(ge=1024, le=2**26)] = 2**22
    """How much of a page is read, counted after decompression; what is left out is said."""
    redirects: NonNegative = 5
    """Redirects that are followed."""
    per_host: Positive = 16
    """Pages fetched at once from one host; others wait, within ``fetch_seconds``."""
    links: bool = True
    """Whether links of a page are part of its text, written as in Markdown."""
    text_characters: Annotated[int, Field(ge=1000, le=4_000_000)] = 1_000_000
    """How much text of a page is kept; what is left out is said."""
    parsers: Positive = 2
    """Processes that make text of pages."""
    parse_seconds: PositiveFloat = 10.0
    """CPU time of making text of one page, after which it is given up."""
    fresh_seconds: NonNegativeFloat = 3600.0
    """How long a page of the web is kept in memory, so that the rollouts of a group read the same."""
    cache: Annotated[Path, Field(strict=False)] | None = None
    """An SQLite file that keeps pages of the web and answers of ``search.url`` for good, for runs to be repeated; made
    if it is not there. Several processes of one machine may share it."""
    user_agent: Annotated[str, Field(pattern=r"^[\x20-\x7e]{1,200}$")] = "mua"
    """How fetches introduce themselves."""
    proxy: str = ""
    """HTTP proxy through which pages are fetched, such as ``http://proxy.corp:3128`` or ``${HTTPS_PROXY}``; empty:
    none, whatever the environment names. It connects to what a name means to it: have it refuse addresses inside."""
    proxy_resolves: bool = False
    """With ``proxy``, on machines without names of the internet: names are not looked up here, and that no address
    inside is read is the proxy's to see to. Otherwise a name must be known here, and public, before it is asked for."""

    @model_validator(mode="after")
    def _hosts(self) -> Self:
        for key in ("allow", "block", "allow_private"):
            for entry in getattr(self, key):
                try:
                    _, port = host_and_port(entry)
                except ValueError as error:
                    raise ValueError(f"{key}: {error}") from None
                if key == "allow_private" and port is None:
                    raise ValueError(f"allow_private: {entry!r} needs its port, as in {entry}:443")
        return self

    @model_validator(mode="after")
    def _through_proxy(self) -> Self:
        if self.proxy:
            parts = urlsplit(self.proxy)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
                raise ValueError(
                    "proxy: write http://HOST:PORT, with NAME:PASSWORD@ before HOST where it asks for them"
                )
        elif self.proxy_resolves:
            raise ValueError("proxy_resolves belongs to proxy; name one, or leave it out")
        return self


class ReadPageTool(Section):
    """Gives a page in parts; ``{}`` for the defaults."""

    page_characters: Annotated[int, Field(ge=200, le=100_000)] = 8000
    """Characters that one call gives."""


class BrowseTool(Section):
    """Answers a question from a page, by the endpoint ``judge``; ``{}`` for the defaults."""

    part_characters: Annotated[int, Field(ge=1000, le=400_000)] = 40_000
    """Characters of a page that one request holds; a longer page is read in parts."""
    parts: Annotated[int, Field(ge=1, le=8)] = 4
    """Parts of a page that are read; what is left out is said."""
    short_characters: Annotated[int, Field(ge=0, le=100_000)] = 1500
    """A page up to this long is given as it is, without a request."""
    answer_characters: Annotated[int, Field(ge=100, le=50_000)] = 4000
    """Longest answer from one part; a longer one is asked for again."""


class SearchTool(Section):
    """Searches ``pages.corpus``, or asks the service at ``url``; ``{}`` for the defaults."""

    count: Annotated[int, Field(ge=1, le=20)] = 5
    """Results of a call that does not say how many."""
    most: Annotated[int, Field(ge=1, le=50)] = 10
    """Results of one call at most."""
    snippet_characters: Annotated[int, Field(ge=40, le=4000)] = 300
    """Longest extract of one result."""
    url: str = ""
    """Address of a service that answers with JSON, with ``{query}`` and, if it takes one, ``{count}`` in it."""
    headers: dict[str, SecretStr] = {}
    """Sent with every request, such as ``{X-API-KEY: "${SEARCH_KEY}"}``."""
    body: dict[str, Any] = {}
    """Sent as JSON by POST, with ``{query}`` and ``{count}`` in its texts; empty: a GET."""
    results: str = "results"
    """Where the list of results is in the answer: keys joined by dots, such as ``web.results``."""
    fields: dict[Literal["url", "title", "snippet"], str] = {"url": "url", "title": "title", "snippet": "snippet"}
    """Where each result has its address, title and extract, likewise."""
    answer_seconds: PositiveFloat = 20.0
    """Deadline of one request to the service."""
    retries: NonNegative = 3
    """Further requests after 429, 5xx, a lost connection, no answer in time or one that cannot be read."""
    answer_bytes: Annotated[int, Field(ge=1024, le=2**26)] = 2**21
    """Longest answer of the service."""
    concurrency: Positive = 32
    """Requests to the service at once."""

    @model_validator(mode="after")
    def _service(self) -> Self:
        of_service = {"headers", "body", "results", "fields", "answer_seconds", "retries", "answer_bytes",
                      "concurrency"}  # fmt: skip
        if not self.url and (idle := sorted(of_service & self.model_fields_set)):
            raise ValueError(f"{idle[0]} belongs to url, a search service; leave it out")
        if self.count > self.most:
            raise ValueError(f"count ({self.count}) is more than most ({self.most})")
        if not self.url:
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("url must begin with http:// or https:// and name a host")
        if "{" in parts.netloc:
            raise ValueError("url: {query} and {count} belong behind the host")
        if "{query}" not in self.url and "{query}" not in str(self.body):
            raise ValueError("{query} is missing: put it into url or body")
        if "url" not in self.fields:
            raise ValueError("fields.url is missing: it says where a result has its address")
        return self


class WebSettings(Section):
    """What the tool server reads and offers. A tool that is null is not offered."""

    read_page: ReadPageTool | None = None
    """Gives a page in parts."""
    browse: BrowseTool | None = None
    """Answers a question from a page. Needs ``judge``."""
    search: SearchTool | None = None
    """Finds pages."""
    pages: PagesConfig = PagesConfig()
    """What the three read."""
    judge: LlmConfig | None = None
    """The endpoint that ``browse`` asks."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pages, search = self.pages, self.search
        readers = self.read_page is not None or self.browse is not None
        if not readers and search is None:
            raise ValueError("there is no tool; add read_page: {}, browse: {} or search: {}")
        if (self.browse is None) != (self.judge is None):
            raise ValueError("browse and judge, the endpoint that it asks, belong together; add or leave out both")
        if search is not None and not search.url and pages.corpus is None:
            raise ValueError(
                "search has nothing to search: give pages.corpus, pages of your own, or search.url, a service"
            )
        asked = {"allow", "block", "cache"} if search is not None and search.url else set()
        of_web = {"allow", "block", "cache", "allow_private", "fetch_seconds", "page_bytes", "redirects", "per_host",
                  "fresh_seconds", "user_agent"}  # fmt: skip
        web = readers and pages.corpus is None
        if not web and (idle := sorted((of_web - asked) & pages.model_fields_set)):
            raise ValueError(f"pages.{idle[0]} belongs to pages of the web, and no tool reads any; leave it out")
        return self
