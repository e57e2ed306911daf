"""A headless Chromium on this machine for tests: Debian's, driven by Playwright.

Where it is missing, root installs it; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tools.debian_packages import PackagesUnavailable, install

PACKAGE = "chromium"
PATIENCE_MS = 120_000
"""For anything that the page is waited for: a busy machine is no fault."""


class BrowserUnavailable(RuntimeError):
    """No Chromium is here and none could be installed; the message says what to do."""


def browser_program() -> str:
    """Chromium's path; installs it as root. Raises :class:`BrowserUnavailable`."""
    try:
        install((PACKAGE,), lambda: _program() is None)
    except PackagesUnavailable as error:
        raise BrowserUnavailable(str(error)) from None
    found = _program()
    assert found is not None
    return found


def _program() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser of Playwright. Raises :class:`BrowserUnavailable`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise BrowserUnavailable("playwright is missing: pip install playwright") from None
    program = browser_program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, headless=True, timeout=PATIENCE_MS,
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"],
        )  # fmt: skip
        try:
            yield browser
        finally:
            browser.close()
