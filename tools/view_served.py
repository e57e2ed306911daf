"""A server of ``mua view`` on a loop of its own, in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mua.view.page_answers import Answers
from mua.view.web import ViewServer

_SECONDS = 60


@contextmanager
def served(answers: Answers) -> Iterator[ViewServer]:
    """A block in which it listens."""
    loop = asyncio.new_event_loop()
    started: threading.Event = threading.Event()
    found: list[ViewServer] = []
    stop = asyncio.Event()

    async def main() -> None:
        server = ViewServer(answers)
        async with server.serving():
            found.append(server)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert started.wait(_SECONDS), "the server does not listen"
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(_SECONDS)
        loop.close()
