"""A server that is a program: its process under a guardian, and messages over its standard input and output.

::

    ClientSession ◄── parsed messages ── reading ◄── lines, each at most ``message_bytes`` ── stdout
                  ───────────────────► writing ─────────────────────────────────────────► stdin
                                        guardian: ends everything (mua/utils/guardian.py)

The SDK's own transport looks for the end of a line anew with every chunk, so that one line of 50 MB keeps the event
loop busy for more than a minute. Here a line that grows beyond the limit, or lines without end, cost the server its
life before they are parsed, and no more than :data:`TURN` messages are taken in one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, jsonrpc_message_adapter

from mua.config.environment import McpServerConfig
from mua.environment.mcp.health import Flood, Health, ServerFaultKind
from mua.utils.errors import ConfigError
from mua.utils.guarded import end_guarded, read_tail, start_guarded
from mua.utils.strict_json import printable

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
TURN = 20
"""Messages that are read in one turn of the event loop."""
_LEAVE_SECONDS = 0.5
"""For a server to end by itself once its standard input is closed."""
_REPORT_SECONDS = 10.0
"""For the status of one that closed its output: a busy machine takes its time to end a process."""
_SHOWN = 1500
_MESSAGE = (b"{", b"[")
"""How a line begins that is meant as a message."""
_PASSED_ON = ("notifications/tools/list_changed",)
"""Notifications that mean something here; progress and log messages are dropped unread."""


def variables_of(config: McpServerConfig) -> dict[str, str]:
    """What the program's environment is made of."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return kept | {name: value.get_secret_value() for name, value in config.env.items()}


def check_command(config: McpServerConfig, key: str) -> None:
    """Raises :class:`ConfigError` that names ``key`` for a program or folder that is not there."""
    if config.cwd is not None and not config.cwd.is_dir():
        raise ConfigError(f"{key}.cwd: there is no folder {config.cwd}")
    folder, path = config.cwd or Path(), variables_of(config).get("PATH", os.defpath)
    named = str(folder / config.command) if os.sep in config.command else config.command
    if shutil.which(named, path=path) is None:
        where = "there" if os.sep in config.command else f"on PATH ({path})"
        raise ConfigError(
            f"{key}.command: no program {config.command!r} is {where}; install it, or give its whole path"
        )


@asynccontextmanager
async def stdio_streams(
    config: McpServerConfig, health: Health
) -> AsyncIterator[
    tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
]:
    """A running server's messages; on leaving nothing of it is left, and ``health`` knows how it ended."""
    process = await start_guarded(
        config.command, *config.args, env=variables_of(config), cwd=config.cwd, limit=config.message_bytes
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None  # noqa: PT018
    to_session, heard = anyio.create_memory_object_stream[SessionMessage | Exception](TURN)
    said, from_session = anyio.create_memory_object_stream[SessionMessage](TURN)
    errors = asyncio.create_task(read_tail(process.stderr))
    tasks = [
        asyncio.create_task(_read(process.stdout, to_session, health, config.message_bytes)),
        asyncio.create_task(_write(process.stdin, from_session, health)),
    ]
    try:
        yield heard, said
    finally:
        with anyio.CancelScope(shield=True):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_session, heard, said, from_session):
                stream.close()
            process.stdin.close()
            patience = {None: _LEAVE_SECONDS, ServerFaultKind.CRASHED: _REPORT_SECONDS}.get(health.kind, 0.0)
            status = await end_guarded(process, patience)
            await process.stdout.read()  # nobody is left who writes: what was not read closes the pipe
            told = printable((await errors).decode(errors="replace").strip().replace("\n", " | "), 10**6)
            health.said = told if len(told) <= _SHOWN else f"...{told[-_SHOWN:]}"
            if health.kind is ServerFaultKind.CRASHED and status is not None:
                health.reason += f" (exit status {status})"


async def _read(
    output: asyncio.StreamReader,
    to_session: MemoryObjectSendStream[SessionMessage | Exception],
    health: Health,
    longest: int,
) -> None:
    """Lines to messages, until the server ends or says too much."""
    number = 0
    with to_session:
        try:
            while True:
                line = await output.readuntil(b"\n")
                health.budget.spend(1, len(line))
                if line.lstrip().startswith(_MESSAGE):
                    message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    if not isinstance(message, JSONRPCNotification) or message.method in _PASSED_ON:
                        await to_session.send(SessionMessage(message))
                else:  # something the program prints: a banner, a debugging line
                    health.stray = _shown(line) or health.stray
                number += line.startswith(_MESSAGE)  # other lines cost nothing, and waiting lets more of them come in
                if number == TURN:
                    number = 0
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            health.lose(ServerFaultKind.CRASHED, "its process ended or closed its standard output")
        except asyncio.LimitOverrunError:
            told = f"it sent a message of more than {longest} bytes (message_bytes)"
            health.lose(ServerFaultKind.FLOODED, told)
        except Flood as flood:
            health.lose(ServerFaultKind.FLOODED, str(flood))
        except ValueError:
            told = f"it sent a line that is no message of JSON-RPC: {_shown(line)!r}"
            health.lose(ServerFaultKind.GARBAGE, told)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            health.lose(ServerFaultKind.CRASHED, "its session has ended")


def _shown(line: bytes) -> str:
    return printable(line[:200].strip().decode(errors="replace"), 200)


async def _write(
    to_server: asyncio.StreamWriter, from_session: MemoryObjectReceiveStream[SessionMessage], health: Health
) -> None:
    with from_session:
        try:
            async for sent in from_session:
                health.budget.asked()
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                to_server.write(text.encode() + b"\n")
                await to_server.drain()
        except (ConnectionError, OSError, RuntimeError):
            health.lose(ServerFaultKind.CRASHED, "its process ended or closed its standard input")
