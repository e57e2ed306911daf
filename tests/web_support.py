"""Hosts on this machine that serve pages well, badly or not at all, over real sockets."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

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
async def host() -> AsyncIterator[Host]:
    """A running host without any page."""
    one = Host()
    tasks: set[asyncio.Task[None]] = set()

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        with suppress(asyncio.CancelledError):
            await one.serve(reader, writer)

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
