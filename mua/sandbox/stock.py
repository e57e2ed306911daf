"""Sandboxes started before they are needed.

::

    take() ──► one that is ready, or else a new one ──► the rollout's, until it closes it
      └──────► behind: as many new ones as are missing of ``ready``
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from mua.config.tools import SandboxConfig
from mua.sandbox.backends import check_backend
from mua.sandbox.box import Sandbox
from mua.utils.cores import given_cores
from mua.utils.errors import MuaError

log = logging.getLogger(__name__)


class SandboxStock:
    """Belongs to one event loop."""

    def __init__(self, config: SandboxConfig) -> None:
        """Raises :class:`ConfigError` where the backend is not on this machine."""
        check_backend(config)
        self._config = config
        self._ready: deque[Sandbox] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(max(2, len(given_cores())))

    async def start(self) -> None:
        """Start a first one, which shows that it can be done. Raises as :meth:`Sandbox.start` and ``prove_limit``."""
        if not self._ready:
            sandbox = await self._new()
            try:
                await sandbox.prove_limit()
            except BaseException:
                await sandbox.close()
                raise
            self._ready.append(sandbox)

    async def take(self) -> Sandbox:
        """A started sandbox, which the caller closes. Raises as :meth:`Sandbox.start`."""
        while self._ready:
            sandbox = self._ready.popleft()
            if sandbox.alive:
                break
            log.warning("a sandbox that nobody had used has ended: %s", sandbox.last_words())
            await sandbox.close()
        else:
            sandbox = await self._new()
        for _ in range(self._config.ready - len(self._ready) - len(self._starting)):
            task = asyncio.create_task(self._add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        return sandbox

    async def close(self) -> None:
        """End those that nobody took."""
        for task in self._starting:
            task.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        await asyncio.gather(*(sandbox.close() for sandbox in self._ready))
        self._ready.clear()

    async def _new(self) -> Sandbox:
        async with self._starts:
            sandbox = Sandbox(self._config)
            await sandbox.start()
            return sandbox

    async def _add(self) -> None:
        try:
            self._ready.append(await self._new())
        except MuaError as error:
            log.warning("%s", error)  # who takes the next one meets it
