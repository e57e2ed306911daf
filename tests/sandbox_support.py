"""Bubblewrap for the tests of sandboxes: installed where it can be, else their reason to skip."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from functools import lru_cache

import psutil
import pytest

from mua.users.scoring.sandbox import Sandbox, SandboxLimits
from mua.utils.errors import MuaError
from tools.debian_packages import PackagesUnavailable, install


@lru_cache(maxsize=1)
def missing() -> str:
    """Why there can be no sandboxes here; empty where there can."""
    with contextlib.suppress(PackagesUnavailable):  # the sandbox itself says what is missing
        install(("bubblewrap",), lambda: shutil.which("bwrap") is None)

    async def starts() -> None:
        sandbox = Sandbox(SandboxLimits())
        await sandbox.start()
        await sandbox.close()

    try:
        asyncio.run(starts())
    except MuaError as error:
        return str(error)
    return ""


def need_sandboxes() -> None:
    """Skip where there can be none."""
    if why := missing():
        pytest.skip(f"no sandboxes here: {why}")


def below(pid: int = 0) -> list[psutil.Process]:
    """All processes that ``pid``, or this process, has started, and theirs."""
    found: list[psutil.Process] = psutil.Process(pid or os.getpid()).children(recursive=True)
    return found
