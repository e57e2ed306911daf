"""A run and its starts: who it is in its store, what of it a later start makes again, and which start goes on now."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.database import Store, database_clock
from mua.store.faults import StoreError
from mua.store.queries import lost_step
from mua.store.tables import engines, parts, runs, steps, tasks, writes
from mua.types import Json
from mua.utils.run_identity import claim_run

SILENT_SECONDS = 60.0
"""A start on another machine that has written nothing for so long has ended, however it did."""
_POLL_SECONDS = 1.0


def begin_part(
    store: Store,
    output: Path,
    name: str,
    config: Json,
    provenance: Json,
    *,
    from_step: int | None,
    seconds: float,
) -> tuple[str, int, int]:
    """A run is started, or continued: its id, the part that begins, and the last round of evaluation so far.

    Raises :class:`StoreError` where an earlier start of it still goes on; on another machine that takes up to
    :data:`SILENT_SECONDS` to see.

    Args:
        store: waited for so many ``seconds`` while it does not answer.
        output: the run's folder.
        name: for people.
        config: masked.
        provenance: what the run is made with.
        from_step: the next step to take. What earlier parts wrote of it and of later ones is lost, and groups that no
            step which stands has taken are cancelled; the new part makes those it needs again. None: the part makes no
            steps, and nothing is lost.
    """
    run = claim_run(output)
    before: float | None = None
    while (holder := store.patiently(lambda connection: _live_start(connection, run), seconds)) is not None:
        host, pid, sign = holder
        if sign is None or (before is not None and sign != before):
            raise StoreError(
                f"run {run}: goes on in process {pid} on {host}; wait for it, end it, or choose another output"
            )
        before = sign  # and where no other comes, it is soon too old
        time.sleep(_POLL_SECONDS)
    now = time.time()

    def begin(connection: Connection) -> tuple[str, int, int]:
        of_run = sa.select(parts.c.part, parts.c.started_at).where(parts.c.run_id == run)
        newest = connection.execute(of_run.order_by(parts.c.part.desc()).limit(1)).one_or_none()
        rounds = sa.select(sa.func.coalesce(sa.func.max(tasks.c.round), 0)).where(tasks.c.run_id == run)
        if newest is not None and newest.started_at == now:  # it was done, and only the answer was lost
            return run, int(newest.part), int(connection.execute(rounds).scalar_one())
        if newest is None:
            row = {"id": run, "output": str(output.resolve()), "name": name, "state": "running", "started_at": now}
            connection.execute(sa.insert(runs).values(row | {"config": config, "provenance": provenance}))
        else:
            again = {"state": "running", "ended_at": None, "output": str(output.resolve())}
            connection.execute(sa.update(runs).where(runs.c.id == run).values(again))
        gone = tasks.c.state.in_(("open", "complete")) & (tasks.c.round == 0)
        gone |= (tasks.c.state == "open") & (tasks.c.round > 0)
        if from_step is not None:
            gone |= (tasks.c.state == "taken") & (tasks.c.taken_step >= from_step)
        values = {"state": "cancelled", "taken_step": None, "ended_at": now}
        connection.execute(sa.update(tasks).where(tasks.c.run_id == run, gone).values(values))
        part = 1 if newest is None else int(newest.part) + 1
        first = from_step
        if first is None:
            done = sa.select(sa.func.max(steps.c.step)).where(steps.c.run_id == run)
            last = connection.execute(done).scalar()
            first = 0 if last is None else int(last) + 1
        row = {"run_id": run, "part": part, "from_step": first, "started_at": now, "config": config}
        connection.execute(sa.insert(parts).values(row | {"pid": os.getpid(), "host": socket.gethostname()}))
        return run, part, int(connection.execute(rounds).scalar_one())

    return store.patiently(begin, seconds)


def _live_start(connection: Connection, run: str) -> tuple[str, int, float | None] | None:
    """Host, process and last sign of life of the newest start of ``run``, if it may still go on; no sign is asked of a
    process that is there for everybody to see."""
    chosen = sa.select(parts).where(parts.c.run_id == run).order_by(parts.c.part.desc()).limit(1)
    newest = connection.execute(chosen).one_or_none()
    if newest is None or newest.ended_at is not None or newest.pid is None:
        return None
    if newest.host == socket.gethostname():
        try:
            process = psutil.Process(newest.pid)
            gone = (
                newest.pid == os.getpid()
                or process.status() == psutil.STATUS_ZOMBIE
                or process.create_time() > newest.started_at + 1
            )
        except psutil.Error:
            gone = True
        return None if gone else (newest.host, newest.pid, None)
    own = writes.c.writer.startswith(f"{run}/{newest.part}-", autoescape=True)
    written = connection.execute(sa.select(sa.func.max(writes.c.at)).where(own)).scalar()
    sign = max(newest.started_at, written or 0.0)
    return (newest.host, newest.pid, sign) if database_clock(connection) - sign < SILENT_SECONDS else None


def refuse_successor(connection: Connection, run: str, part: int) -> None:
    """Raise :class:`StoreError` where a later start of the run has taken over from this one, which was thought dead."""
    newest = connection.execute(sa.select(sa.func.max(parts.c.part)).where(parts.c.run_id == run)).scalar()
    if newest is not None and newest > part:
        raise StoreError(f"run {run}: part {newest} goes on elsewhere, after this one was silent; this one ends")


def missing_steps(connection: Connection, run: str, before: int) -> list[int]:
    """The steps below ``before``, which a checkpoint holds, that do not stand in the store as done."""
    chosen = sa.select(steps.c.step).where(steps.c.run_id == run, steps.c.state == "done", ~lost_step())
    standing = set(connection.execute(chosen).scalars())
    return [step for step in range(before) if step not in standing]


ROUTER = "router"
"""Label of the row of ``engines`` that tells samplers where the engines answer."""


@dataclass(frozen=True, slots=True)
class RunningPart:
    """One start of a run that offers episodes to samplers."""

    run_id: str
    part: int
    output: str
    config: Json
    """Masked."""
    provenance: Json
    url: str
    """Of the router."""
    key: str
    secrets: tuple[str, ...]
    """Keys of the configuration whose values were masked and matter."""
    made: Json
    """What the trainer of this start runs (``made_with`` in ``mua/rollout``); empty where it did not say."""


def router_row(part: int, url: str, key: str, secrets: list[str], made: Json, **figures: Any) -> Json:
    """The row of the router, without its run and time. ``made`` is what the trainer's process runs."""
    details = {"part": part, "key": key, "secrets": secrets, "made": made}
    return {"label": ROUTER, "url": url, "state": "serving", "details": details, **figures}


def state_of_run(connection: Connection, run: str) -> str:
    """What the store says of it: running, done, left or failed; "gone" where there is no such run."""
    return str(connection.execute(sa.select(runs.c.state).where(runs.c.id == run)).scalar() or "gone")


def find_part(connection: Connection, run: str | None, silence: float | None = None) -> RunningPart | None:
    """The newest start of ``run`` (None: of the newest run) whose trainer has given a sign of life lately.

    ``silence`` is how many seconds ago that may be; None: as long as the run's own leases last. Raises
    :class:`StoreError` where the store has no run of that name.
    """
    if run is not None and state_of_run(connection, run) == "gone":
        known = list(connection.execute(sa.select(runs.c.id).order_by(runs.c.started_at.desc()).limit(5)).scalars())
        raise StoreError(f"the store has no run {run!r}; it has {', '.join(known) or 'none'}")
    columns = (
        runs.c.id, runs.c.output, runs.c.provenance, parts.c.part, parts.c.config, engines.c.url, engines.c.details,
        engines.c.seen_at,
    )  # fmt: skip
    others = parts.alias()
    newest = sa.select(sa.func.max(others.c.part)).where(others.c.run_id == runs.c.id).scalar_subquery()
    chosen = (
        sa.select(*columns)
        .select_from(runs)
        .join(parts, (parts.c.run_id == runs.c.id) & (parts.c.part == newest))
        .join(engines, (engines.c.run_id == runs.c.id) & (engines.c.label == ROUTER))
        .where(runs.c.state == "running", engines.c.state == "serving")
        .order_by(runs.c.started_at.desc())
    )
    if run is not None:
        chosen = chosen.where(runs.c.id == run)
    now = database_clock(connection)
    for row in connection.execute(chosen):
        details, config = row.details or {}, row.config or {}
        patience = silence or float(config.get("samplers", {}).get("lease_seconds", 60.0))
        if details.get("part") == row.part and now - row.seen_at <= patience:
            return RunningPart(
                row.id, row.part, row.output, config, row.provenance or {}, row.url, details["key"],
                tuple(details.get("secrets", ())), details.get("made") or {},
            )  # fmt: skip
    return None
