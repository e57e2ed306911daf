"""A headless Chromium on this machine for tests: Debian's, driven by Playwright.

Where it is missing, root installs it; elsewhere the tests are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PACKAGE = "chromium"
PATIENCE_MS = 120_000
"""For anything that the page is waited for: a busy machine is no fault."""


class BrowserUnavailable(RuntimeError):
    """No Chromium is here and none could be installed; the message says what to do."""


def browser_program() -> str:
    """Chromium's path; installs it as root. Raises :class:`BrowserUnavailable`."""
    for _ in range(2):
        if found := shutil.which("chromium") or shutil.which("chromium-browser"):
            return found
        _install()
    raise BrowserUnavailable(f"{PACKAGE} is installed, but it is not there")


def _install() -> None:
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", PACKAGE]
    if shutil.which("apt-get") is None or os.geteuid():
        raise BrowserUnavailable(f"Chromium is missing; as root run: {' '.join(command)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for step in (["apt-get", "update", "-qq"], command):
        done = subprocess.run(step, env=environment, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            raise BrowserUnavailable(f"{' '.join(step)} failed: {done.stderr.strip()[-300:]}")


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
