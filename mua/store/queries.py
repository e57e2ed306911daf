"""What is asked of the store by people and by training: runs, steps, tasks and trajectories under a filter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

import sqlalchemy as sa
from pydantic import Field
from sqlalchemy.engine import Connection

from mua.store.faults import StoreError
from mua.store.tables import json_text, parts, runs, segments, steps, tasks, tool_calls, trajectories, uses

Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True, slots=True)
class TrajectoryFilter:
    """Which trajectories; None says nothing."""

    run: str | None = None
    step: Count | None = None
    """That trained on it."""
    round: Count | None = None
    """0: training; evaluations count from 1."""
    domain: str | None = None
    task: str | None = None
    outcome: str | None = None
    success: bool | None = None
    scored: bool | None = None
    min_reward: float | None = None
    min_version: int | None = None
    """Of the oldest of its sampled tokens."""
    kept: bool | None = None
    """Whether its tokens are still there."""
    ordinal: Count | None = None
    """Of its group."""
    kind: str | None = None
    """Of its task, as its domain calls it."""
    tool_error: bool | None = None
    """Whether a call of a tool failed."""
    text: str | None = None
    """What its id, its task, its error or the name of a tool it called contains, whatever the case."""
    ids: tuple[str, ...] | None = None
    """One of these, some thousands at most."""

    def condition(self) -> sa.ColumnElement[bool]:
        """As a condition on the table ``trajectories``."""
        columns = trajectories.c
        equal = {
            columns.run_id: self.run, columns.round: self.round, columns.domain: self.domain,
            columns.task_id: self.task, columns.outcome: self.outcome, columns.success: self.success,
            columns.scored: self.scored, columns.ordinal: self.ordinal,
        }  # fmt: skip
        found = [column == value for column, value in equal.items() if value is not None]
        if self.min_reward is not None:
            found.append(columns.reward >= self.min_reward)
        if self.min_version is not None:
            found.append(columns.version_low >= self.min_version)
        if self.kept is not None:
            pruned = columns.pruned.is_not_distinct_from("arrays")
            found.append(~pruned if self.kept else pruned)
        if self.step is not None:
            used = sa.select(uses.c.trajectory_id).where(uses.c.step == self.step, uses.c.run_id == columns.run_id)
            found.append(columns.id.in_(used))
        if self.kind is not None:
            found.append(sa.exists().where(same_task(), labeled("kind", self.kind)))
        if self.tool_error is not None:
            failed = sa.exists().where(tool_calls.c.trajectory_id == columns.id, tool_calls.c.error.is_not(None))
            found.append(failed if self.tool_error else ~failed)
        if self.text:
            called = sa.exists().where(tool_calls.c.trajectory_id == columns.id, _holds(tool_calls.c.name, self.text))
            own = (_holds(column, self.text) for column in (columns.id, columns.task_id, columns.error))
            found.append(sa.or_(*own, called))
        if self.ids is not None:
            found.append(columns.id.in_(self.ids))
        return sa.and_(sa.true(), *found)

    def shown(self) -> str:
        """What is set, for a message."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name} {value}" for name, value in given.items() if value is not None) or "all"


COUNTED = 1000
"""So far a list counts: a figure of one more says that there are more. What it costs must not grow with a run."""
Order = Literal["newest", "oldest", "reward", "tokens", "turns", "seconds"]
"""Of a list of trajectories: the latest, the earliest, or the largest first."""


def same_task() -> sa.ColumnElement[bool]:
    """That a row of ``tasks`` is the group of a row of ``trajectories``."""
    t, own = trajectories.c, tasks.c
    return (own.run_id == t.run_id) & (own.round == t.round) & (own.ordinal == t.ordinal)


def labeled(name: str, value: str) -> sa.ColumnElement[bool]:
    """That a row of ``tasks`` has this label (``kind``, ``difficulty``)."""
    written = json_text({name: value})[1:-1]  # as JsonText writes it; other than these texts nothing holds it
    return sa.type_coerce(tasks.c.details, sa.Text).contains(written, autoescape=True)


def _holds(column: sa.Column[Any], text: str) -> sa.ColumnElement[bool]:
    return sa.func.lower(sa.type_coerce(column, sa.Text)).contains(text.lower(), autoescape=True)


def trajectory_ids(connection: Connection, chosen: TrajectoryFilter) -> list[str]:
    """By run, round, ordinal, sample, part and attempt: the same for the same rows, whatever order they came in."""
    c = trajectories.c
    order = (c.run_id, c.round, c.ordinal, c.sample, c.part, c.attempt)
    return list(connection.execute(sa.select(c.id).where(chosen.condition()).order_by(*order)).scalars())


def list_runs(connection: Connection) -> Iterator[dict[str, Any]]:
    """A row a run, newest first, with how much of everything it has, up to :data:`COUNTED`."""
    columns = [runs.c[name] for name in ("id", "name", "state", "output", "started_at", "ended_at")]
    counts = {"parts": parts, "steps": steps, "tasks": tasks, "trajectories": trajectories}
    chosen = sa.select(
        *columns,
        *(_counted(table, table.c.run_id == runs.c.id, COUNTED).label(name) for name, table in counts.items()),
    )
    return as_dicts(connection, chosen.order_by(runs.c.started_at.desc(), runs.c.id))


def lost_step() -> sa.ColumnElement[bool]:
    """Whether a row of ``steps`` was undone: a later start of the run went on from before it."""
    later = sa.select(parts.c.part).where(
        parts.c.run_id == steps.c.run_id, parts.c.part > steps.c.part, parts.c.from_step <= steps.c.step
    )
    return later.exists()


def list_steps(connection: Connection, run: str | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """A row a step, in order, with what it trained on; ``lost`` where a later start of the run undid it."""
    used = (uses.c.run_id == steps.c.run_id) & (uses.c.step == steps.c.step) & (uses.c.part == steps.c.part)
    names = ("run_id", "step", "part", "state", "version", "started_at", "ended_at", "gradient", "metrics")
    chosen = sa.select(
        *(steps.c[name] for name in names),
        lost_step().label("lost"),
        sa.select(sa.func.count(sa.distinct(uses.c.trajectory_id))).where(used).scalar_subquery().label("trajectories"),
        sa.select(sa.func.coalesce(sa.func.sum(uses.c.tokens), 0)).where(used).scalar_subquery().label("tokens"),
    ).order_by(steps.c.run_id, steps.c.step, steps.c.part)
    if run is not None:
        chosen = chosen.where(steps.c.run_id == run)
    return as_dicts(connection, chosen.limit(limit))


def list_tasks(connection: Connection, run: str | None = None, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """A row a task (a group of episodes), in order of its run's stream."""
    chosen = sa.select(tasks).order_by(tasks.c.run_id, tasks.c.round, tasks.c.ordinal)
    if run is not None:
        chosen = chosen.where(tasks.c.run_id == run)
    return as_dicts(connection, chosen.limit(limit))


def list_trajectories(
    connection: Connection,
    chosen: TrajectoryFilter,
    limit: int | None = None,
    *,
    offset: int = 0,
    order: Order = "newest",
) -> Iterator[dict[str, Any]]:
    """A row a trajectory without its blobs, with how often it was trained on."""
    c = trajectories.c
    columns = [column for column in c if column.name not in ("messages", "metrics", "details")]
    used = sa.select(sa.func.count(sa.distinct(uses.c.step))).where(uses.c.trajectory_id == c.id)
    rows = sa.select(*columns, used.scalar_subquery().label("trained"))
    first = {
        "newest": c.ended_at.desc(), "oldest": c.ended_at, "reward": c.reward.desc(), "tokens": c.tokens.desc(),
        "turns": c.turns.desc(), "seconds": c.seconds.desc(),
    }[order]  # fmt: skip
    second = c.id if order == "oldest" else c.id.desc()  # read from an index, whose direction is one
    return as_dicts(connection, rows.where(chosen.condition()).order_by(first, second).limit(limit).offset(offset))


def count_trajectories(connection: Connection, chosen: TrajectoryFilter, most: int | None = COUNTED) -> int:
    """How many a filter leaves; counted up to ``most`` + 1, which then says that there are more."""
    return int(connection.execute(sa.select(_counted(trajectories, chosen.condition(), most))).scalar_one())


def _counted(table: sa.Table, where: sa.ColumnElement[bool], most: int | None) -> sa.ScalarSelect[int]:
    rows = sa.select(sa.literal(1).label("one")).select_from(table).where(where).correlate(runs)
    some = rows.limit(None if most is None else most + 1).subquery()
    return sa.select(sa.func.count()).select_from(some).scalar_subquery()


def changes(connection: Connection, run: str) -> dict[str, Any]:
    """What tells whether anything is new since the last look; as cheap in a long run as in a short one."""
    newest = connection.execute(sa.select(sa.func.max(steps.c.step)).where(steps.c.run_id == run)).scalar()
    ended = connection.execute(sa.select(sa.func.max(trajectories.c.ended_at)).where(trajectories.c.run_id == run))
    state = connection.execute(sa.select(runs.c.state).where(runs.c.id == run)).scalar()
    played = count_trajectories(connection, TrajectoryFilter(run=run))
    return {"step": newest, "trajectories": played, "ended_at": ended.scalar(), "state": state}


def single_run(connection: Connection, run: str | None) -> str:
    """``run``, or the only run of the store. Raises :class:`StoreError` where it is not there or there are several."""
    found = list(connection.execute(sa.select(runs.c.id).order_by(runs.c.started_at)).scalars())
    if run is None and len(found) == 1:
        return str(found[0])
    if run in found:
        return str(run)
    raise StoreError(
        f"run {run!r}: not in the store, which has {', '.join(found) or 'none'}" if run is not None else
        f"the store has {len(found)} runs; name one with --run: {', '.join(found)}"
    )  # fmt: skip


def stored_bytes(connection: Connection) -> dict[str, int]:
    """Bytes of the blobs of tokens, expert choices and what losses read."""

    def total(column: sa.Column[bytes]) -> int:
        return int(connection.execute(sa.select(sa.func.coalesce(sa.func.sum(sa.func.length(column)), 0))).scalar_one())

    return {"tokens": total(segments.c.arrays), "experts": total(segments.c.experts), "uses": total(uses.c.arrays)}


def as_dicts(connection: Connection, chosen: sa.Select[Any]) -> Iterator[dict[str, Any]]:
    """The rows of a query, by the names of its columns."""
    return (dict(row) for row in connection.execute(chosen).mappings())
