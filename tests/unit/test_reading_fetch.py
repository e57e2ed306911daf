"""Fetching pages: which hosts and addresses, through which redirects, how much, how long.

Servers misbehave over real sockets on loopback; the name service is a double, whose answers are the point of rebinding.
Not covered: certificates, a real name service, IPv6 connections.
"""

from __future__ import annotations

import asyncio
import ipaddress
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from environments.servers.fetching import Fetched, Fetcher
from environments.servers.hosts import HostRules, is_public
from environments.servers.page_text import PageError
from environments.servers.transport import Resolve
from environments.servers.web_settings import PagesConfig
from tests.web_support import Answer, Host, bomb, drip, hang, host, huge, moved, page, raw, reset, zipped

PUBLIC = "93.184.216.34 2606:2800:220:1::1 8.8.8.8 192.88.98.1 172.32.0.1 100.128.0.1"
CLOSED = (
    "127.0.0.1 127.8.8.8 0.0.0.0 10.0.0.1 172.16.0.1 192.168.1.1 100.64.0.1 169.254.169.254 192.0.0.8 192.0.2.1 "
    "198.18.0.1 203.0.113.9 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 "
    "::ffff:10.0.0.1 ::127.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 2002:7f00:1:: 2002:808:808:: 2001:0:7f00:1:: fe80::1 "
    "fe80::1%2 fc00::1 fd00:ec2::254 fec0::1 ff02::1 2001:db8::1 100::1"
)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", CLOSED.split())
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://example.org/", "must begin with http"),
        ("file:///etc/passwd", "must begin with http"),
        ("gopher://127.0.0.1:6379/_FLUSHALL", "must begin with http"),
        ("example.org/page", "must begin with http"),
        ("", "must begin with http"),
        ("http://", "names no host"),
        ("http:///etc/passwd", "names no host"),
        ("http://user:secret@example.org/", "user name"),
        ("http://example.org\\@127.0.0.1/", "user name"),
        ("http://2130706433/", "no ordinary address"),
        ("http://0x7f000001/", "no ordinary address"),
        ("http://127.1/", "no ordinary address"),
        ("http://0177.0.0.1/", "no url"),
        ("http://127.0.0.1./", "not on the public internet"),
        ("http://127.0.0.1/", "not on the public internet"),
        ("http://[::1]/", "not on the public internet"),
        ("http://[::ffff:7f00:1]/", "not on the public internet"),
        ("http://[::ffff:169.254.169.254]/latest/meta-data/", "not on the public internet"),
        ("http://0/", "no ordinary address"),
        ("http://example.org:22/", "port 22"),
        ("http://example.org:0/", "no port"),
        ("http://example.org:65536/", "no port"),
        ("http://%6cocalhost/", "names no host"),
        ("http://exa mple.org/", "names no host"),
        ("http://example.org/\x00", "no url"),
        ("http://example.org/\r\nX-Injected: 1", "no url"),
        ("http://\ud800.org/", "no url"),
        ("http://\u2460\u2461\u2466.0.0.1/", "no url"),
        ("http://example.org/" + "x" * 5000, "longer than"),
    ],
)
def test_urls_that_are_refused_as_text(url: str, said: str) -> None:
    with pytest.raises(PageError, match=said):
        HostRules(PagesConfig()).target(url)


def test_ordinary_urls() -> None:
    rules = HostRules(PagesConfig())
    asked = rules.target("HTTPS://Bücher.example:8443/ö?q=ü#part")
    assert str(asked.url) == "https://xn--bcher-kva.example:8443/%C3%B6?q=%C3%BC"
    assert (asked.host, asked.port) == ("xn--bcher-kva.example", 8443)
    assert rules.target("http://93.184.216.34/").port == 80


def test_lists_of_hosts() -> None:
    rules = HostRules(
        PagesConfig(allow=["example.org", "docs.example.com:8080", "[2606:4700::1111]"], block=["bad.example.org"])
    )
    allowed = [
        "http://example.org",
        "http://a.b.EXAMPLE.org.",
        "http://docs.example.com:8080",
        "http://[2606:4700:0::1111]/",
    ]
    refused = ["http://docs.example.com", "http://notexample.org", "http://bad.example.org.", "http://x.bad.example.org",
               "http://example.org.evil.com", "http://8.8.8.8"]  # fmt: skip
    assert [rules.allows(url) for url in allowed] == [True] * 4
    assert [rules.allows(url) for url in refused] == [False] * 6
    assert HostRules(PagesConfig(allow=["example.org:25"])).allows("http://example.org:25/")


def test_what_is_opened_for_a_private_host_is_only_that() -> None:
    rules = HostRules(PagesConfig(allow_private=["wiki.corp:8443", "10.0.0.7:80", "169.254.169.254:80"]))
    assert rules.check_addresses("wiki.corp", 8443, ["10.1.1.1", "8.8.8.8"]) == ["10.1.1.1", "8.8.8.8"]
    assert rules.allows("http://10.0.0.7/")
    for name, port, address in (
        ("wiki.corp", 443, "10.1.1.1"),
        ("other.corp", 8443, "10.1.1.1"),
        ("wiki.corp", 8443, "169.254.169.254"),
        ("wiki.corp", 8443, "::ffff:169.254.169.254"),
        ("wiki.corp", 8443, "0.0.0.0"),
    ):
        with pytest.raises(PageError, match="not on the public internet"):
            rules.check_addresses(name, port, [address])
    assert not rules.allows("http://169.254.169.254/")


# ---- over sockets


def settings(one: Host, **more: Any) -> PagesConfig:
    return PagesConfig.model_validate({"allow_private": [one.place], "fetch_seconds": 10.0} | more)


async def fetched(url: str, config: PagesConfig, resolve: Resolve | None = None) -> Fetched:
    fetcher = Fetcher(config, resolve)
    try:
        return await fetcher.fetch(url)
    finally:
        await fetcher.close()


async def of(answer: Answer, **more: Any) -> Fetched:
    """A page that is answered so."""
    async with host() as one:
        one.answers["/"] = answer
        return await fetched(one.url("/"), settings(one, **more))


async def test_a_page() -> None:
    got = await of(page("<p>\u00fc", "Text/HTML;Charset=UTF-8"))
    assert (got.kind, got.charset, got.body, got.cut) == ("html", "UTF-8", b"<p>\xc3\xbc", False)
    assert (await of(page("plain", "text/markdown"))).kind == "text"
    assert (await of(page("{}", "application/ld+json"))).kind == "text"
    assert (await of(page("<!DOCTYPE html><p>x", None))).kind == "html"
    assert (await of(page("just words", None))).kind == "text"


async def test_nothing_is_carried_from_one_page_to_the_next() -> None:
    async with host() as one:
        one.answers["/a"] = page("a", set_cookie="who=me; Path=/")
        one.answers["/b"] = page("b")
        fetcher = Fetcher(settings(one, user_agent="reader/1"))
        for path in ("/a", "/b"):
            await fetcher.fetch(one.url(path))
        await fetcher.close()
    assert not any("cookie" in head.lower() or "referer" in head.lower() for head in one.heads)
    assert all("user-agent: reader/1" in head.lower() and f"host: {one.place}" in head.lower() for head in one.heads)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (page("gone", status="404 Not Found"), "status 404 Not Found$"),
        (page("no", status="500 Whatever\tit says"), "status 500 Internal Server Error$"),
        (page("", status="204 No Content"), "status 204"),
        (page(""), "the page is empty"),
        (page(b"\x89PNG\r\n", "image/png"), "the page is image/png, and only text, HTML and PDF are read"),
        (page(b"PK", "application/zip"), "the page is application/zip"),
        (page(b"\0\1\2\0" * 9, None), "the page is no text"),
        (page(b"x", "x" * 200), "the page is something else"),
        (page(b"x", content_encoding="br"), "in a way that nobody asked for"),
        (page(b"not gzip", content_encoding="gzip"), "compressed answer is broken"),
        (page(zipped("cut " * 999)[:-20], content_encoding="gzip"), "broke before the page was complete"),
        (raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", close=True), "no valid HTTP|broke"),
        (raw(b"SSH-2.0-OpenSSH_9.6\r\n", close=True), "no valid HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000, close=True), "no valid HTTP"),
        (raw(b"", close=True), "no valid HTTP"),
        (reset(), "the connection broke before the page was complete|no valid HTTP"),
        (moved("http://169.254.169.254/latest/meta-data/"), "169.254.169.254 is not on the public internet"),
        (moved("http://localhost:8080/"), "localhost is not on the public internet"),
        (moved("file:///etc/passwd"), "must begin with http"),
        (moved("http://me:secret@example.org/"), "user name"),
        (moved("//[::ffff:10.0.0.1]/"), "not on the public internet"),
        (moved("http://[broken/"), "names no host|no url"),
        (moved("/", "308 Permanent Redirect"), "more than 5 redirects"),
        (page("x", status="304 Not Modified"), "status 304"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_pages_that_cannot_be_read(answer: Answer, said: str) -> None:
    with pytest.raises(PageError, match=said) as caught:
        await of(answer)
    assert "\n" not in str(caught.value)


async def test_nobody_there() -> None:
    async with host() as one:
        pass
    with pytest.raises(PageError, match="no connection to this host"):
        await fetched(one.url("/"), settings(one))
    with pytest.raises(PageError, match=r"no host nowhere\.invalid is known"):
        await fetched("http://nowhere.invalid/", settings(one))


async def test_redirects_are_followed_to_the_last_address() -> None:
    async with host() as one:
        one.answers |= {"/a": moved("b"), "/b": moved(f"//{one.place}/c?x=1#y", "307 X"), "/c": page("here")}
        got = await fetched(one.url("/a"), settings(one, redirects=2))
        assert (got.url, got.body) == (one.url("/c?x=1"), b"here")
        with pytest.raises(PageError, match="more than 1 redirects"):
            await fetched(one.url("/a"), settings(one, redirects=1))


async def test_a_redirect_to_a_blocked_host() -> None:
    async with host() as one:
        one.answers["/"] = moved("https://evil.example/")
        with pytest.raises(PageError, match=r"evil\.example is blocked"):
            await fetched(one.url("/"), settings(one, block=["evil.example"]))
        with pytest.raises(PageError, match=r"evil\.example is not among"):
            await fetched(one.url("/"), settings(one, allow=["good.example"]))


@pytest.mark.parametrize("answer", [drip(), drip(b"x" * 10, 0.0), hang()], ids=["drip", "fast drip", "hang"])
async def test_the_deadline_is_one_for_the_whole_page(answer: Answer) -> None:
    with pytest.raises(PageError, match=r"no complete answer within 0\.3 s"):
        await of(answer, fetch_seconds=0.3, page_bytes=2**26)


async def test_redirects_have_one_deadline_too() -> None:
    async def slowly(writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.2)
        await moved("/")(writer)

    with pytest.raises(PageError, match=r"within 0\.5 s"):
        await of(slowly, fetch_seconds=0.5, redirects=1000)


async def test_a_page_of_ten_gigabytes_is_read_to_the_limit() -> None:
    async with host() as one:
        one.answers["/"] = huge(one, "/")
        got = await fetched(one.url("/"), settings(one, page_bytes=100_000))
        assert (len(got.body), got.cut) == (100_000, True)
        await asyncio.sleep(0.1)
        assert one.sent["/"] < 2**24, "nobody takes the rest"


async def test_a_bomb_is_inflated_to_the_limit() -> None:
    data = bomb()
    assert len(data) < 2**18
    for coding in ("gzip", "x-gzip"):
        got = await of(page(data, "text/plain", content_encoding=coding), page_bytes=300_000)
        assert (got.body, got.cut) == (b"a " * 150_000, True)


async def test_forms_of_compression() -> None:
    text = "".join(f"line {number} \u00fc\n" for number in range(40_000))
    whole = text.encode()
    plain = zlib.compressobj(9, zlib.DEFLATED, -15)
    forms = {
        "gzip": zipped(text),
        "GZIP": zipped(text[:1000]) + zipped(text[1000:]) + b"\0" * 100,
        "deflate": zlib.compress(whole),
        " deflate": plain.compress(whole) + plain.flush(),
        "identity": whole,
    }
    for coding, data in forms.items():
        got = await of(page(data, content_encoding=coding))
        assert (got.body == whole, got.cut) == (True, False), coding


class Names:
    """A name service that gives its next answer with every question."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


async def test_a_name_that_is_bound_anew_leads_nowhere() -> None:
    async with host() as one:
        one.answers["/"] = page("secret")
        port = one.port
        inside = PagesConfig(fetch_seconds=5.0)
        for names in (Names(["127.0.0.1"]), Names(["93.184.216.34", "127.0.0.1"]), Names(["::ffff:127.0.0.1"])):
            with pytest.raises(PageError, match=r"rebind\.example is not on the public internet"):
                await fetched(f"http://rebind.example:{port}/", inside, names)
            assert names.asked == 1
        # Public when it is checked, private a moment later: the name is not asked for twice.
        open_here = PagesConfig(allow_private=[f"once.example:{port}"], fetch_seconds=5.0)
        names = Names(["127.0.0.1"], ["10.255.255.1"])
        assert (await fetched(f"http://once.example:{port}/", open_here, names)).body == b"secret"
        assert (names.asked, one.asked["/"]) == (1, 1)
        assert f"host: once.example:{port}" in one.heads[-1].lower()


async def test_each_redirect_is_looked_up_and_checked_anew() -> None:
    async with host() as one:
        one.answers |= {"/": moved(f"http://second.example:{one.port}/two"), "/two": page("secret")}
        config = PagesConfig(allow_private=[f"first.example:{one.port}"], fetch_seconds=5.0)
        with pytest.raises(PageError, match=r"second\.example is not on the public internet"):
            await fetched(f"http://first.example:{one.port}/", config, Names(["127.0.0.1"]))
        assert one.asked["/two"] == 0


async def test_a_kept_connection_serves_no_other_name() -> None:
    async with host() as one:
        one.answers |= {"/": page("a")}
        config = PagesConfig(allow_private=[f"first.example:{one.port}"], fetch_seconds=5.0)
        fetcher = Fetcher(config, Names(["127.0.0.1"]))
        await fetcher.fetch(f"http://first.example:{one.port}/")
        with pytest.raises(PageError, match="not on the public internet"):
            await fetcher.fetch(f"http://second.example:{one.port}/")
        await fetcher.close()
        assert one.asked["/"] == 1


async def test_the_next_address_is_tried_where_one_is_dead() -> None:
    async with host() as one:
        one.answers["/"] = page("here")
        config = PagesConfig(allow_private=[f"two.example:{one.port}"], fetch_seconds=5.0)
        assert (await fetched(f"http://two.example:{one.port}/", config, Names(["127.0.0.9", "127.0.0.1"]))).body


async def test_few_at_once_from_one_host_and_all_in_the_end() -> None:
    async with host() as one:
        now = most = 0

        async def slowly(writer: asyncio.StreamWriter) -> None:
            nonlocal now, most
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            await page("x")(writer)

        one.answers["/"] = slowly
        fetcher = Fetcher(settings(one, per_host=3))
        got = await asyncio.gather(*(fetcher.fetch(one.url(f"/?{number}")) for number in range(20)))
        assert (len(got), most) == (20, 3)
        assert not fetcher._turns, "nothing is remembered of hosts that nobody reads"
        stopped = asyncio.ensure_future(fetcher.fetch(one.url("/")))
        await asyncio.sleep(0.005)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped
        assert (await fetcher.fetch(one.url("/"))).body == b"x"
        await fetcher.close()
