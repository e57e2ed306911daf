"""Pages as text: character sets, main text, hostile HTML in its process, parts, corpora, what is kept, ranking.

Parsers are real processes, hosts real servers on loopback. Fetching itself is in test_reading_fetch.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from environments.kit.ranking import Ranking, extract, words_of
from environments.servers.corpus import Corpus
from environments.servers.page_text import MAIN, PLAIN, WHOLE, Page, PageError, decoded, page_text, parts_of
from environments.servers.pages import Pages
from environments.servers.parsers import Parsers
from environments.servers.web_settings import PagesConfig
from mua.environment.endpoint.services import JsonCache
from mua.utils.errors import ConfigError
from tests.tables import cases_of
from tests.web_support import ARTICLE, Host, host, page

cases = cases_of("reading_pages")

RUSSIAN = "Мы вернём деньги за посылку в течение девяти дней после её получения. " * 4
KEY = "pages"


# ---- text of one page


@pytest.mark.parametrize(
    ("body", "charset", "text"),
    [
        ("caf\u00e9 \u20ac".encode(), "utf-8", "caf\u00e9 \u20ac"),
        ("caf\u00e9 \u20ac".encode("cp1252"), "iso-8859-1", "caf\u00e9 \u20ac"),  # as browsers read it
        ("caf\u00e9".encode("latin-1"), "utf-8", "caf\u00e9"),  # a wrong claim
        ("\u4f60\u597d".encode("gb18030"), "gb2312", "\u4f60\u597d"),
        ("\u043f\u0440\u0438\u0432\u0435\u0442".encode("koi8-r"), "KOI8-R", "\u043f\u0440\u0438\u0432\u0435\u0442"),
        (b"\xef\xbb\xbf" + "\u00fc".encode(), "latin-1", "\u00fc"),  # a mark is stronger than the header
        ("\ufeff\u00fc".encode("utf-16-le"), "utf-8", "\u00fc"),
        ("<meta charset='shift_jis'>\u65e5\u672c".encode("cp932"), "", "<meta charset='shift_jis'>\u65e5\u672c"),
        ("<meta http-equiv=x content='text/html; charset=windows-1251'>\u0434\u0430".encode("cp1251"), "",
         "<meta http-equiv=x content='text/html; charset=windows-1251'>\u0434\u0430"),
        ("\u00fc".encode(), "no-such-charset", "\u00fc"),
        ("\u00fc".encode(), "idna", "\u00fc"),
        ("\u00fc".encode(), "unicode_escape", "\u00fc"),
        ("\u00fc".encode(), "zlib", "\u00fc"),
        ("\u00fc".encode(), "\u00fc\0", "\u00fc"),
        ("\u00fc abc \u20ac".encode()[:-1], "utf-8", "\u00fc abc "),  # cut within a character
        (RUSSIAN.encode("cp1251"), "utf-8", RUSSIAN),
        (b"", "", ""),
    ],
)  # fmt: skip
def test_character_sets(body: bytes, charset: str, text: str) -> None:
    assert decoded(body, charset, html=True) == text


@pytest.mark.parametrize("charset", ["", "utf-8", "utf-16", "shift_jis", "iso-2022-jp", "gb18030", "ascii", "utf-7"])
def test_any_bytes_become_some_text(charset: str) -> None:
    for body in (bytes(range(256)) * 20, b"\xff" * 99, b"\x1b$B" * 50, b"\0\0\xd8" * 40):
        text = page_text(body, html=True, charset=charset, url="", links=True, longest=1000).text
        text.encode()
        assert "\0" not in text


def of_html(source: str, **more: Any) -> Any:
    settings = {"html": True, "charset": "utf-8", "url": "http://h.org/a/b", "links": True, "longest": 10_000}
    return page_text(source.encode(), **settings | more)


def test_the_main_text_with_its_links() -> None:
    got = of_html(ARTICLE)
    assert (got.title, got.how, got.cut) == ("Returns & refunds", MAIN, False)
    assert got.text.startswith("# Returns\n\nParagraph 1 explains")
    assert "[refund](http://h.org/refund/39)" in got.text
    assert not any(part in got.text for part in ("alert", "Home"))
    assert "](" not in of_html(ARTICLE, links=False).text


def test_everything_on_the_page_where_there_is_no_main_text() -> None:
    got = of_html("<title>T</title><style>p{}</style><div hidden></div><table><tr><td>a<td>b</table><script>x</script>")
    assert (got.title, got.how) in (("T", WHOLE), ("T", MAIN))
    assert "a" in got.text
    assert not any(part in got.text for part in ("x", "p{}"))
    got = of_html("<footer>Our<b> address</b><br>Main  Street<script>x</script></footer><aside>Next</aside>")
    assert (got.how, got.text) == (WHOLE, "Our address\nMain Street\nNext")


def test_texts_are_cleaned_and_cut() -> None:
    got = page_text(b"a\r\nb\x00\x08\xef\xbf\xbe\n \n\n\n\nc  ", html=False, charset="", url="", links=True, longest=99)
    assert (got.text, got.how) == ("a\nb\ufffd\ufffd\ufffd\n\nc", PLAIN)
    got = page_text(b"x" * 100, html=False, charset="", url="", links=True, longest=99)
    assert (len(got.text), got.cut) == (99, True)
    assert len(of_html(f"<title>{'t ' * 5000}</title><p>x").title) <= 300


# ---- parts


@pytest.mark.parametrize("longest", [1, 2, 7, 50, 10_000])
def test_parts_joined_are_the_text(longest: int) -> None:
    text = "One line of words.\n" * 20 + "x" * 300 + " \u00fc\U0001f600 " * 30
    parts = parts_of(text, longest)
    assert "".join(parts) == text
    assert all(0 < len(part) <= longest for part in parts)


# ---- processes


@asynccontextmanager
async def parsing(count: int = 1, seconds: float = 1.0) -> AsyncIterator[Parsers]:
    parsers = Parsers(count, seconds, KEY)
    try:
        yield parsers
    finally:
        await parsers.close()


async def test_a_cancelled_page_frees_its_place() -> None:
    attributes = "<a " + " ".join(f"a{number}=1" for number in range(60_000)) + ">x</a>"
    async with parsing(1, 30.0) as parsers:
        await parsers.start()
        stopped = asyncio.ensure_future(parsers.parse(attributes.encode(), html=True))
        await asyncio.sleep(0.05)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert (await parsers.parse(b"<p>after", html=True)).text == "after"
        process = parsers._free.get_nowait()
        assert process is not None
        parsers._free.put_nowait(process)
    assert process._process.returncode is not None


# ---- what is read once


@asynccontextmanager
async def reading(one: Host, cache: JsonCache | None = None, **settings: Any) -> AsyncIterator[Pages]:
    config = PagesConfig.model_validate({"allow_private": [one.place], "fetch_seconds": 10.0, **settings})
    async with parsing() as parsers:
        pages = Pages(config, None, parsers, cache)
        try:
            yield pages
        finally:
            await pages.close()


async def test_a_page_is_fetched_once_however_many_read_it() -> None:
    async with host() as one, reading(one) as pages:
        one.answers |= {"/a": page(ARTICLE), "/gone": page("", status="404 Not Found")}
        urls = [one.url("/a"), f"  {one.url('/a')}#part-{2}"]
        got = await asyncio.gather(*(pages.page(urls[number % 2]) for number in range(64)))
        assert (one.asked["/a"], len(set(got))) == (1, 1)
        assert (got[0].title, got[0].url, got[0].cut) == ("Returns & refunds", one.url("/a"), "")
        for _ in range(2):
            with pytest.raises(PageError, match="404"):
                await pages.page(one.url("/gone"))
        assert one.asked["/gone"] == 2, "what went wrong is not kept"
        assert not pages._reading


async def test_a_reader_that_leaves_takes_the_page_from_nobody() -> None:
    async with host() as one, reading(one) as pages:
        begun = asyncio.Event()

        async def slowly(writer: asyncio.StreamWriter) -> None:
            begun.set()
            await asyncio.sleep(0.05)
            await page("words", "text/plain")(writer)

        one.answers["/"] = slowly
        first, second = (asyncio.ensure_future(pages.page(one.url("/"))) for _ in range(2))
        await begun.wait()
        first.cancel()
        assert (await second).text == "words"
        assert first.cancelled()
        assert one.asked["/"] == 1


async def test_pages_grow_old_and_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("environments.servers.pages._REMEMBERED_CHARACTERS", 25)
    async with host() as one, reading(one) as pages:
        for name in "abc":
            one.answers[f"/{name}"] = page(name * 10, "text/plain")
            await pages.page(one.url(f"/{name}"))
        assert (pages._characters, len(pages._known)) == (20, 2)
        await pages.page(one.url("/c"))
        await pages.page(one.url("/a"))
        assert (one.asked["/a"], one.asked["/c"], pages._characters) == (2, 1, 20)
    async with host() as one, reading(one, fresh_seconds=0.0) as pages:
        one.answers["/"] = page("x", "text/plain")
        await pages.page(one.url("/"))
        await pages.page(one.url("/"))
        assert (one.asked["/"], pages._characters) == (2, 0)


async def test_kept_on_disk_a_page_stays_as_it_was(tmp_path: Path) -> None:
    async with host() as one:
        one.answers["/"] = page("first", "text/plain")
        for text in ("first", "second"):
            cache = JsonCache(tmp_path / "folder" / "pages.sqlite", f"{KEY}.cache", "pages")
            async with reading(one, cache) as pages:
                assert (await pages.page(one.url("/"))).text == "first"
            await cache.close()
            one.answers["/"] = page(text + "!", "text/plain")
        assert one.asked["/"] == 1
    (tmp_path / "no.sqlite").write_bytes(b"something else" * 100)
    with pytest.raises(ConfigError, match=rf"{KEY}\.cache: cannot keep pages in .*no\.sqlite"):
        JsonCache(tmp_path / "no.sqlite", f"{KEY}.cache", "pages")


# ---- corpora


async def loaded(path: Path, longest: int = 10_000) -> Corpus:
    async with parsing() as parsers:
        return await Corpus.load(path, parsers, f"{KEY}.corpus", links=True, longest=longest)


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


async def test_a_folder_of_all_sorts(tmp_path: Path) -> None:
    (tmp_path / "help").mkdir()
    (tmp_path / "help" / "returns.html").write_text(ARTICLE)
    (tmp_path / "help" / "prices.md").write_text("# Prices\n\nAll is dear.")
    (tmp_path / "notes.txt").write_text("S\u00f6me notes")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("no")
    jsonl(
        tmp_path / "more.jsonl",
        {"url": "http://a.org/1", "title": "One", "text": "first"},
        "",
        {"url": "2", "text": "second"},
    )
    corpus = await loaded(tmp_path)
    titles = [(one.url, one.title) for one in corpus.pages]
    assert titles == [
        ("help/prices.md", "Prices"),
        ("help/returns.html", "Returns & refunds"),
        ("http://a.org/1", "One"),
        ("2", "2"),
        ("notes.txt", "notes.txt"),
    ]
    assert corpus.page(" ./help/prices.md#x").text.endswith("All is dear.")
    assert corpus.page("/notes.txt").text == "S\u00f6me notes"
    for url in ("other", "", "../notes.txt", "help"):
        with pytest.raises(PageError, match="there is no page with this url"):
            corpus.page(url)
    assert (await loaded(tmp_path / "more.jsonl", 3)).pages[
        0
    ].cut == "only the first 3 characters of the page were kept"


@cases
async def test_a_mistake_in_a_corpus_is_named_with_its_line(line: str, said: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "bad.jsonl", {"url": "first", "text": "x"}, "", line)
    with pytest.raises(ConfigError, match=rf"^{KEY}\.corpus: .*bad\.jsonl, line 3: {said}|{said}") as caught:
        await loaded(path)
    assert "line 3" in str(caught.value)


# ---- ranking


def test_words_of_any_script() -> None:
    assert words_of("The Caf\u00c9's \uff11\uff12 x_y") == ["the", "caf\u00e9", "s", "12", "x", "y"]
    assert words_of("\u4f60\u597d\u5417 ok\u597d") == ["\u4f60\u597d", "\u597d\u5417", "ok", "\u597d"]
    assert words_of("!?") == []


def test_order_is_by_fit_then_by_place() -> None:
    texts = [
        "about parcels",
        "a refund of a parcel",
        "refund refund",
        "nothing here",
        "a refund of a parcel",
        "\u9000\u6b3e\u653f\u7b56",
    ]
    pages = [Page(str(number), f"T{number}", text) for number, text in enumerate(texts)]
    ranking = Ranking([*pages, Page("6", "Refund", "what to know")])

    def urls(query: str, count: int = 10) -> list[str]:
        return [one.url for one in ranking.best(query, count)]

    assert urls("REFUND parcel")[:2] == ["1", "4"], "equals in the order of the corpus"
    assert urls("refund") == ["6", "2", "1", "4"], "titles count more"
    assert urls("refund", 3) == ["6", "2", "1"]
    assert urls("\u9000\u6b3e") == ["5"]
    assert urls("zebra") == urls("!?") == urls("") == []
    assert urls("zebra parcels") == ["0"]
    assert urls("refund " * 500) == urls("refund")


@pytest.mark.parametrize("longest", [40, 100, 300])
def test_an_extract_shows_the_words(longest: int) -> None:
    text = "filler words " * 200 + "the refund of a parcel takes nine days " + "more filler " * 300
    got = extract(text, "refund parcel days", longest)
    assert "refund of a parcel" in got
    assert len(got) <= longest + 8
    assert extract("short text", "nothing", longest) == "short text"
    assert extract("", "x", longest) == ""
    assert len(extract("x" * 9000, "x", longest)) <= longest + 8
    assert "end" in extract("filler " * 99 + "end", "end", longest)
