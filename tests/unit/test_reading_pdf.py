"""PDF as text, and PDF that was made to do harm: in the processes of parsing, within their limits.

The files are made here, byte by byte or by pypdf. Not covered: fonts with encodings of their own, scans, right-to-left
scripts, which are pypdf's matter.
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pypdf
import pytest

from environments.servers.corpus import Corpus
from environments.servers.page_text import MOST_PAGES, PDF, PageError, pdf_text
from environments.servers.pages import Pages
from environments.servers.parsers import Parsers
from environments.servers.web_settings import PagesConfig
from mua.utils.errors import ConfigError
from tests.web_support import host, page

KEY = "pages"


def stream(content: bytes) -> bytes:
    packed = zlib.compress(content, 9)
    return b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed)


def text_page(text: str) -> bytes:
    return b"BT /F1 12 Tf 72 720 Td (" + text.encode() + b") Tj ET"


def pdf(contents: Sequence[bytes], kids: bytes | None = None, more: bytes = b"") -> bytes:
    """A file of one page for each content stream; ``kids``: the pages' numbers in place of those."""
    first = 5
    numbers = [first + 2 * place for place in range(len(contents))]
    named = kids or b" ".join(b"%d 0 R" % number for number in numbers)
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>" % (named, len(contents)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Title (Returns) >>",
    ]
    for number, content in zip(numbers, contents, strict=True):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (number + 1)
        )
        objects.append(content if content.startswith(b"<<") else stream(content))
    body, places = bytearray(b"%PDF-1.4\n"), list[int]()
    for number, one in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    body += more
    at = len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    body += b"".join(b"%010d 00000 n \n" % place for place in places)
    body += b"trailer\n<< /Size %d /Root 1 0 R /Info 4 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, at)
    return bytes(body)


def encrypted(password: str) -> bytes:
    writer, made = pypdf.PdfWriter(clone_from=io.BytesIO(pdf([text_page("secret")]))), io.BytesIO()
    writer.encrypt(password, algorithm="RC4-128")
    writer.write(made)
    return made.getvalue()


@asynccontextmanager
async def parsing(seconds: float = 10.0) -> AsyncIterator[Parsers]:
    parsers = Parsers(1, seconds, KEY)
    try:
        yield parsers
    finally:
        await parsers.close()


def test_the_text_of_all_pages_and_the_title() -> None:
    body = pdf([text_page("First page."), text_page("Second page.")])
    assert pdf_text(body, 1000) == ("Returns", "First page.\n\nSecond page.", False)
    assert pdf_text(body, 5) == ("Returns", "First page.", True)
    broken = re.sub(rb"startxref\n\d+", b"startxref\n7", body)
    assert pdf_text(broken, 1000)[1] == "First page.\n\nSecond page."  # found by reading all of it
    assert pdf_text(encrypted(""), 1000)[1] == "secret"
    with pytest.raises(ValueError, match="password"):
        pdf_text(encrypted("x"), 1000)


def test_a_book_is_read_up_to_a_number_of_pages() -> None:
    _, text, cut = pdf_text(pdf([text_page("x")] * (MOST_PAGES + 5)), 10**6)
    assert (text.count("x"), cut) == (MOST_PAGES, True)


async def test_hostile_files_cost_their_process_alone() -> None:
    zeros = zlib.compress(b" " * 2**29, 9)
    nested = zlib.compress(zeros, 9)
    bombs = {
        "half a gigabyte of spaces": pdf([b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream"
                                          % (len(zeros), zeros)]),
        "packed twice": pdf([b"<< /Length %d /Filter [/FlateDecode /FlateDecode] >>\nstream\n%s\nendstream"
                             % (len(nested), nested)]),
        "a page tree in a ring": pdf([text_page("x")], kids=b"2 0 R 2 0 R"),
        "a page that is its own content": pdf([b"<< /Length 6 0 R >>\nstream\nx\nendstream"]),
        "operators without end": pdf([b"q " * 3_000_000]),
        "open brackets": pdf([b"[" * 100_000]),
        "no object at all": b"%PDF-1.7\n" + b"x" * 1000,
        "a cross-reference table that names itself": pdf([text_page("x")]).replace(
            b"/Info 4 0 R", b"/Prev 9 /XRefStm 9"),
        "a header alone": b"%PDF-1.7\n%%EOF",
        "a million objects": pdf([text_page("x")], more=b"9 0 obj\n1\nendobj\n" * 90_000),
    }  # fmt: skip
    async with parsing(1.0) as parsers:
        for name, body in bombs.items():
            with suppress(PageError):  # or there is some text
                found = await parsers.parse(body, html=False, pdf=True, longest=10_000)
                assert len(found.text) <= 10_000, name
        assert (await parsers.parse(pdf([text_page("after")]), html=False, pdf=True)).text == "after"


async def test_pages_of_the_web_and_of_a_corpus(tmp_path: Path) -> None:
    body = pdf([text_page("Goods may be returned.")])
    big = pdf([text_page("x")], more=b"%" + b"x" * 2**17 + b"\n")
    async with host() as web, parsing() as parsers:
        web.answers |= {
            "/a": page(body, "application/pdf"), "/b": page(body, None), "/c": page(big, "application/pdf"),
        }  # fmt: skip
        pages = Pages(PagesConfig(allow_private=[web.place], page_bytes=2**16), None, parsers, None)
        try:
            for path in ("/a", "/b"):
                found = await pages.page(web.url(path))
                assert (found.title, found.text, found.how) == ("Returns", "Goods may be returned.", PDF)
            with pytest.raises(PageError, match="a PDF of more than 65536 bytes"):
                await pages.page(web.url("/c"))
        finally:
            await pages.close()
    (tmp_path / "returns.pdf").write_bytes(body)
    async with parsing() as parsers:
        corpus = await Corpus.load(tmp_path, parsers, KEY, links=True, longest=1000)
        assert corpus.page("returns.pdf").text == "Goods may be returned."
        (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 no")
        with pytest.raises(ConfigError, match=r"broken.pdf: no text can be made"):
            await Corpus.load(tmp_path, parsers, KEY, links=True, longest=1000)
