"""A server that is a program: its process under a keeper, and messages over its standard input and output.

::

    ClientSession ◄── parsed messages ── reading ◄── lines, each at most ``message_bytes`` ── stdout
                  ───────────────────► writing ─────────────────────────────────────────► stdin
                                        keeper (keeper.py): ends everything, reports status and stderr

The SDK's own transport looks for the end of a line anew with every chunk, so that one line of 50 MB keeps the event
loop busy for more than a minute. Here a line that grows beyond the limit, or lines without end, cost the server its
life before they are parsed, and no more than :data:`TURN` messages are taken in one turn of the event loop.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, jsonrpc_message_adapter

from mua.config.environment import McpServerConfig
from mua.environment.mcp import keeper
from mua.environment.mcp.health import Flood, Health, ServerFaultKind
from mua.utils.cores import all_cores
from mua.utils.errors import ConfigError
from mua.utils.strict_json import printable

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

KEPT_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
TURN = 20
"""Messages that are read in one turn of the event loop."""
_LEAVE_SECONDS = 0.5
"""For a server to end by itself once its standard input is closed."""
_REPORT_SECONDS = 5.0
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


class ServerProcess:
    """The keeper and the server below it."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket, to_server: int, from_server: int) -> None:
        self.longest = 0
        """Bytes of one message."""
        self._process = process
        self._line = line
        self._to_server = to_server
        self._from_server = from_server
        self._reading: asyncio.ReadTransport | None = None
        self._writing: asyncio.WriteTransport | None = None
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    @classmethod
    def spawn(cls, config: McpServerConfig) -> Self:
        """Start both; blocks for some milliseconds."""
        ours, theirs = socket.socketpair()
        their_in, to_server = os.pipe()
        from_server, their_out = os.pipe()
        line = [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), str(os.getpid())]
        try:
            with all_cores():
                process = subprocess.Popen(
                    [*line, config.command, *config.args],
                    stdin=their_in,
                    stdout=their_out,
                    stderr=subprocess.DEVNULL,
                    env=variables_of(config),
                    cwd=config.cwd,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            ours.close()
            os.close(to_server)
            os.close(from_server)
            raise
        finally:
            theirs.close()
            os.close(their_in)
            os.close(their_out)
        return cls(process, ours, to_server, from_server)

    async def connect(self, longest: int) -> None:
        """Make the pipes part of the event loop."""
        loop = asyncio.get_running_loop()
        self.longest = longest
        self.reader = asyncio.StreamReader(limit=longest)
        protocol = asyncio.StreamReaderProtocol(self.reader)
        self._reading, _ = await loop.connect_read_pipe(lambda: protocol, os.fdopen(self._from_server, "rb", 0))
        self._from_server = -1
        flow = asyncio.streams.FlowControlMixin(loop=loop)
        self._writing, _ = await loop.connect_write_pipe(lambda: flow, os.fdopen(self._to_server, "wb", 0))
        self._to_server = -1
        self.writer = asyncio.StreamWriter(self._writing, flow, None, loop)

    async def end(self, *, politely: bool) -> tuple[int | None, str]:
        """End the server and all below it. Its exit status (None: it was still running) and the end of its stderr."""
        if self._writing is not None and not self._writing.is_closing():
            self._writing.abort()
        if self._reading is not None and not self._reading.is_closing():
            self._reading.close()
        for descriptor in (self._to_server, self._from_server):
            if descriptor >= 0:
                os.close(descriptor)
        loop = asyncio.get_running_loop()
        self._line.setblocking(False)
        try:
            async with asyncio.timeout(_LEAVE_SECONDS if politely else 0):
                report = await loop.sock_recv(self._line, 2 * keeper.TAIL)
        except TimeoutError:
            report = b""
        with suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(_REPORT_SECONDS):
                while got := await loop.sock_recv(self._line, 2 * keeper.TAIL):
                    report += got
                while self._process.poll() is None:
                    await asyncio.sleep(0.005)
        self._line.close()
        status, _, tail = report.partition(b"\n")
        said = printable(tail.decode(errors="replace").strip().replace("\n", " | "), 10**6)
        return int(status) if status else None, said if len(said) <= _SHOWN else f"...{said[-_SHOWN:]}"


@asynccontextmanager
async def stdio_streams(
    config: McpServerConfig, health: Health
) -> AsyncIterator[
    tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
]:
    """A running server's messages; on leaving nothing of it is left, and ``health`` knows how it ended."""
    spawning = asyncio.ensure_future(asyncio.to_thread(ServerProcess.spawn, config))
    try:
        process = await asyncio.shield(spawning)
    except asyncio.CancelledError:
        process = await spawning
        await process.end(politely=False)
        raise
    to_session, heard = anyio.create_memory_object_stream[SessionMessage | Exception](TURN)
    said, from_session = anyio.create_memory_object_stream[SessionMessage](TURN)
    tasks: list[asyncio.Task[None]] = []
    try:
        await process.connect(config.message_bytes)
        tasks.append(asyncio.create_task(_read(process, to_session, health)))
        tasks.append(asyncio.create_task(_write(process, from_session, health)))
        yield heard, said
    finally:
        with anyio.CancelScope(shield=True):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for stream in (to_session, heard, said, from_session):
                stream.close()
            politely = health.kind in (None, ServerFaultKind.CRASHED)  # one that crashed is about to report
            status, health.said = await process.end(politely=politely)
            if health.kind is ServerFaultKind.CRASHED and status is not None:
                ended = f"exit status {status}" if status >= 0 else f"signal {-status}"
                health.reason += f" ({ended})"


async def _read(
    process: ServerProcess, to_session: MemoryObjectSendStream[SessionMessage | Exception], health: Health
) -> None:
    """Lines to messages, until the server ends or says too much."""
    number = 0
    with to_session:
        try:
            while True:
                line = await process.reader.readuntil(b"\n")
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
            told = f"it sent a message of more than {process.longest} bytes (message_bytes)"
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
    process: ServerProcess, from_session: MemoryObjectReceiveStream[SessionMessage], health: Health
) -> None:
    with from_session:
        try:
            async for sent in from_session:
                health.budget.asked()
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.writer.write(text.encode() + b"\n")
                await process.writer.drain()
        except (ConnectionError, OSError, RuntimeError):
            health.lose(ServerFaultKind.CRASHED, "its process ended or closed its standard input")
