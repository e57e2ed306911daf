"""What tool servers cost: our time per call beside the SDK's own, 64 sessions at once, and what a fault does to others.

    python -m tools.bench.mcp [--calls 300] [--sessions 64]

Everything is measured in one process with ``tests/misbehaving_mcp.py`` as the server, which answers in well under a
millisecond. *SDK* is ``stdio_client`` and ``ClientSession.call_tool``; *ours* the call of an environment's instance.
Rounds of both alternate, and the difference is of medians. In the table of faults one session of ``--sessions`` meets
the fault while all others go on calling; what they notice is the longest of their calls, beside that without a fault.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client

from mua.config.schema import EnvironmentConfig
from mua.environment.manager import EnvironmentInstance, EnvironmentManager
from mua.environment.mcp.health import ToolServerFault
from mua.environment.registry import get_domain
from mua.rollout.runner import without_gc_pauses
from tools import kit

SERVER = kit.ROOT / "tests" / "misbehaving_mcp.py"
LINE = ["-I", "-S", str(SERVER)]
SAID = {"text_": "hello"}
PAUSE_S = 0.3
"""Between two calls of one session."""
FAULTS: dict[str, dict[str, Any]] = {
    "slow": {"seconds": 1.0},
    "big": {"size": 50_000_000},
    "flood_output": {},
    "flood_lines": {},
    "flood_notifications": {},
    "flood_errors": {},
    "garbage": {},
    "shapeless": {},
    "crash": {},
    "hang": {},
}
"""The tool that makes it, by name; ``slow`` makes none and is what others are compared with."""


def config(sessions: int) -> EnvironmentConfig:
    server = {"name": "bench", "command": sys.executable, "args": LINE, "ready": 0, "call_seconds": 3.0, "retries": 0}
    mcp = [server | {"max_sessions": sessions + 1}]
    return EnvironmentConfig.model_validate({"name": "help_desk", "isolation": "inline", "mcp": mcp})


async def cost(manager: EnvironmentManager, calls: int) -> None:
    """Medians of one call each way, in alternate rounds."""
    task, ours, theirs = get_domain("help_desk").tasks("test")[0], list[float](), list[float]()
    parameters = StdioServerParameters(command=sys.executable, args=LINE)
    async with (
        manager.instance(task, 1) as instance,
        stdio_client(parameters) as streams,
        ClientSession(*streams) as client,
    ):
        await client.initialize()
        await client.list_tools()
        for _ in range(10):
            for _ in range(calls // 10):
                began = perf_counter()
                await client.call_tool("echo", SAID)
                theirs.append(perf_counter() - began)
            for _ in range(calls // 10):
                began = perf_counter()
                await instance.call("echo", SAID)
                ours.append(perf_counter() - began)
    rows = []
    for name, seconds in (("SDK", theirs), ("ours", ours)):
        high = statistics.quantiles(seconds, n=20)[-1]
        rows.append((name, f"{statistics.median(seconds) * 1e3:.2f}", f"{high * 1e3:.2f}"))
    print(kit.table(("call of `echo`", "median, ms", "95th percentile, ms"), rows))
    more = (statistics.median(ours) - statistics.median(theirs)) * 1e3
    print(f"\nours less the SDK's: {more:+.2f} ms, ratio {statistics.median(ours) / statistics.median(theirs):.2f}\n")


async def calling(instance: EnvironmentInstance, over: asyncio.Event, delay: float) -> list[float]:
    seconds = []
    await asyncio.sleep(delay)
    while not over.is_set():
        began = perf_counter()
        await instance.call("echo", SAID)
        seconds.append(perf_counter() - began)
        await asyncio.sleep(PAUSE_S)
    return seconds


async def faults(manager: EnvironmentManager, sessions: int) -> None:
    """Each fault in one of ``sessions``, the others calling from a second before to half a second after."""
    task = get_domain("help_desk").tasks("test")[0]
    async with AsyncExitStack() as stack:
        began = perf_counter()
        opening = [stack.enter_async_context(manager.instance(task, n)) for n in range(sessions - 1)]
        others = await asyncio.gather(*opening)
        print(f"{sessions} sessions are open after {perf_counter() - began:.1f} s\n")
        rows = []
        for name, arguments in FAULTS.items():
            over, met = asyncio.Event(), "a result"
            delays = (PAUSE_S * number / sessions for number in range(sessions))
            tasks = [
                asyncio.create_task(calling(other, over, delay)) for other, delay in zip(others, delays, strict=False)
            ]
            await asyncio.sleep(1.0)
            began = perf_counter()
            try:
                async with manager.instance(task, sessions) as instance:
                    await instance.call(name, arguments)
            except ToolServerFault as fault:
                met = f"`{fault.kind}`"
            seconds = perf_counter() - began
            await asyncio.sleep(0.5)
            over.set()
            found = sorted(second for done in await asyncio.gather(*tasks) for second in done)
            told = (f"{at * 1e3:.0f}" for at in (statistics.median(found), found[int(0.99 * len(found))], found[-1]))
            rows.append((f"`{name}`", met, f"{seconds:.2f}", *told, len(found)))
        names = (
            "fault",
            "its episode gets",
            "after, s",
            "others' call: median, ms",
            "99 %, ms",
            "longest, ms",
            "calls",
        )
        print(kit.table(names, rows))


async def measure(calls: int, sessions: int) -> None:
    print(f"{kit.machine()}\n")
    manager = EnvironmentManager(get_domain("help_desk"), config(sessions))
    try:
        await cost(manager, calls)
        await faults(manager, sessions)
    finally:
        await manager.close()


def main() -> None:
    parser = kit.parser(__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--sessions", type=int, default=64)
    given = parser.parse_args()
    with without_gc_pauses():  # as a run does: a full collection stops every session for some 0.3 s
        asyncio.run(measure(given.calls, given.sessions))


if __name__ == "__main__":
    main()
