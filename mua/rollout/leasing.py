"""A sampler: it leases episodes from the store as the engines have room, plays them, and writes what came of them.

    room at the engines ──► claim ──► EpisodeRunner.trajectory ──► result, if the lease is still held
                              ▲             │ every heartbeat
                              └─ others  ◄──┴── renewed, or lost: the episode is given up

The trainer's process and ``mua sample`` run the same loop; they differ in how they reach the engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import Any, Protocol
from uuid import uuid4

from sqlalchemy.engine import Connection

from mua.config.schema import ExperimentConfig
from mua.environment.protocol import Task
from mua.rollout.runner import EpisodeRunner
from mua.store.database import Store
from mua.store.leased_records import LeasedRecorder
from mua.store.leases import EpisodeLease, claim, give_back, renew, tell_sampler
from mua.store.writer import Writer
from mua.types import Json
from mua.utils.errors import MuaError

log = logging.getLogger(__name__)
LATELY_SECONDS = 5.0
"""How long who has found something looks for more of it the more often."""
_WRITE_SECONDS = 0.02
"""Results are gathered so long: the trainer may wait for the last of a group."""


class EngineRoom(Protocol):
    """How much the engines can take, over all samplers."""

    async def room(self) -> int:
        """How many episodes this sampler may start now."""

    async def started(self, count: int) -> None:
        """It has started so many."""


class LeasingSampler:
    """One sampler at one start of a run. Belongs to one event loop."""

    def __init__(
        self,
        config: ExperimentConfig,
        store: Store,
        runner: EpisodeRunner,
        tasks: Mapping[tuple[str, str], Task],
        engines: EngineRoom,
        *,
        run: str,
        part: int,
        kind: str,
    ) -> None:
        """``tasks`` are training's by domain and id; ``engines`` say how many episodes they can take."""
        self._config, self._store, self._runner, self._tasks, self._engines = config, store, runner, tasks, engines
        self._run_id, self._part = run, part
        self.name = f"{kind}-{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._began = time.time()
        self._playing: dict[asyncio.Task[None], EpisodeLease] = {}
        self._failure: BaseException | None = None
        writer = Writer(
            store,
            every_seconds=_WRITE_SECONDS,
            queue_bytes=config.store.queue_megabytes * 2**20,
            outage_seconds=config.store.outage_seconds,
            name=self.name,
        )
        self.recorder = LeasedRecorder(writer, run, part, self.name)

    @property
    def playing(self) -> int:
        """Episodes under way."""
        return len(self._playing)

    async def work(self, ended: Callable[[], str | None], leaving: Callable[[], bool] = lambda: False) -> str:
        """EpisodeLease and play until ``ended`` says why there is nothing more to do; it is given back.

        When ``leaving`` is true nothing more is leased, and the reason is an empty text once what is under way has
        ended, or ``samplers.leave_seconds`` are over; the rest is given back to others. Raises
        :class:`MuaError` when the store stays away.
        """
        beat = asyncio.create_task(self._heartbeats(), name=f"heartbeats of {self.name}")
        try:
            return await self._work(ended, leaving, beat)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
            await self._give_up(list(self._playing))
            await self._leave()

    async def _work(
        self, ended: Callable[[], str | None], leaving: Callable[[], bool], beat: asyncio.Task[None]
    ) -> str:
        chosen, leave_by, found_at = self._config.samplers, None, monotonic()
        while (why := ended()) is None:
            if beat.done():
                beat.result()
            if self._failure is not None:
                raise self._failure
            if leaving():
                leave_by = leave_by or monotonic() + chosen.leave_seconds
                if not self._playing or monotonic() > leave_by:
                    return ""
            elif (free := self._config.rollout.concurrency - self.playing) > 0:
                wanted = min(free, await self._engines.room())
                if wanted > 0 and (found := await self._claim(wanted)):
                    self._start(found)
                    found_at = monotonic()
                    await self._engines.started(len(found))
            lately = monotonic() - found_at < LATELY_SECONDS
            await self._pause(chosen.poll_seconds / 4 if lately else chosen.poll_seconds)
        return why

    def _start(self, leases: list[EpisodeLease]) -> None:
        for lease in leases:
            task = asyncio.create_task(self._play(lease), name=f"episode {lease.ordinal}/{lease.sample}")
            self._playing[task] = lease
            task.add_done_callback(self._ended)

    async def _pause(self, seconds: float) -> None:
        """Until an episode ends, and so long at most."""
        if self._playing:
            await asyncio.wait(self._playing, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(seconds)

    async def _claim(self, count: int) -> list[EpisodeLease]:
        tries, seconds = self._config.rollout.max_retries + 1, self._config.samplers.lease_seconds

        def take(connection: Connection) -> list[EpisodeLease]:
            return claim(connection, self._run_id, self._part, self.name, count, seconds, tries)

        found = await self._patiently(take)
        self.recorder.took(found)
        return found

    async def _play(self, lease: EpisodeLease) -> None:
        task = self._tasks.get((lease.domain, lease.task_id))
        if task is None:
            raise MuaError(
                f"the run has a task {lease.task_id!r} of {lease.domain}, which this sampler does not know: its "
                "section environment, or the data it names, is another one; give the run's own"
            )
        temperature = self._config.rollout.temperature
        await self._runner.trajectory(
            task, lease.ordinal, lease.sample, temperature=temperature, recorder=self.recorder
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        lease = self._playing.pop(task)
        if task.cancelled():
            self.recorder.lost(lease)
        elif (error := task.exception()) is not None:
            self.recorder.lost(lease)
            self._failure = self._failure or error

    async def _heartbeats(self) -> None:
        """Renew the leases; give up the episodes of those that are lost."""
        while True:
            held = self.recorder.held()
            kept = await self._patiently(partial(self._renewed, held))
            lost = {lease.token for lease in held} - kept
            gone = [task for task, lease in self._playing.items() if lease.token in lost]
            if gone:
                log.info("%d episodes are no longer ours: their groups were cancelled, or others have them", len(gone))
            await self._give_up(gone)
            for lease in held:
                if lease.token in lost:
                    self.recorder.lost(lease)
            await asyncio.sleep(self._config.samplers.heartbeat_seconds)

    def _renewed(self, held: list[EpisodeLease], connection: Connection) -> set[str]:
        tell_sampler(connection, self._row("running"))
        return renew(connection, held, self._config.samplers.lease_seconds)

    def _row(self, state: str) -> Json:
        return {
            "id": self.name, "run_id": self._run_id, "host": socket.gethostname(), "pid": os.getpid(), "state": state,
            "running": self.playing, "started_at": self._began,
            "details": {"part": self._part, "delivered": self.recorder.delivered, "refused": self.recorder.refused},
        }  # fmt: skip

    async def _give_up(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self) -> None:
        """Everything is written, and what was not ended is others' at once."""

        def free(connection: Connection) -> None:
            give_back(connection, self.recorder.held())
            tell_sampler(connection, self._row("left"))

        def write() -> None:
            self.recorder.writer.close()
            self._store.patiently(free, self._config.store.flush_seconds)

        with contextlib.suppress(MuaError):  # leases run out by themselves
            await asyncio.to_thread(write)

    async def _patiently(self, function: Callable[[Connection], Any]) -> Any:
        return await asyncio.to_thread(self._store.patiently, function, self._config.store.outage_seconds)
