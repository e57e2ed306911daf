"""One engine of a pool: its server, its client and what the pool knows about it."""

from __future__ import annotations

import asyncio
from enum import Enum
from pathlib import Path
from typing import Protocol

from mua.engine.client import EngineClient, EngineGone


class State(Enum):
    STARTING = "starting"
    AWAITING = "awaiting weights"
    SERVING = "serving"
    STOPPED = "stopped"


class Server(Protocol):
    """A server process here (:class:`mua.engine.server.SglangServer`) or on another machine."""

    label: str
    log_file: Path | None

    @property
    def url(self) -> str: ...

    @property
    def running(self) -> bool:
        """Whether the server's process is there; it may still be loading."""
        ...

    async def start(self, model_path: Path) -> None:
        """Start and wait until the server takes requests. Raises :class:`mua.errors.EngineError`."""
        ...

    async def stop(self) -> None:
        """End the server and everything it started. Never raises."""
        ...


class Engine:
    """One server, its client and what the pool knows about it."""

    def __init__(self, server: Server, slots: int, *, api_key: str, node: int = 0) -> None:
        self.server = server
        self.label = server.label
        self.node = node
        """Machine of the run it is on; 0 is this one."""
        self.starts = 0
        """Times it was started: tells a restarted engine from the one before."""
        self.stops = 0
        """Times it was stopped: tells one that is being restarted from the one before."""
        self.slots = asyncio.Semaphore(slots)
        self.control = asyncio.Lock()
        self.suspect = asyncio.Event()
        self.state = State.STOPPED
        self.in_flight = 0
        self.queued = 0
        self.restarts = 0
        self.spared = False
        """Whether it was stopped through no fault of its own: that restart does not count."""
        self.version = 0
        self.released: set[str] = set()
        """Tags of the memory it has given back."""
        self._api_key = api_key
        self._client: EngineClient | None = None
        self._stopping = asyncio.Lock()

    @property
    def client(self) -> EngineClient:
        if self._client is None:
            raise EngineGone(f"{self.label} is {self.state.value}")
        return self._client

    @property
    def up(self) -> bool:
        return self.state in (State.SERVING, State.AWAITING)

    async def start(self, model_path: Path) -> None:
        self.state = State.STARTING
        await self.server.start(model_path)
        self.starts += 1
        self.released.clear()
        self._client = EngineClient(self.server.url, self.label, self._api_key)
        self.version = 0

    async def stop(self) -> None:
        """End the server. Of several calls at once each returns when it is gone."""
        self.state = State.STOPPED
        self.stops += 1
        async with self._stopping:
            client, self._client = self._client, None
            await self.server.stop()
            if client is not None:
                await client.close()
