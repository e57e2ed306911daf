"""What reading costs: our time per page beside plain httpx and trafilatura, 64 readers at once, searches of a corpus.

    python -m tools.bench.reading [--pages 200] [--readers 64] [--corpus 20000]

Pages of about 52 KB with 390 links come from a server of its own process on loopback; each is read once, under
an address of its own. *Plain* is one ``httpx.AsyncClient``, ``get`` and ``trafilatura.extract`` on the event loop,
without a check or limit; *ours* the call of an environment's instance, with the process that parses, and the first page
of eight thousand characters. Rounds of both alternate. A stall is the longest time in which the event loop did not come
to a timer of 2 ms.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx
import trafilatura
from aiohttp import web

from mua.config.schema import EnvironmentConfig
from mua.environment.manager import EnvironmentInstance, EnvironmentManager
from mua.environment.registry import get_domain
from tools import kit

STARTS, ENDS = ("ba", "co", "du", "fe", "gi", "ho", "ja", "ku", "le", "mi"), ("ran", "tel", "vos", "nip")
WORDS = [first + second for first in STARTS for second in ENDS]
HOSTILE = "<a " + " ".join(f"a{number}=1" for number in range(100_000)) + ">x</a>"


def article(number: int) -> str:
    """A page with a frame of links, and paragraphs of words drawn for ``number``."""
    drawn = random.Random(number)
    links = "".join(f"<li><a href='/{place}' class='menu item-{place}'>Menu {place}</a></li>" for place in range(300))
    texts = [" ".join(drawn.choices(WORDS, k=60)) for _ in range(90)]
    paragraphs = "".join(f"<p>{text} <a href='/p/{place}'>more</a>.</p>" for place, text in enumerate(texts))
    frame = f"<nav><ul>{links}</ul></nav>"
    return f"<html><head><title>Page {number}</title></head><body>{frame}<article>{paragraphs}</article></body></html>"


def serve(told: Connection) -> None:
    """Pages by number, until the process is ended."""
    pages = [article(number) for number in range(50)]

    async def page(request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        return web.Response(text=HOSTILE if number < 0 else pages[number % 50], content_type="text/html")

    async def run() -> None:
        app = web.Application()
        app.router.add_get("/{number}", page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(run())


@asynccontextmanager
async def watched() -> Any:
    """The longest stall so far, in a list of one."""
    longest = [0.0]

    async def watch() -> None:
        while True:
            began = perf_counter()
            await asyncio.sleep(0.002)
            longest[0] = max(longest[0], perf_counter() - began - 0.002)

    task = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        task.cancel()


def manager_with(settings: dict[str, Any]) -> EnvironmentManager:
    """A help desk's, with the tool server ``web``, one for all rollouts."""
    line = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    server = {"name": "web", "command": sys.executable, "args": ["-m", "environments.servers.web", *line],
              "isolation": "shared", "start_seconds": 120.0}  # fmt: skip
    config = EnvironmentConfig.model_validate({"name": "help_desk", "isolation": "inline", "mcp": [server]})
    return EnvironmentManager(get_domain("help_desk"), config)


async def plain(client: httpx.AsyncClient, url: str) -> None:
    """What anybody would write."""
    answer = await client.get(url)
    trafilatura.extract(answer.text, url=url, output_format="markdown", include_links=True, favor_recall=True)


async def ours(instance: EnvironmentInstance, url: str) -> None:
    """The tool."""
    result = await instance.call("read_page", {"url": url})
    assert not result.error, result.text


async def timed(work: Awaitable[object]) -> float:
    """Seconds that it takes."""
    began = perf_counter()
    await work
    return perf_counter() - began


def row(name: str, seconds: list[float]) -> tuple[str, str, str]:
    """Median and 95th percentile in milliseconds."""
    return name, f"{statistics.median(seconds) * 1e3:.2f}", f"{statistics.quantiles(seconds, n=20)[-1] * 1e3:.2f}"


async def one_by_one(client: httpx.AsyncClient, instance: EnvironmentInstance, base: str, pages: int) -> None:
    """Medians of one page each way, in alternate rounds, then of the same pages again."""
    theirs, mine, again = list[float](), list[float](), list[float]()
    await ours(instance, f"{base}/999999")
    for place in range(10):
        some = range(place * pages // 10, (place + 1) * pages // 10)
        for number in some:
            theirs.append(await timed(plain(client, f"{base}/{number}")))
        for number in some:
            mine.append(await timed(ours(instance, f"{base}/{number}")))
        for number in some:
            again.append(await timed(ours(instance, f"{base}/{number}")))
    rows = [row("plain", theirs), row("ours", mine), row("ours, read before", again)]
    print(kit.table(("one page", "median, ms", "95th percentile, ms"), rows))
    less, ratio = (
        statistics.median(mine) - statistics.median(theirs),
        statistics.median(mine) / statistics.median(theirs),
    )
    print(f"\nOurs less plain: {less * 1e3:+.2f} ms, ratio {ratio:.2f}.\n")


async def all_at_once(
    client: httpx.AsyncClient, manager: EnvironmentManager, base: str, readers: int, begin: int
) -> None:
    """``readers`` episodes, each reading four pages; then with one hostile page among them."""
    task = get_domain("help_desk").tasks("test")[0]

    async def reader(place: int, read: Callable[[str], Awaitable[None]]) -> None:
        for number in range(4):
            await read(f"{base}/{begin + place * 4 + number}")

    async def episode(place: int) -> None:
        async with manager.instance(task, place) as mine:
            await reader(place, lambda url: ours(mine, url))

    async def hostile() -> None:
        async with manager.instance(task, readers) as mine:
            result = await mine.call("read_page", {"url": f"{base}/-1"})
            assert result.error

    rows = []
    for name, work in (
        ("plain", lambda: asyncio.gather(*(reader(place, lambda url: plain(client, url)) for place in range(readers)))),
        ("ours", lambda: asyncio.gather(*(episode(place) for place in range(readers)))),
    ):
        async with watched() as longest:
            began = perf_counter()
            await work()
            seconds = perf_counter() - began
        rows.append((name, f"{seconds:.2f}", f"{4 * readers / seconds:.0f}", f"{longest[0] * 1e3:.0f}"))
        begin += 4 * readers
    async with watched() as longest:
        began = perf_counter()
        await asyncio.gather(hostile(), *(episode(place) for place in range(readers)))
        seconds = perf_counter() - began
    rows.append(("ours, and a hostile page", f"{seconds:.2f}", "", f"{longest[0] * 1e3:.0f}"))
    print(kit.table((f"{readers} readers", "seconds", "pages per second", "longest stall, ms"), rows))


async def corpus(size: int) -> None:
    """Loading, ranking and asking a corpus of short pages."""
    drawn = random.Random(7)
    vocabulary = [f"{first}{second}{third}" for first in WORDS for second in "aeiou" for third in WORDS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pages.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number in range(size):
                text = " ".join(drawn.choices(vocabulary, k=200))
                file.write(json.dumps({"url": str(number), "title": f"Page {number}", "text": text}) + "\n")
        manager = manager_with({"search": {}, "read_page": {}, "pages": {"corpus": str(path)}})
        began = perf_counter()
        await manager.start()
        started = perf_counter() - began
        searches, reads = list[float](), list[float]()
        async with manager.instance(get_domain("help_desk").tasks("test")[0], 0) as instance:
            for number in range(200):
                query = " ".join(drawn.choices(vocabulary, k=5))
                searches.append(await timed(instance.call("search", {"query": query, "k": 10})))
                reads.append(await timed(ours(instance, str(number))))
        await manager.close()
    rows = [row("`search` of five words", searches), row("`read_page`", reads)]
    print(kit.table((f"corpus of {size} pages of 200 words", "median, ms", "95th percentile, ms"), rows))
    print(f"\nRead and ranked in {started:.1f} s.")


async def measure(base: str, place: str, pages: int, readers: int, size: int) -> None:
    """Everything, table by table."""
    tools = {"read_page": {}, "pages": {"allow_private": [place], "parse_seconds": 2.0}}
    manager = manager_with(tools)
    async with (
        httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=16)) as client,
        manager.instance(get_domain("help_desk").tasks("test")[0], 0) as instance,
    ):
        await plain(client, f"{base}/0")
        await one_by_one(client, instance, base, pages)
        await all_at_once(client, manager, base, readers, 100_000)
    await manager.close()
    print()
    await corpus(size)


def main() -> None:
    """Print the tables of docs/benchmarks/reading.md."""
    parser = kit.parser(__doc__)
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--readers", type=int, default=64)
    parser.add_argument("--corpus", type=int, default=20_000)
    given = parser.parse_args()
    told, tell = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(tell,), daemon=True)
    server.start()
    try:
        place = f"127.0.0.1:{told.recv()}"
        print(f"{kit.machine()}\n")
        asyncio.run(measure(f"http://{place}", place, given.pages, given.readers, given.corpus))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
