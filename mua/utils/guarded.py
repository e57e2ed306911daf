"""Programs below the guardian (``guardian.py``): they end with this process, with all that they started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mua.utils.cores import all_cores
from mua.utils.guardian import NO_ENGINE

GUARDIAN = Path(__file__).with_name("guardian.py")
TAIL = 8192
"""Bytes that are kept of the end of what a program writes."""
_PIECE = 1 << 16
_PAUSE_SECONDS = 0.005
"""Between two pieces, so that a program which writes without end is slowed down and not the event loop."""
_KILL_SECONDS = 10.0


async def start_guarded(
    *command: str, env: Mapping[str, str], cwd: Path | None = None, limit: int = _PIECE
) -> asyncio.subprocess.Process:
    """The guardian of ``command``, whose standard input, output and error are pipes; ``limit``: bytes of a line."""
    pipe = asyncio.subprocess.PIPE
    starting = asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(GUARDIAN), str(os.getpid()), NO_ENGINE, *command),
        stdin=pipe, stdout=pipe, stderr=pipe, env=env, cwd=cwd, start_new_session=True, limit=limit,
    )  # fmt: skip
    with all_cores():  # eagerly, because the process is forked before anything is waited for
        task = asyncio.Task(starting, loop=asyncio.get_running_loop(), eager_start=True)
    return await task


async def end_guarded(process: asyncio.subprocess.Process, patience: float = 0.0) -> int | None:
    """Its status, if it ends by itself within ``patience`` seconds; else it is ended, with all that is below it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            return await process.wait()
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_KILL_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return None


async def read_tail(stream: asyncio.StreamReader, log_file: Path | None = None, most_log: int = 1 << 20) -> bytes:
    """The end of what is written; its first bytes go to ``log_file``. All of it is read, so that nobody is blocked."""
    tail, written = b"", 0
    with contextlib.ExitStack() as stack:
        file = None
        while piece := await stream.read(_PIECE):
            tail = (tail + piece)[-TAIL:]
            if log_file is not None and written < most_log:
                if file is None:
                    log_file.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(log_file.open("wb"))
                written += file.write(piece[: most_log - written])
            if len(piece) == _PIECE:
                await asyncio.sleep(_PAUSE_SECONDS)
    return tail
