"""Pages through a proxy: what it is asked, what is checked before, and whose fault it is when it does not answer.

Proxy and hosts are real sockets on loopback, TLS included; the name service is a double. Not covered: a proxy that is
itself reached by TLS.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from pydantic import ValidationError

from environments.servers.fetching import Fetched, Fetcher
from environments.servers.page_text import PageError
from environments.servers.transport import Resolve
from environments.servers.web_settings import PagesConfig
from mua.utils.errors import EnvironmentFault
from mua.utils.ports import free_port
from tests.tables import cases_of
from tests.web_support import Proxy, certificate, host, moved, page, proxy

cases = cases_of("reading_proxy")

PUBLIC = "93.184.216.34"


def names(known: dict[str, str]) -> Resolve:
    async def resolve(name: str, port: int) -> Sequence[str]:
        if name not in known:
            raise OSError("no such name")
        return [known[name]]

    return resolve


async def fetched(url: str, resolve: Resolve, **keys: object) -> Fetched:
    fetcher = Fetcher(PagesConfig.model_validate({"fetch_seconds": 10.0, **keys}), resolve)
    try:
        return await fetcher.fetch(url)
    finally:
        await fetcher.close()


def at(one: Proxy, login: str = "") -> str:
    return f"http://{login}127.0.0.1:{one.port}"


async def test_a_page_comes_through_it_and_so_does_what_it_redirects_to() -> None:
    resolve = names({"news.example": PUBLIC, "inside.example": "10.0.0.8"})
    async with host() as one, proxy(one) as through:
        one.answers |= {"/": moved("http://news.example/two"), "/two": page("read")}
        assert (await fetched("http://news.example/", resolve, proxy=at(through))).body == b"read"
        assert through.lines == ["GET http://news.example/ HTTP/1.1", "GET http://news.example/two HTTP/1.1"]
        assert "host: news.example" in one.heads[-1].lower()
        one.answers["/"] = moved("http://inside.example/two")
        for url in ("http://news.example/", "http://inside.example/two", "http://10.0.0.8/two"):
            with pytest.raises(PageError, match="not on the public internet"):
                await fetched(url, resolve, proxy=at(through))
        assert one.asked["/two"] == 1
        with pytest.raises(PageError, match=r"no host unknown\.example"):
            await fetched("http://unknown.example/two", resolve, proxy=at(through))


async def test_names_may_be_left_to_it_but_numbers_and_lists_are_not() -> None:
    async with host() as one, proxy(one) as through:
        one.answers["/"] = page("read")
        keys = {"proxy": at(through), "proxy_resolves": True, "block": ["bad.example"]}
        assert (await fetched("http://unknown.example/", names({}), **keys)).body == b"read"
        for url in ("http://169.254.169.254/", "http://127.0.0.1/", "http://bad.example/"):
            with pytest.raises(PageError, match="refused"):
                await fetched(url, names({}), **keys)
        assert one.asked["/"] == len(through.lines) == 1


async def test_what_it_refuses_is_read_by_the_policy_and_what_it_lacks_is_a_fault() -> None:
    resolve = names({"news.example": PUBLIC, "bad.example": PUBLIC})
    async with host() as one, proxy(one, login="me:p@ss", refuses=("bad.example",)) as through:
        one.answers["/"] = page("read")
        right = at(through, "me:p%40ss@")
        assert (await fetched("http://news.example/", resolve, proxy=right)).body == b"read"
        with pytest.raises(PageError, match="status 403"):
            await fetched("http://bad.example/", resolve, proxy=right)
        with pytest.raises(PageError, match="the proxy refused to connect: 403"):
            await fetched("https://bad.example/", resolve, proxy=right)
        for url in ("http://news.example/", "https://news.example/"):
            with pytest.raises(EnvironmentFault, match="asks for a name and password"):
                await fetched(url, resolve, proxy=at(through, "me:wrong@"))
    gone = f"http://me:p%40ss@127.0.0.1:{free_port()}"
    with pytest.raises(EnvironmentFault, match="no connection") as caught:
        await fetched("https://news.example/", resolve, proxy=gone)
    assert "p%40ss" not in str(caught.value)
    assert "p@ss" not in str(caught.value)


async def test_certificates_are_verified_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = names({"news.example": PUBLIC, "other.example": PUBLIC})
    certificate(tmp_path / "authority.pem", x509.DNSName("news.example"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "authority.pem")
    async with host(context) as one, proxy(one) as through:
        one.answers["/"] = page("read")
        with pytest.raises(PageError, match="no connection to this host"):  # signed by nobody who is known
            await fetched("https://news.example/", resolve, proxy=at(through))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        assert (await fetched("https://news.example/", resolve, proxy=at(through))).body == b"read"
        assert through.lines[-1] == "CONNECT news.example:443 HTTP/1.1"
        with pytest.raises(PageError, match="no connection to this host"):
            await fetched("https://other.example/", resolve, proxy=at(through))
        assert one.asked["/"] == 1


@cases
def test_what_is_no_proxy(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        PagesConfig.model_validate(keys)
