"""Bytes of a page to text: character set, main text by trafilatura, else all text of the body by lxml; PDF by pypdf.

Runs in a process of its own (:mod:`parse_worker`): what others wrote may make a parser run for minutes or
end its process.
"""

from __future__ import annotations

import codecs
import io
import logging
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

MAIN, WHOLE, PLAIN, PDF = "main", "whole", "plain", "pdf"
"""How a text was found: the main text of an HTML page, all text of its body, or a page that is text
already, or all pages of a PDF."""
LONGEST_TITLE = 300
MOST_PAGES = 500
"""Pages of one PDF that are read; of a longer one the first."""
CUT = "only the first {} characters of the page were kept"
_NEAR = 0.1
"""How much shorter a part may be for it to end at the end of a line or word."""

_META = re.compile(rb'<meta[^>]{1,200}?charset\s*=\s*["\']?\s*([\w.:-]{1,40})', re.IGNORECASE)
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_CODECS = (
    "utf-8 utf-16-le utf-16-be ascii iso8859-2 iso8859-3 iso8859-4 iso8859-5 iso8859-6 iso8859-7 iso8859-8 iso8859-10 "
    "iso8859-13 iso8859-14 iso8859-15 iso8859-16 cp866 cp874 cp1250 cp1251 cp1252 cp1253 cp1254 cp1255 cp1256 cp1257 "
    "cp1258 koi8-r koi8-u mac-roman mac-cyrillic gb2312 gbk gb18030 big5 big5hkscs euc_jp iso2022_jp shift_jis euc_kr "
    "cp949 iso8859-1 iso8859-9"
)
_KNOWN = {codecs.lookup(name).name for name in _CODECS.split()}
_WIDER = {"ascii": "cp1252", "iso8859-1": "cp1252", "iso8859-9": "cp1254", "gb2312": "gb18030", "gbk": "gb18030",
          "euc_kr": "cp949", "shift_jis": "cp932"}  # fmt: skip
"""What browsers read under a name (WHATWG's Encoding Standard): a superset that pages really use."""
_GUESSED_FROM = 65_536
_ENOUGH = 16
"""Bytes beyond ASCII, of which fewer tell nothing of a character set."""
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_ENDS = ("\r\n", "\r", "\x85", "\u2028", "\u2029")
_BLANK_LINES = re.compile(r"\n[ \t]*\n(?:[ \t]*\n)*")
_SPACES = re.compile(r"[ \t\xa0]+")
_UNSEEN = ("script", "style", "noscript", "template", "head", "svg", "iframe", "object")
_BLOCKS = tuple(
    (  # noqa: SIM905
        "address article aside blockquote br dd details div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 "
        "h5 h6 header hr li main nav ol option p pre section summary table tr ul"
    ).split()
)


class PageError(Exception):
    """The page cannot be had, or the call is refused: by what the policy asked for, or by what the web answered.

    Its text is for the policy, in one line.
    """


@dataclass(frozen=True, slots=True)
class Page:
    """A page as text."""

    url: str
    """Of the last redirect."""
    title: str
    text: str
    how: str = PLAIN
    """How the text was found; one of ``MAIN``, ``WHOLE``, ``PLAIN`` and ``PDF``."""
    cut: str = ""
    """What of the page is not in ``text``, as words; empty: nothing."""

    def heading(self) -> str:
        """Title, address and what a reader has to know of the text, a line each."""
        lines = [f"Title: {self.title}"] if self.title else []
        lines.append(f"URL: {self.url}")
        if self.how not in (MAIN, PLAIN, PDF):
            lines.append("Text: everything on the page, since no main text was found")
        return "\n".join([*lines, f"Cut: {self.cut}"] if self.cut else lines)


def parts_of(text: str, longest: int) -> list[str]:
    """``text`` in parts of at most ``longest`` characters, each to the end of a line or word where one is near.

    Parts follow on one another: joined they are the text.
    """
    parts, at = [], 0
    while at < len(text):
        end = at + longest
        if end < len(text):
            near = end - max(1, int(longest * _NEAR))
            for mark in ("\n", " "):
                if (found := text.rfind(mark, near, end)) >= 0:
                    end = found + 1
                    break
        parts.append(text[at:end])
        at = end
    return parts or [""]


class PageText(NamedTuple):
    """What there is to read of a page."""

    title: str
    text: str
    how: str
    """One of ``MAIN``, ``WHOLE``, ``PLAIN`` and ``PDF``."""
    cut: bool
    """Whether there was more text than was asked for."""


def page_text(
    body: bytes, *, html: bool, charset: str, url: str, links: bool, longest: int, pdf: bool = False
) -> PageText:
    """The text of one page, HTML, a PDF or plain, at most ``longest`` characters; ``charset`` as its header says, empty
    where it does not.

    Raises whatever a parser raises.
    """
    cut = False
    if pdf:
        title, text, cut = pdf_text(body, longest)
        how = PDF
    elif html:
        title, text, how = _of_html(decoded(body, charset, html=True), url, links)
    else:
        title, text, how = "", decoded(body, charset, html=False), PLAIN
    text = _BLANK_LINES.sub("\n\n", _clean(text)).strip()
    title = " ".join(_clean(title).split())[:LONGEST_TITLE]
    return PageText(title, text[:longest], how, cut or len(text) > longest)


def decoded(body: bytes, charset: str, *, html: bool) -> str:
    """``body`` as text. A byte order mark tells its character set, else the header, else a ``meta`` element, else the
    bytes themselves; a claim that the bytes contradict counts for nothing."""
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace")
    meta = _META.search(body[:4096]) if html else None
    claims = [_codec(charset), _codec(meta[1].decode("ascii", "replace")) if meta else None, "utf-8"]
    for name in filter(None, claims):
        try:
            return body.decode(name)
        except UnicodeDecodeError as error:
            ends = error.end >= len(body) - 4 and error.reason.startswith(("unexpected end", "incomplete"))
            if ends and not body[: error.start].isascii():
                return body.decode(name, "ignore")  # right so far, and cut within a character
    return body.decode(_guess(body), "replace")


def _guess(body: bytes) -> str:
    """A character set of one byte a character, or an old one of East Asia, by the bytes alone."""
    if sum(sign > 127 for sign in body[:_GUESSED_FROM]) < _ENOUGH:
        return "cp1252"
    from charset_normalizer import from_bytes

    best = from_bytes(body[:_GUESSED_FROM], cp_exclusion=["utf_16", "utf_16_le", "utf_16_be", "utf_32", "utf_7"]).best()
    return (_codec(best.encoding) if best is not None else None) or "cp1252"


def _codec(name: str) -> str | None:
    """Python's codec for a name of the web, if it is one of text."""
    try:
        found = codecs.lookup(name).name if name.isascii() and name else ""
    except (LookupError, ValueError):
        return None
    if found == "utf-16":
        found = "utf-16-le"
    return _WIDER.get(found, found) if found in _KNOWN else None


def _of_html(source: str, url: str, links: bool) -> tuple[str, str, str]:
    import trafilatura
    from lxml import etree, html  # type: ignore[import-untyped]

    # As bytes: of a text with an XML declaration lxml reads nothing.
    parser = html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    data = source.replace("\0", "\ufffd").encode("utf-8", "replace")
    try:
        tree = html.document_fromstring(data, parser=parser)
    except etree.ParserError:  # there is no element
        return "", "", WHOLE
    title = tree.findtext(".//title") or ""
    main = trafilatura.extract(
        tree, url=url or None, output_format="markdown", include_links=links, include_comments=False, favor_recall=True
    )
    if main:
        return title, main, MAIN
    return title, _whole(html.document_fromstring(data, parser=parser)), WHOLE


def _whole(tree: Any) -> str:
    """All text that a browser would show, a line for each block."""
    from lxml import etree

    etree.strip_elements(tree, *_UNSEEN, with_tail=False)
    for element in tree.iter(*_BLOCKS):
        element.text = "\n" + (element.text or "")
        element.tail = "\n" + (element.tail or "")
    lines = (_SPACES.sub(" ", line).strip() for line in tree.text_content().split("\n"))
    return "\n".join(filter(None, lines))


def _clean(text: str) -> str:
    for end in _ENDS:
        text = text.replace(end, "\n")
    return _CONTROL.sub("\ufffd", text)


def pdf_text(body: bytes, longest: int) -> tuple[str, str, bool]:
    """Title, text, and whether pages were left out: those beyond :data:`MOST_PAGES`, or ``longest`` characters.

    Pages are apart by a blank line. Of an encrypted PDF the user's password must be empty. Raises whatever pypdf
    raises.
    """
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # a line for each thing that is broken
    reader = pypdf.PdfReader(io.BytesIO(body), strict=False)
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("the PDF has a password")
    texts, characters = list[str](), 0
    for number, page in enumerate(reader.pages):
        if number >= MOST_PAGES or characters > longest:
            return _title(reader), "\n\n".join(texts), True
        texts.append(page.extract_text())
        characters += len(texts[-1]) + 2
    return _title(reader), "\n\n".join(texts), False


def _title(reader: object) -> str:
    title = getattr(getattr(reader, "metadata", None), "title", None)
    return title if isinstance(title, str) else ""
