"""The groups of a run that samplers roll out: offered in the store, taken when all their episodes are there.

    scheduler: group(ordinal) ──► offered ──► leased by samplers ──► done ──► the group, read back from the store
               cancelled      ──► nobody's any more

One exchange with the database serves all groups under way: it offers and cancels, and asks which episodes have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.config.rollout import SamplersConfig
from mua.environment.protocol import Task
from mua.rollout.rollout_worker import LATELY_SECONDS
from mua.store.database import Store, database_clock
from mua.store.faults import StoreUnreachable
from mua.store.leases import (
    end_groups,
    ended_episodes,
    live_samplers,
    open_group,
)
from mua.store.recorder import Recorder
from mua.store.tables import engines
from mua.store.trajectories import read_trajectories
from mua.store.writer import Insert, execute
from mua.types import Group, Json, Trajectory
from mua.utils.errors import EngineError, MuaError

log = logging.getLogger(__name__)
_PRESENCE_SECONDS = 2.0


@dataclass
class _Offered:
    """A group under way."""

    row: dict[str, Any]
    on_episode: Callable[[], None]
    complete: asyncio.Future[dict[int, str]]
    seen: set[int] = field(default_factory=set)
    """Samples whose end was told."""


class JobQueue:
    """The trainer's side. Belongs to one event loop; use as a context manager.

    ``presence`` gives the rows of the engines and their router, which are written every few seconds.
    """

    def __init__(
        self, store: Store, recorder: Recorder, config: SamplersConfig, *, outage_seconds: float,
        presence: Callable[[], list[Json]],
    ) -> None:  # fmt: skip
        self._store, self._recorder, self._config, self._outage = store, recorder, config, outage_seconds
        self._presence = presence
        self._offered: dict[int, _Offered] = {}
        self._orders: list[Callable[[Connection], None]] = []
        self._wake = asyncio.Event()
        self._failure: MuaError | None = None
        self._closing = False
        self._exchanging: asyncio.Task[None] | None = None
        self._told = 0.0
        self._found_at = monotonic()
        self._last_alive = monotonic()
        self.alive = 0
        """Samplers that have given a sign of life lately, as of the last look."""

    async def __aenter__(self) -> JobQueue:
        await self._exchange()  # samplers find the run from now on
        self._exchanging = asyncio.create_task(self._go_on(), name="job queue")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is offered any more, and the engines are nobody's."""

        def leave(connection: Connection) -> None:
            for order in self._orders:
                order(connection)
            of_run = engines.c.run_id == self._recorder.run_id
            values = {"state": "gone", "details": None, "running": 0, "waiting": 0}
            connection.execute(sa.update(engines).where(of_run).values(values))

        self._closing = True
        self._wake.set()
        if self._exchanging is not None:
            await self._exchanging
        try:
            await asyncio.to_thread(self._store.patiently, leave, _PRESENCE_SECONDS)
        except MuaError as error:
            log.warning("samplers were not told that the run has ended: %s", error)

    async def group(
        self, task: Task, ordinal: int, size: int, version: int, on_episode: Callable[[], None] = lambda: None
    ) -> Group:
        """``size`` trajectories of ``task``, by whatever samplers there are; ``on_episode`` is called after each.

        Cancelled, the group is nobody's. Raises :class:`MuaError` when the store stays away, or no sampler
        has come for ``samplers.start_seconds``.
        """
        if self._failure is not None:
            raise self._failure
        row = self._recorder.group_row(ordinal, task.domain, task.id, size, version, task.split, task.labels)
        offered = _Offered(row, on_episode, asyncio.get_running_loop().create_future())
        self._offered[ordinal] = offered
        self._order(lambda connection: open_group(connection, row))
        try:
            names = await offered.complete
        except asyncio.CancelledError:
            run = self._recorder.run_id
            self._order(lambda connection: end_groups(connection, run, [ordinal], "cancelled"))
            raise
        finally:
            if self._offered.get(ordinal) is offered:
                del self._offered[ordinal]
        for sample, name in names.items():
            self._recorder.learned(ordinal, sample, int(name.rpartition("/")[2]))

        def read(connection: Connection) -> list[Trajectory]:
            return list(read_trajectories(connection, [names[sample] for sample in range(size)]))

        def from_store() -> list[Trajectory]:
            try:
                with self._store.read() as connection:
                    return read(connection)
            except StoreUnreachable:
                return self._store.patiently(read, self._outage, stop=lambda: self._closing)

        return Group(ordinal, task.id, await asyncio.to_thread(from_store))

    def own_sampler_ended(self, work: asyncio.Task[str]) -> None:
        """The trainer's own sampler has ended; with an error, so do the groups under way."""
        if not work.cancelled() and (error := work.exception()) is not None:
            fault = EngineError(f"the trainer's sampler: {error!r}", passing=False)
            self._fail(error if isinstance(error, MuaError) else fault)

    # ---- inside

    def _order(self, what: Callable[[Connection], None]) -> None:
        self._orders.append(what)
        self._wake.set()

    async def _go_on(self) -> None:
        while not self._closing:
            try:
                lately = monotonic() - self._found_at < LATELY_SECONDS
                async with asyncio.timeout(self._config.poll_seconds / (4 if lately else 1)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._exchange()
                if self.alive or not self._offered:
                    self._last_alive = monotonic()
                elif monotonic() - self._last_alive > self._config.start_seconds:
                    raise EngineError(
                        f"no sampler has been alive for samplers.start_seconds = {self._config.start_seconds:g}; start "
                        f"mua sample {self._store.name}, or set samplers.inside to true"
                    )
            except MuaError as error:
                self._fail(error)
                return
            except Exception as error:
                log.exception("the exchange with the store failed")
                self._fail(EngineError(f"the exchange with the store failed: {error!r}", passing=False))
                return

    def _fail(self, error: MuaError) -> None:
        self._failure = error
        for offered in self._offered.values():
            if not offered.complete.done():
                offered.complete.set_exception(error)

    async def _exchange(self) -> None:
        orders, self._orders = self._orders, []
        present: list[Json] | None = None
        if monotonic() - self._told > min(_PRESENCE_SECONDS, self._config.heartbeat_seconds):
            self._told, present = monotonic(), self._presence()
        offers = dict(self._offered)
        wanted = {ordinal: offered.row["size"] for ordinal, offered in offers.items()}
        found: dict[tuple[int, int], str] = await asyncio.to_thread(self._with_store, orders, present, wanted)
        ended: dict[int, dict[int, str]] = {ordinal: {} for ordinal in offers}
        for (ordinal, sample), name in found.items():
            ended[ordinal][sample] = name
        for ordinal, offered in offers.items():
            if self._offered.get(ordinal) is not offered:  # cancelled meanwhile, and perhaps offered again
                continue
            for _ in ended[ordinal].keys() - offered.seen:
                self._found_at = monotonic()
                offered.on_episode()
            offered.seen.update(ended[ordinal])
            if len(offered.seen) == wanted[ordinal] and not offered.complete.done():
                offered.complete.set_result(ended[ordinal])

    def _with_store(
        self, orders: Sequence[Callable[[Connection], None]], present: list[Json] | None, wanted: dict[int, int]
    ) -> dict[tuple[int, int], str]:
        """In a thread: do the orders, tell who is there, see what has ended."""
        run, found = self._recorder.run_id, dict[tuple[int, int], str]()

        def look(connection: Connection) -> list[int]:
            """The groups whose episodes have all ended."""
            nonlocal found
            found = ended_episodes(connection, run, wanted)
            ended = Counter(ordinal for ordinal, _ in found)
            return [ordinal for ordinal, size in wanted.items() if ended[ordinal] == size]

        def write(connection: Connection) -> None:
            for order in orders:
                order(connection)
            if present is not None:
                now = database_clock(connection)
                rows = [row | {"run_id": run, "seen_at": now} for row in present]
                execute(connection, [Insert(engines, rows, "replace")])
                self.alive = live_samplers(connection, run, self._config.lease_seconds)
            end_groups(connection, run, look(connection), "complete")

        if not orders and present is None:  # as long as nothing is to be written: reading takes no lock
            if not wanted:
                return found
            with contextlib.suppress(StoreUnreachable), self._store.read() as connection:
                if not look(connection):
                    return found
        self._store.patiently(write, self._outage, stop=lambda: self._closing)
        return found
