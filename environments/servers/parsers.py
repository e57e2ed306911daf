"""Processes that make text of pages, so that no page holds up the event loop or takes more than its share.

::

    parse() ── waits for a free process ──► its socket ──► PageText
                                               └─ it ends, is killed at the deadline, or the caller is cancelled:
                                                  another takes its place

A process is a clean interpreter without the run's variables. Every so many pages another takes its place, since
parsers keep what they have seen.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress

from environments.servers.page_text import PageError, PageText
from mua.types import Json
from mua.utils.cores import all_cores
from mua.utils.errors import ConfigError, EnvironmentFault

log = logging.getLogger(__name__)

START_SECONDS = 60.0
_PAGES = 2000
"""Of one process."""
_WALL = 6.0
"""Deadline as a multiple of the CPU time: other work of the machine takes its turns between."""
_QUEUE = 12.0
"""How long a page waits for a free process, likewise, besides the time of starting one."""
_LONGEST_LINE = 2**26
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TMPDIR", "LD_LIBRARY_PATH")


class Parsers:
    """At most ``count`` processes, started when they are needed. Belongs to one event loop."""

    def __init__(self, count: int, seconds: float, key: str) -> None:
        """``seconds`` of CPU time a page; ``key`` names the section in messages."""
        self._seconds = seconds
        self._key = key
        self._free: asyncio.LifoQueue[_Process | None] = asyncio.LifoQueue()
        for _ in range(count):
            self._free.put_nowait(None)
        self._closed = False

    async def start(self) -> None:
        """Start one process. Raises :class:`ConfigError` where a package is missing, else :class:`EnvironmentFault`."""
        process = await self._next()
        try:
            process = process or await self._started()
        finally:
            self._free.put_nowait(process)

    async def parse(
        self, body: bytes, *, html: bool, charset: str = "", url: str = "", links: bool = True,
        longest: int = 1_000_000, pdf: bool = False,
    ) -> PageText:  # fmt: skip
        """The text of one page, as :func:`environments.servers.page_text.page_text`.

        Raises :class:`PageError` for a page that no text can be made of, and as :meth:`start`.
        """
        asked = {"html": html, "charset": charset, "url": url, "links": links, "longest": longest, "pdf": pdf}
        head = json.dumps({**asked, "bytes": len(body), "seconds": self._seconds}).encode() + b"\n"
        process = await self._next()
        try:
            process = process or await self._started()
            answer = await process.ask(head + body, self._seconds * _WALL)
        finally:
            if process is not None and (process.spent or self._closed):
                process.kill()
                process = None
            self._free.put_nowait(process)
        if "raised" in answer:
            log.info("a page cannot be parsed: %s", answer["raised"])
            raise PageError("no text can be made of this page")
        return PageText(**answer)

    async def close(self) -> None:
        """End the processes. Pages under way are over before, or were cancelled."""
        self._closed = True
        while not self._free.empty():
            if (process := self._free.get_nowait()) is not None:
                process.kill()

    async def _next(self) -> _Process | None:
        seconds = START_SECONDS + _QUEUE * self._seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._free.get()
        except TimeoutError:
            raise EnvironmentFault(
                f"{self._key}: no process for parsing pages was free within {seconds:g} s; raise {self._key}.parsers",
                passing=True,
            ) from None

    async def _started(self) -> _Process:
        process = await _Process.start()
        try:
            hello = await process.ask(b"", START_SECONDS)
        except PageError as error:
            raise EnvironmentFault(f"{self._key}: a process for parsing pages does not start: {error}") from None
        if missing := hello.get("missing"):
            process.kill()
            raise ConfigError(f"{self._key}: {missing}; install the extra: pip install 'mua[tools]'")
        return process


class _Process:
    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.spent = True
        """Whether it may be asked no more."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._asked = 0

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
        with theirs, all_cores():
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "environments.servers.parse_worker"],
                stdin=theirs.fileno(),
                stdout=2,
                env=kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        return cls(process, *await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE))

    async def ask(self, message: bytes, seconds: float) -> Json:
        """The answer to one message. Raises :class:`PageError` when none comes, and the process is gone then."""
        self.spent, self._asked = True, self._asked + 1
        line = b""
        try:
            async with asyncio.timeout(seconds):
                with suppress(ConnectionError, ValueError):
                    self._writer.write(message)
                    await self._writer.drain()
                    line = await self._reader.readline()
        except TimeoutError:
            pass
        finally:
            if not line.endswith(b"\n"):
                self.kill()
        if not line.endswith(b"\n"):
            raise PageError("no text can be made of this page: it takes too much time or memory")
        self.spent = self._asked > _PAGES
        answer: Json = json.loads(line)
        return answer

    def kill(self) -> None:
        """End it at once; it has nothing to lose."""
        self.spent = True
        self._writer.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
