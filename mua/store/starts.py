"""A run and its starts: who it is in its store, and what of it a later start makes again."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.database import Store
from mua.store.queries import lost_step
from mua.store.tables import parts, runs, steps, tasks
from mua.types import Json
from mua.utils.atomic import replace_text

RUN_FILE = "store_run"
"""In the output folder: the run's id in its store."""


def run_of(output: Path) -> str:
    """The id of the run in ``output``, made where there is none."""
    path = output / RUN_FILE
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid4().hex[:8]}"
    replace_text(path, made + "\n")
    return made


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
    run, now = run_of(output), time.time()

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
        _cancel(connection, run, from_step, now)
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


def missing_steps(connection: Connection, run: str, before: int) -> list[int]:
    """The steps below ``before``, which a checkpoint holds, that do not stand in the store as done."""
    chosen = sa.select(steps.c.step).where(steps.c.run_id == run, steps.c.state == "done", ~lost_step())
    standing = set(connection.execute(chosen).scalars())
    return [step for step in range(before) if step not in standing]


def _cancel(connection: Connection, run: str, from_step: int | None, now: float) -> None:
    gone = tasks.c.state.in_(("open", "complete")) & (tasks.c.round == 0)
    gone |= (tasks.c.state == "open") & (tasks.c.round > 0)
    if from_step is not None:
        gone |= (tasks.c.state == "taken") & (tasks.c.taken_step >= from_step)
    values = {"state": "cancelled", "taken_step": None, "ended_at": now}
    connection.execute(sa.update(tasks).where(tasks.c.run_id == run, gone).values(values))
