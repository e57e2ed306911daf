"""Who rolls out which episode: rows of ``episodes`` that samplers lease, and that exactly one of them ends.

    open ──claim──► leased ──deliver──► done            the trainer opens groups and takes those that are complete
     ▲                │
     └─ give_back ────┤  the sampler leaves
     └─ claim ────────┘  its lease is over: others may have it

A lease is a token that only its holder knows. Whoever writes a result must still hold it, of a group that is still
open, in the transaction that writes the result: an episode whose lease went to another sampler, or whose group was
cancelled, is written by nobody else. On PostgreSQL claimers skip the rows that others are claiming (SKIP LOCKED); on
SQLite one transaction writes at a time. Leases run by the database's clock, so that the clocks of machines may differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.database import database_clock
from mua.store.recorder import EpisodeRecord, Recorder
from mua.store.tables import episodes, samplers, tasks, texts
from mua.store.trajectories import EpisodeKey
from mua.store.writer import Call, Insert, Write, Writer, execute
from mua.types import Json

TRAINING = 0
"""The round of training's episodes."""


@dataclass(frozen=True, slots=True)
class EpisodeLease:
    """One episode, and the right to write its result."""

    run_id: str
    part: int
    ordinal: int
    sample: int
    domain: str
    task_id: str
    attempts: int
    """Tries that leases before this one may have written; this one's count on from there."""
    token: str

    @property
    def place(self) -> tuple[int, int]:
        """Ordinal and sample."""
        return self.ordinal, self.sample


# ---- the trainer's side


def open_group(connection: Connection, task: Mapping[str, Any]) -> None:
    """Offer the episodes of a group, whose row of ``tasks`` is given; one that was offered before begins again."""
    execute(connection, [Insert(tasks, [task], "replace")])
    place = {name: task[name] for name in ("run_id", "round", "ordinal")}
    fresh = {"state": "open", "sampler": None, "lease": None, "lease_until": None, "trajectory_id": None}
    rows = [place | {"sample": sample} | fresh for sample in range(task["size"])]
    execute(connection, [Insert(episodes, rows, "replace")])


def ended_episodes(connection: Connection, run: str, ordinals: Collection[int]) -> dict[tuple[int, int], str]:
    """Of the groups of ``ordinals``: by ordinal and sample, the trajectories of the episodes that are done."""
    found: dict[tuple[int, int], str] = {}
    columns = episodes.c.ordinal, episodes.c.sample, episodes.c.trajectory_id
    of_run = (episodes.c.run_id == run) & (episodes.c.round == TRAINING) & (episodes.c.state == "done")
    wanted = sorted(ordinals)
    for at in range(0, len(wanted), 500):  # SQLite takes so many parameters
        chosen = sa.select(*columns).where(of_run, episodes.c.ordinal.in_(wanted[at : at + 500]))
        found |= {(row.ordinal, row.sample): row.trajectory_id for row in connection.execute(chosen)}
    return found


def end_groups(connection: Connection, run: str, ordinals: Collection[int], state: str) -> None:
    """These groups are ``complete``: all their episodes are done; or ``cancelled``: nobody is to roll them out any
    more, and results of their episodes are refused from now on."""
    for ordinal in ordinals:
        where = (tasks.c.run_id == run) & (tasks.c.round == TRAINING) & (tasks.c.ordinal == ordinal)
        values = {"state": state, "ended_at": time.time()}
        connection.execute(sa.update(tasks).where(where, tasks.c.state == "open").values(values))


# ---- the samplers' side


def claim(
    connection: Connection, run: str, part: int, sampler: str, count: int, seconds: float, tries: int
) -> list[EpisodeLease]:
    """Up to ``count`` episodes of open groups, those that are trained first: open ones, and leased ones whose lease is
    over. They are the sampler's for ``seconds``; each may write ``tries`` attempts."""
    now = database_clock(connection)
    # Two questions, each answered from an index in its order: for one with OR a database reads all that has ended.
    free = _claimable(connection, run, part, count, episodes.c.state == "open")
    over = (episodes.c.state == "leased") & (episodes.c.lease_until < now)
    rows = sorted([*free, *_claimable(connection, run, part, count, over)], key=lambda row: (row.ordinal, row.sample))
    found = [
        EpisodeLease(run, part, row.ordinal, row.sample, row.domain, row.task_id, row.attempts, uuid4().hex)
        for row in rows[:count]
    ]
    for lease in found:
        values = {
            "state": "leased", "sampler": sampler, "lease": lease.token, "lease_until": now + seconds,
            "attempts": lease.attempts + tries,
        }  # fmt: skip
        connection.execute(sa.update(episodes).where(*_row(lease)).values(values))
    return found


def renew(connection: Connection, leases: Iterable[EpisodeLease], seconds: float) -> set[str]:
    """Keep ``leases`` for ``seconds`` from now on; the tokens of those that still are their holder's, also where they
    were over and nobody took them."""
    now, held = database_clock(connection), set[str]()
    for lease in sorted(leases, key=lambda lease: lease.place):  # in one order, so that two never wait in a ring
        changed = sa.update(episodes).where(*_held(lease)).values(lease_until=now + seconds)
        if connection.execute(changed).rowcount:
            held.add(lease.token)
    return held


def give_back(connection: Connection, leases: Iterable[EpisodeLease]) -> None:
    """Others may have these episodes at once."""
    free = {"state": "open", "sampler": None, "lease": None, "lease_until": None}
    for lease in sorted(leases, key=lambda lease: lease.place):
        connection.execute(sa.update(episodes).where(*_held(lease)).values(free))


def deliver(connection: Connection, lease: EpisodeLease, trajectory_id: str) -> bool:
    """The episode has ended as this trajectory, which is written in the same transaction; False: the lease is lost, and
    nothing may be written."""
    values = {"state": "done", "trajectory_id": trajectory_id, "lease": None, "lease_until": None}
    return connection.execute(sa.update(episodes).where(*_held(lease)).values(values)).rowcount == 1


def tell_sampler(connection: Connection, row: Json) -> None:
    """A sampler says what it does: its row of ``samplers`` but for ``seen_at``, which is the database's."""
    execute(connection, [Insert(samplers, [row | {"seen_at": database_clock(connection)}], "replace")])


def live_samplers(connection: Connection, run: str, seconds: float) -> int:
    """How many have said something in the last ``seconds`` and have not left."""
    since = database_clock(connection) - seconds
    alive = (samplers.c.run_id == run) & (samplers.c.state == "running") & (samplers.c.seen_at >= since)
    return int(connection.execute(sa.select(sa.func.count()).select_from(samplers).where(alive)).scalar_one())


def _claimable(
    connection: Connection, run: str, part: int, count: int, state: sa.ColumnElement[bool]
) -> list[sa.Row[Any]]:
    """Up to ``count`` episodes of open groups in that state, the first first; no other claimer gets them now."""
    others = tasks.alias()
    of_run = (others.c.run_id == run) & (others.c.round == TRAINING) & (others.c.state == "open")
    first = sa.select(sa.func.min(others.c.ordinal)).where(of_run).scalar_subquery()
    columns = (
        episodes.c.ordinal, episodes.c.sample, episodes.c.attempts, tasks.c.domain, tasks.c.task_id,
    )  # fmt: skip
    chosen = (
        sa.select(*columns)
        .join(tasks, _same_group())
        .where(
            episodes.c.run_id == run, episodes.c.round == TRAINING, state, episodes.c.ordinal >= first,
            tasks.c.state == "open", tasks.c.part == part,
        )
        .order_by(episodes.c.ordinal, episodes.c.sample)
        .limit(count)
        .with_for_update(skip_locked=True, of=episodes)
    )  # fmt: skip
    return list(connection.execute(chosen))


def _same_group() -> sa.ColumnElement[bool]:
    return (
        (tasks.c.run_id == episodes.c.run_id)
        & (tasks.c.round == episodes.c.round)
        & (tasks.c.ordinal == episodes.c.ordinal)
    )


def _row(lease: EpisodeLease) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        episodes.c.run_id == lease.run_id,
        episodes.c.round == TRAINING,
        episodes.c.ordinal == lease.ordinal,
        episodes.c.sample == lease.sample,
    )


def _held(lease: EpisodeLease) -> tuple[sa.ColumnElement[bool], ...]:
    """The row while the lease is its holder's and the group wants it."""
    wanted = sa.exists().where(_same_group(), tasks.c.state == "open", tasks.c.part == lease.part)
    return (*_row(lease), episodes.c.state == "leased", episodes.c.lease == lease.token, wanted)


class LeasedRecorder(Recorder):
    """Of one sampler at one start of a run. Safe in threads."""

    def __init__(self, writer: Writer, run_id: str, part: int, sampler: str) -> None:
        super().__init__(writer, run_id, part, sampler=sampler)
        self._leases: dict[tuple[int, int], EpisodeLease] = {}
        self._tries: dict[str, int] = {}
        self._guard = threading.Lock()
        self.delivered = 0
        self.refused = 0
        """Results that were not written: their lease was lost."""

    def took(self, leases: Iterable[EpisodeLease]) -> None:
        """These are held from now on."""
        with self._guard:
            for lease in leases:
                self._leases[lease.place] = lease
                self._tries[lease.token] = 0

    def held(self) -> list[EpisodeLease]:
        """The leases whose results are not written yet."""
        with self._guard:
            return list(self._leases.values())

    def lost(self, lease: EpisodeLease) -> None:
        """The lease is no longer held: its result is written, or another has it, or its group is cancelled."""
        with self._guard:
            if self._leases.get(lease.place) is lease:
                del self._leases[lease.place]
            self._tries.pop(lease.token, None)

    def episode(self, ordinal: int, sample: int, sampling: Json, *, evaluation: bool) -> EpisodeRecord:
        """The record of the next try of a leased episode."""
        assert not evaluation, "evaluations are not leased"
        with self._guard:
            lease = self._leases[ordinal, sample]
            attempt = self._tries[lease.token] = self._tries[lease.token] + 1
        key = EpisodeKey(lease.run_id, lease.part, TRAINING, ordinal, sample, lease.attempts + attempt)
        return LeasedEpisodeRecord(self, key, sampling, lease)


class LeasedEpisodeRecord(EpisodeRecord):
    """One try at one leased episode."""

    def __init__(self, recorder: LeasedRecorder, key: EpisodeKey, sampling: Json, lease: EpisodeLease) -> None:
        super().__init__(recorder, key, sampling)
        self._of, self._lease = recorder, lease

    def _as_result(self, made: list[Write]) -> list[Write]:
        def write(connection: Connection) -> None:
            if written := deliver(connection, self._lease, self.key.trajectory_id):
                execute(connection, result)
            self._of.delivered += written
            self._of.refused += not written
            self._of.lost(self._lease)

        # Later records count on the texts being there, whether this one is delivered or not.
        bodies: list[Write] = []
        result: list[Write] = []
        for one in made:
            (bodies if isinstance(one, Insert) and one.table is texts else result).append(one)
        return [*bodies, Call(write)]
