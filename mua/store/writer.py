"""A thread that writes records in groups, so that nobody who makes them waits for a database.

    put(...) ──► queue, bounded in bytes ──► a group of whole puts ──► one transaction, numbered
                 who puts waits when it is full                         tried again while the database is away

Records arrive in the database in the order of their puts, and those of one put together. The number of a group stands
in the table ``writes`` in the same transaction: after a commit whose answer was lost it says whether the group is in.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from mua.config.storage import StoreConfig
from mua.store.database import Store, database_clock
from mua.store.faults import StoreError
from mua.store.tables import metadata, texts, writes
from mua.utils.errors import DeadlineExceeded

log = logging.getLogger(__name__)
_PLACES = {table: place for place, table in enumerate(metadata.sorted_tables)}

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Insert:
    """Rows for a table. Between two writes of another kind they are inserted table by table, those that others refer to
    first."""

    table: sa.Table
    rows: Sequence[Row]
    existing: str = "refuse"
    """What becomes of a row whose primary key is there: ``refuse`` fails, ``keep`` leaves the old one, ``replace``
    sets all columns given."""


@dataclass(frozen=True, slots=True)
class Update:
    """New values for the rows of a table where the columns of ``where`` are equal."""

    table: sa.Table
    where: Row
    values: Row


@dataclass(frozen=True, slots=True)
class Call:
    """Anything else within the transaction, at its place among the other records; it may be run again after an
    outage, which has undone what it did."""

    function: Callable[[Connection], object]


Write: TypeAlias = Insert | Update | Call
Writes: TypeAlias = Sequence[Write] | Callable[[], Iterable[Write]]
"""What one put has written; a function is called in the writer's thread, where compression costs the rollout nothing.
What it reads must not change any more."""


def execute(connection: Connection, made: Iterable[Write]) -> int:
    """Write records within a transaction; how many rows were given."""
    count = 0
    for table, columns, existing, rows in _batched(connection, made):
        if rows:
            made_for = sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)
            key = list(table.primary_key.columns)
            others = {name: made_for.excluded[name] for name in columns if name not in {column.name for column in key}}
            insert: Any = sa.insert(table)
            if existing == "replace" and others:
                insert = made_for.on_conflict_do_update(index_elements=key, set_=others)
            elif existing != "refuse":
                insert = made_for.on_conflict_do_nothing()
            connection.execute(insert, rows)
        count += len(rows)
    return count


@dataclass
class WriterFigures:
    """What a writer has done. The thread's own processor seconds are what the rest of the process lacks."""

    groups: int = 0
    puts: int = 0
    rows: int = 0
    bytes: int = 0
    cpu_seconds: float = 0.0
    blocked_seconds: float = 0.0
    """Of those who put, because the queue was full."""
    retries: int = 0


IDLE_SECONDS = 15.0
"""So often a writer without records writes that it is there."""


class Writer:
    """Writes what is put into it to ``store``. Use as a context manager, or :meth:`close` it."""

    def __init__(
        self,
        store: Store,
        *,
        every_seconds: float = 1.0,
        queue_bytes: int = 256 * 2**20,
        group_bytes: int = 16 * 2**20,
        outage_seconds: float = 600.0,
        name: str | None = None,
    ) -> None:
        self.store, self._every, self._limit, self._group = store, every_seconds, queue_bytes, group_bytes
        self._outage = outage_seconds
        self.guard: Callable[[Connection], object] = lambda _: None
        """Called in every transaction; what it raises ends the writer."""
        self.id = f"{name or 'writer'}-{uuid4().hex}"
        self.figures = WriterFigures()
        self.known_texts: set[str] = set()
        """Hashes of texts that puts before the one being made have written; of the writer's thread alone."""
        self._waiting: deque[tuple[Writes, int]] = deque()
        """What each put has written, and its size."""
        self._bytes = self._accepted = self._committed = 0
        self._urgent = self._closing = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, store: Store, config: StoreConfig, name: str | None = None) -> Self:
        """With the settings of the section ``store``."""
        return cls(
            store,
            every_seconds=config.write_seconds,
            queue_bytes=config.queue_megabytes * 2**20,
            outage_seconds=config.outage_seconds,
            name=name,
        )

    @property
    def full(self) -> bool:
        """Whether a put would wait."""
        return self._bytes >= self._limit

    def put(self, made: Writes, size: int = 1024) -> None:
        """Have ``made`` written, in one transaction; waits while the queue is full.

        ``size`` is about how many bytes it keeps in memory. Raises the error of a writer that has failed.
        """
        if self.full:
            self.wait_for_room()
        with self._changed:
            self._check()
            self._waiting.append((made, size))
            self._bytes += size
            self._accepted += 1
            if self._bytes >= min(self._limit, self._group):
                self._changed.notify_all()

    async def put_from_loop(self, made: Writes, size: int = 1024) -> None:
        """As :meth:`put`, without keeping the event loop from its work while the queue is full."""
        if self.full:
            await asyncio.to_thread(self.wait_for_room)
        self.put(made, size)

    def wait_for_room(self) -> None:
        """Wait until the queue is not full. A database that stays away ends the wait by the writer's own deadline."""
        began = time.monotonic()
        self._wait(lambda: not self.full, 2 * self._outage + 60, "no room in the queue of its writer")
        self.figures.blocked_seconds += time.monotonic() - began

    def flush(self, deadline: float = 120.0) -> None:
        """Wait until everything put so far is committed.

        Raises the writer's error, or :class:`DeadlineExceeded` after ``deadline`` seconds; the writer goes on.
        """
        goal = self._accepted
        self._wait(lambda: self._committed >= goal, deadline, f"not written within {deadline:g} s")

    def _wait(self, done: Callable[[], bool], seconds: float, late: str) -> None:
        """Have the queue written at once, and wait until it is ``done``."""
        with self._changed:
            self._check()
            self._urgent = True
            self._changed.notify_all()
            in_time = self._changed.wait_for(lambda: self._failure is not None or done(), timeout=seconds)
            self._check()
        if not in_time:
            raise DeadlineExceeded(f"store {self.store.name}: {late}")

    def close(self, deadline: float | None = None) -> None:
        """Write what is left and end the thread. Safe to call twice; raises as :meth:`flush`."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(self._outage + 60 if deadline is None else deadline)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"store {self.store.name}: the last records are not written")
        self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise
            log.exception("the store's writer failed too")

    def _check(self) -> None:
        failure = self._failure
        if isinstance(failure, StoreError):
            raise type(failure)(str(failure), passing=failure.passing)
        if failure is not None:
            raise StoreError(f"store {self.store.name}: a record could not be written: {_brief(failure)}") from failure

    def _run(self) -> None:
        number = 0
        while (group := self._next()) is not None:
            number += 1
            began = time.thread_time()
            try:
                rows = self._commit(group, number)
            except BaseException as error:
                log.error("the store's writer ends: %s", _brief(error))
                with self._changed:
                    self._failure = error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                self._bytes -= (size := sum(size for _, size in group))
                self._committed += len(group)
                done = self.figures
                done.groups, done.puts, done.rows = number, done.puts + len(group), done.rows + rows
                done.bytes += size
                done.cpu_seconds += time.thread_time() - began
                self._changed.notify_all()

    def _next(self) -> list[tuple[Writes, int]] | None:
        """The next group, when it is due; an empty one after :data:`IDLE_SECONDS` without any; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or self._urgent or self._bytes >= min(self._limit, self._group),
                timeout=self._every,
            )
            idle_until = time.monotonic() + IDLE_SECONDS
            while not self._waiting and time.monotonic() < idle_until:
                self._urgent = False
                if self._closing:
                    return None
                self._changed.wait(self._every)
            group: list[tuple[Writes, int]] = []
            while self._waiting and sum(size for _, size in group) < self._group:
                group.append(self._waiting.popleft())
            return group

    def _commit(self, group: list[tuple[Writes, int]], number: int) -> int:
        made = _bodies_first([write for made, _ in group for write in (made() if callable(made) else made)])
        tried = False

        def write(connection: Connection) -> int:
            nonlocal tried
            if tried:
                self.figures.retries += 1
                last = connection.execute(sa.select(writes.c.number).where(writes.c.writer == self.id)).scalar()
                if last is not None and last >= number:
                    return 0
            tried = True
            self.guard(connection)
            rows = execute(connection, made)
            row = {"writer": self.id, "number": number, "at": database_clock(connection)}
            execute(connection, [Insert(writes, [row], "replace")])
            return rows

        return self.store.patiently(write, self._outage)


def _bodies_first(made: Sequence[Write]) -> list[Write]:
    """``made`` with what it has for the table ``texts`` in front, in the order of hashes: texts refer to nothing,
    and two writers that store the same ones then never wait for each other in a ring."""
    bodies: dict[str, Row] = {}
    others: list[Write] = []
    for write in made:
        if isinstance(write, Insert) and write.table is texts and write.existing == "keep":
            bodies |= {row["hash"]: row for row in write.rows}
        else:
            others.append(write)
    return [Insert(texts, [bodies[name] for name in sorted(bodies)], "keep"), *others] if bodies else others


def _brief(error: BaseException) -> str:
    origin = getattr(error, "orig", None) if isinstance(error, SQLAlchemyError) else None
    return " ".join(f"{type(origin or error).__name__}: {origin or error}".split())[:500]


def _batched(
    connection: Connection, made: Iterable[Write]
) -> Iterator[tuple[sa.Table, tuple[str, ...], str, list[Row]]]:
    """Inserts of the same form as one, those of tables that others refer to first; no insert passes what stands between
    two, nor one of another form into its own table."""
    waiting: dict[sa.Table, tuple[tuple[str, ...], str, list[Row]]] = {}

    def taken() -> Iterator[tuple[sa.Table, tuple[str, ...], str, list[Row]]]:
        for table in sorted(waiting, key=_PLACES.__getitem__):
            yield table, *waiting[table]
        waiting.clear()

    for write in made:
        if not isinstance(write, Insert):
            yield from taken()
            if isinstance(write, Call):
                write.function(connection)
            else:
                clause = sa.and_(*(write.table.c[name] == value for name, value in write.where.items()))
                connection.execute(sa.update(write.table).where(clause).values(dict(write.values)))
            continue
        for row in write.rows:
            columns = tuple(sorted(row))
            if write.table in waiting and waiting[write.table][:2] != (columns, write.existing):
                yield from taken()
            waiting.setdefault(write.table, (columns, write.existing, []))[2].append(row)
    yield from taken()
