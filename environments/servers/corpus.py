"""Pages of one's own: a file of JSON lines, or a folder of such files and of ``.html``, ``.pdf``, ``.md`` and
``.txt``.

Read whole when a run starts, in the order of paths and lines, so every mistake in it is found before the first episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environments.servers.page_text import CUT, LONGEST_TITLE, Page, PageError
from environments.servers.parsers import Parsers
from mua.utils.errors import ConfigError
from mua.utils.strict_json import JsonError, open_file, printable, read_file, read_json

log = logging.getLogger(__name__)

LONGEST_LINE = 2**26
_KEYS = {"url", "title", "text"}
_LONGEST_URL = 2000
_ENDINGS = (".html", ".htm", ".pdf", ".md", ".txt", ".jsonl")
_AT_ONCE = 64


class Corpus:
    """The pages of ``path``, in order."""

    def __init__(self, pages: list[Page], path: Path) -> None:
        self.pages = pages
        self.path = path
        self._by_url = {page.url: page for page in pages}

    @classmethod
    async def load(cls, path: Path, parsers: Parsers, key: str, *, links: bool, longest: int) -> Corpus:
        """Read it all. ``key`` names the setting in messages; ``longest`` characters of each page are kept.

        Raises :class:`ConfigError` for anything that is no page, naming file and line.
        """
        found = await asyncio.to_thread(lambda: list(_files(path, key)))
        pages: list[Page] = []
        where: dict[str, str] = {}
        for at in range(0, len(found), _AT_ONCE):
            some = found[at : at + _AT_ONCE]
            for group in await asyncio.gather(
                *(_of_file(file, url, parsers, key, links, longest) for file, url in some)
            ):
                for place, page in group:
                    if page.url in where:
                        raise ConfigError(f"{key}: {place}: the url {page.url!r} is that of {where[page.url]} too")
                    where[page.url] = place
                    pages.append(page)
        if not pages:
            raise ConfigError(f"{key}: {path} has no page; it takes {', '.join(_ENDINGS)}")
        log.info("%s: %d pages of %s", key, len(pages), path)
        return cls(pages, path)

    def page(self, url: str) -> Page:
        """The page of that URL. Raises :class:`PageError`."""
        asked = url.strip().partition("#")[0]
        for form in (url, asked, asked.removeprefix("./").removeprefix("/")):
            if (page := self._by_url.get(form)) is not None:
                return page
        raise PageError("there is no page with this url")


def check_corpus(path: Path, key: str) -> None:
    """Raises :class:`ConfigError` where there is no such file or folder."""
    if not path.exists():
        raise ConfigError(f"{key}: there is no {path}; name a folder of pages, or a file of JSON lines")
    if path.is_file() and path.suffix != ".jsonl":
        raise ConfigError(f"{key}: {path} is no .jsonl; name a file of JSON lines, or a folder of pages")


def _files(path: Path, key: str) -> Iterator[tuple[Path, str]]:
    """Each file and its path in the corpus."""
    check_corpus(path, key)
    if path.is_file():
        yield path, path.name
        return
    for file in sorted(path.rglob("*")):
        inner = file.relative_to(path)
        hidden = any(part.startswith(".") for part in inner.parts)
        if file.suffix.lower() in _ENDINGS and not hidden and not file.is_dir():
            yield file, inner.as_posix()


async def _of_file(
    file: Path, url: str, parsers: Parsers, key: str, links: bool, longest: int
) -> list[tuple[str, Page]]:
    """The pages of one file, each with the place where it stands."""
    try:
        if file.suffix == ".jsonl":
            return await asyncio.to_thread(lambda: list(_lines(file, key, longest)))
        body = await asyncio.to_thread(read_file, file)
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror or error}") from error
    if not body.strip():
        return []
    html = file.suffix.lower() in (".html", ".htm")
    try:
        got = await parsers.parse(body, html=html, pdf=file.suffix.lower() == ".pdf", links=links, longest=longest)
    except PageError as error:
        raise ConfigError(f"{key}: {file}: {error}; repair it, or take it out of the folder") from error
    if not got.text:
        return []
    title = got.title or _heading(got.text) or url
    cut = CUT.format(longest) if got.cut else ""
    return [(str(file), Page(url, title, got.text, got.how, cut))]


def _heading(text: str) -> str:
    """The heading that a page in Markdown begins with."""
    first = text.partition("\n")[0]
    return first.lstrip("#").strip()[:LONGEST_TITLE] if first.startswith("# ") else ""


def _lines(file: Path, key: str, longest: int) -> Iterator[tuple[str, Page]]:
    with open_file(file) as lines:
        number = 0
        while line := lines.readline(LONGEST_LINE):
            number += 1
            place = f"{file}, line {number}"
            if len(line) >= LONGEST_LINE:
                raise ConfigError(f"{key}: {place}: longer than {LONGEST_LINE} bytes")
            if not line.strip():
                continue
            try:
                yield place, _page_of(read_json(line), longest)
            except JsonError as error:
                raise ConfigError(f"{key}: {place}: no JSON: {error}") from None
            except ValueError as error:
                raise ConfigError(f"{key}: {place}: {error}") from None


def _page_of(value: Any, longest: int) -> Page:
    if not isinstance(value, dict):
        raise ValueError("a line holds an object with url, title and text")
    for name in ("url", "text", *(["title"] if "title" in value else [])):
        if not isinstance(value.get(name), str):
            raise ValueError(f"{name!r} has to be a text")
    url = value["url"].strip()
    if not 0 < len(url) <= _LONGEST_URL or any(not sign.isprintable() for sign in url):
        raise ValueError(f"url {printable(url, 60)!r} has to be of 1 to {_LONGEST_URL} printable characters")
    if not value["text"].strip():
        raise ValueError("text is empty")
    title = " ".join(value.get("title", "").split())[:LONGEST_TITLE]
    text = value["text"].strip()
    return Page(url, title or url, text[:longest], cut=CUT.format(longest) if len(text) > longest else "")
