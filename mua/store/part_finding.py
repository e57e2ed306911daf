"""Which run a store has that goes on now, and where its engines answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.faults import StoreError
from mua.store.leases import database_clock
from mua.store.tables import engines, parts, runs
from mua.types import Json

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
