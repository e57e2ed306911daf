"""Hosts on this machine that serve pages well, badly or not at all, over real sockets."""

from __future__ import annotations

import asyncio
import base64
import gzip
import ssl
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
ARTICLE = (
    "<html><head><title>Returns &amp; refunds</title><script>alert('no')</script></head><body>"
    "<nav><a href='/home'>Home</a></nav><article><h1>Returns</h1>"
    + "".join(
        f"<p>Paragraph {number} explains how a parcel of number {number * 37} comes back to us, and when the "
        f"<a href='/refund/{number}'>refund</a> of its price is paid.</p>"
        for number in range(1, 40)
    )
    + "</article></body></html>"
)


class Host:
    """Answers paths as it was told; remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: Counter[str] = Counter()
        self.heads: list[str] = []
        self.sent: Counter[str] = Counter()
        """Bytes of each path's body that were taken from us."""
        self.port = 0

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, path: str) -> str:
        return f"http://{self.place}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ")[1]
                self.heads.append(head)
                self.asked[path] += 1
                await self.answers[path.partition("?")[0]](writer)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def _serving(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """The port of a server, whose connections end with the block."""
    tasks: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with suppress(asyncio.CancelledError):
            await serve(reader, writer)

    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def host(tls: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    """A running host without any page."""
    one = Host()
    async with _serving(one.serve, tls) as one.port:
        yield one


class Proxy:
    """Leads every name to one host of this machine; remembers what it was asked."""

    def __init__(self, behind: Host, login: str = "", refuses: tuple[str, ...] = ()) -> None:
        """``login``: ``NAME:PASSWORD`` that it asks for; ``refuses``: names."""
        self.lines: list[str] = []
        self.port = 0
        self._behind, self._refuses = behind, refuses
        self._wanted = (
            f"proxy-authorization: basic {base64.b64encode(login.encode()).decode()}".lower() if login else ""
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *headers = head.split("\r\n")
        self.lines.append(first)
        if self._wanted and self._wanted not in [header.lower() for header in headers]:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
        elif any(name in first for name in self._refuses):
            writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        else:
            to_host, host_writer = await asyncio.open_connection("127.0.0.1", self._behind.port)
            if first.startswith("CONNECT "):
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                method, url, version = first.split(" ")
                path = "/" + url.split("/", 3)[3]
                host_writer.write("\r\n".join([f"{method} {path} {version}", *headers]).encode("latin-1"))
            await asyncio.gather(_carry(reader, host_writer), _carry(to_host, writer))
        await writer.drain()
        writer.close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    with suppress(ConnectionError, OSError):
        writer.close()


@asynccontextmanager
async def proxy(behind: Host, login: str = "", refuses: tuple[str, ...] = ()) -> AsyncIterator[Proxy]:
    """A running proxy before ``behind``."""
    one = Proxy(behind, login, refuses)
    async with _serving(one.serve) as one.port:
        yield one


def raw(data: bytes, *, close: bool = False) -> Answer:
    """These bytes."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if close:
            await writer.drain()
            raise ConnectionError

    return answer


def page(
    body: str | bytes, kind: str | None = "text/html; charset=utf-8", status: str = "200 OK", **more: str
) -> Answer:
    """A whole answer; names of further headers with ``_`` for ``-``."""
    data = body.encode() if isinstance(body, str) else body
    headers = {"content-length": str(len(data)), **{name.replace("_", "-"): value for name, value in more.items()}}
    if kind is not None:
        headers["content-type"] = kind
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return raw(f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + data)


def moved(to: str, status: str = "302 Found") -> Answer:
    return page("", status=status, location=to)


def reset() -> Answer:
    """Hangs up hard in the middle of a body."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 1000\r\n\r\n<p>half")
        await writer.drain()
        writer.transport.abort()
        raise ConnectionError

    return answer


def drip(piece: bytes = b"x", seconds: float = 0.02) -> Answer:
    """A body that never ends, a piece at a time."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(seconds)

    return answer


def hang() -> Answer:
    async def answer(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    return answer


def huge(host: Host, path: str, length: int = 10 * 2**30) -> Answer:
    """As much as is taken of a body of ``length`` bytes."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {length}\r\n\r\n".encode())
        for _ in range(length // 65_536):
            writer.write(b"word " * 13_107 + b"\n")
            await writer.drain()
            host.sent[path] += 65_536
        raise ConnectionError

    return answer


def bomb(megabytes: int = 200) -> bytes:
    """So much of nothing, compressed by gzip to a thousandth."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(b"a " * 2**19) for _ in range(megabytes)), packer.flush()])


def zipped(text: str) -> bytes:
    return gzip.compress(text.encode())


def certificate(file: Path, name: x509.GeneralName) -> None:
    """Write a certificate of ``name`` that signs itself, with its key."""
    key, subject, now = ec.generate_private_key(ec.SECP256R1()), x509.Name([]), datetime.now(UTC)
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=True)
    made = builder.add_extension(x509.BasicConstraints(True, None), critical=True).sign(key, hashes.SHA256())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(made.public_bytes(Encoding.PEM) + secret)
