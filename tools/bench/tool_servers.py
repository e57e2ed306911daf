"""What tool servers cost: a call of each beside the plain way, and many episodes at once.

    python -m tools.bench.tool_servers [--calls 100] [--sessions 64]

*plain* is what anybody would write, without checks and limits: ``ClientSession.call_tool`` of the MCP package,
``httpx`` and ``trafilatura`` on the event loop, a subprocess of the same interpreter. *ours* is the call of an
environment's instance, for the program that of a sandbox under bubblewrap. Both take turns in one process, call by
call, and ratios are of medians. Pages of about 52 KB with 390 links come from a server of its own process on
loopback, each under an address of its own. A stall is the longest time in which the event loop did not come to a
timer of 2 ms.
"""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from time import perf_counter

import httpx
import trafilatura
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from mua.environment.manager import EnvironmentInstance, EnvironmentManager
from mua.environment.registry import get_domain
from mua.rollout.runner import without_gc_pauses
from mua.users.scoring.sandbox import PYTHON, Sandbox, SandboxLimits
from mua.utils.ports import LOOPBACK, free_port
from tests.mcp_support import environment, own_server, server, some_task
from tools import kit

SAID = {"text_": "hello"}
PROGRAM = "print(1)"
Call = Callable[[int], Awaitable[object]]


@contextmanager
def pages() -> Iterator[str]:
    """The address of a server of pages, ``/0`` to ``/49``, whatever query follows."""
    drawn, port = random.Random(1), free_port()
    words = [first + second for first in ("ba", "co", "du", "fe", "gi", "ho") for second in ("ran", "tel", "vos")]
    links = "".join(f"<li><a href='/{place}' class='menu item-{place}'>Menu {place}</a></li>" for place in range(300))
    with tempfile.TemporaryDirectory() as folder:
        for number in range(50):
            texts = [" ".join(drawn.choices(words, k=60)) for _ in range(90)]
            body = "".join(f"<p>{text} <a href='/p/{place}'>more</a>.</p>" for place, text in enumerate(texts))
            Path(folder, f"{number}.html").write_text(f"<nav><ul>{links}</ul></nav><article>{body}</article>")
        command = [sys.executable, "-m", "http.server", str(port), "--bind", LOOPBACK, "--directory", folder]
        served = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while socket.socket().connect_ex((LOOPBACK, port)):
                pass
            yield f"http://{LOOPBACK}:{port}"
        finally:
            served.kill()
            served.wait()


async def run_plain(_: int) -> None:
    process = await asyncio.create_subprocess_exec(PYTHON, "-c", PROGRAM, stdout=subprocess.PIPE)
    await process.communicate()


def tool(instance: EnvironmentInstance, name: str, given: Callable[[int], dict[str, str]]) -> Call:
    """The call of a tool with the arguments of a number; it must succeed."""

    async def call(number: int) -> None:
        result = await instance.call(name, given(number))
        assert not result.error, result.text

    return call


async def compare(pairs: dict[str, tuple[Call, Call]], calls: int) -> None:
    """Medians of one call each way, in turns."""
    rows = []
    for name, ways in pairs.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for number in range(calls):
            for way, taken in zip(ways, seconds, strict=True):
                began = perf_counter()
                await way(number)
                taken.append(perf_counter() - began)
        plain, ours = (1e3 * statistics.median(taken) for taken in seconds)
        high = 1e3 * statistics.quantiles(seconds[1], n=20)[-1]
        rows.append((name, f"{plain:.2f}", f"{ours:.2f}", f"{high:.2f}", f"{ours / plain:.2f}"))
    print(kit.table(("call", "plain, ms", "ours, ms", "95th percentile, ms", "ratio"), rows) + "\n", flush=True)


@asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """The longest stall so far, in a list of one."""
    longest = [0.0]

    async def watch() -> None:
        while True:
            began = perf_counter()
            await asyncio.sleep(0.002)
            longest[0] = max(longest[0], perf_counter() - began - 0.002)

    task = asyncio.create_task(watch())
    yield longest
    task.cancel()


async def crowd(manager: EnvironmentManager, base: str, sessions: int) -> None:
    """``sessions`` episodes at once: each opens its tools, then calls and reads."""

    async def episode(place: int) -> None:
        async with manager.instance(some_task(), place) as instance:
            for number in range(4):
                await instance.call("echo", SAID)
                await tool(instance, "read_page", lambda n: {"url": f"{base}/{n}.html?{place}"})(number)

    boxes = [Sandbox(SandboxLimits(call_seconds=60, start_seconds=60)) for _ in range(sessions)]
    work: dict[str, Callable[[], Awaitable[object]]] = {
        "episodes: a session, 4 calls, 4 pages": lambda: asyncio.gather(*map(episode, range(sessions))),
        "sandboxes start": lambda: asyncio.gather(*(box.start() for box in boxes)),
        "a program in each": lambda: asyncio.gather(*(box.run("python", PROGRAM) for box in boxes)),
        "sandboxes end": lambda: asyncio.gather(*(box.close() for box in boxes)),
    }
    rows = []
    for name, begin in work.items():
        async with stalls() as longest:
            began = perf_counter()
            await begin()
            rows.append((name, f"{perf_counter() - began:.2f}", f"{1e3 * longest[0]:.0f}"))
    print(kit.table((f"{sessions} at once", "seconds", "longest stall, ms"), rows))


async def measure(base: str, calls: int, sessions: int) -> None:
    print(f"{kit.machine()}\n")
    local = {"read_page": {}, "pages": {"allow_private": [base.removeprefix("http://")]}}
    echo = server(call_seconds=3.0, max_sessions=sessions + 1)
    config = environment(echo, own_server("web", local, start_seconds=120.0), isolation="inline")
    manager = EnvironmentManager(get_domain("help_desk"), config)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(manager.close)
        instance = await stack.enter_async_context(manager.instance(some_task(), 0))
        parameters = StdioServerParameters(command=sys.executable, args=echo["args"])
        client = await stack.enter_async_context(
            ClientSession(*await stack.enter_async_context(stdio_client(parameters)))
        )
        await client.initialize()
        http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        box = Sandbox(SandboxLimits(call_seconds=60, start_seconds=60))
        await box.start()
        stack.push_async_callback(box.close)

        async def read_plain(number: int) -> None:
            answer = await http.get(f"{base}/{number % 50}.html?plain{number}")
            trafilatura.extract(answer.text, output_format="markdown", include_links=True, favor_recall=True)

        pairs: dict[str, tuple[Call, Call]] = {
            "`echo` over MCP": (lambda _: client.call_tool("echo", SAID), tool(instance, "echo", lambda _: SAID)),
            "`read_page`": (
                read_plain,
                tool(instance, "read_page", lambda number: {"url": f"{base}/{number % 50}.html?ours{number}"}),
            ),
            f"python: `{PROGRAM}`": (run_plain, lambda _: box.run("python", PROGRAM)),
        }
        await compare(pairs, calls)
        await crowd(manager, base, sessions)


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=64)
    given = parser.parse_args()
    with pages() as base, without_gc_pauses():  # as a run does: a full collection stops every session for some 0.3 s
        asyncio.run(measure(base, given.calls, given.sessions))


if __name__ == "__main__":
    main()
