"""``mua view`` for tests: a server on a loop of its own, and a headless Chromium, Debian's, driven by Playwright.

Where Chromium is missing, root installs it; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mua.view.page_answers import Answers
from mua.view.web import ViewServer
from tools.debian_packages import install

PATIENCE_MS = 120_000
"""For anything that the page is waited for: a busy machine is no fault."""
_SECONDS = 60


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser of Playwright. Raises :class:`PackagesUnavailable`."""
    from playwright.sync_api import sync_playwright

    install(("chromium",), lambda: shutil.which("chromium") is None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), headless=True, timeout=PATIENCE_MS,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )  # fmt: skip
        try:
            yield browser
        finally:
            browser.close()


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
