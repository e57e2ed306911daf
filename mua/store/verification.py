"""Whether a store is whole and agrees with itself: every reference, blob, hash and count, and the order of steps."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.blobs import check_text, message_lists, unpack_arrays
from mua.store.queries import lost_step
from mua.store.tables import (
    CheckedValue,
    episodes,
    metadata,
    parts,
    reading_on,
    requests,
    runs,
    segments,
    steps,
    tasks,
    texts,
    tool_calls,
    trajectories,
    uses,
)
from mua.store.trajectories import EpisodeKey, trajectory_from_rows
from mua.types import Outcome, Segment
from mua.utils.errors import MuaError

_MANY = 64


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it must be."""

    kind: str
    """database, value, reference, text, trajectory, segment, request, step, use, task."""
    where: str
    """Table and key."""
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.what}"


def verify(connection: Connection) -> Iterator[Finding]:
    """Everything that is wrong, as it is found; nothing where the store is whole. Reads every blob once."""
    if connection.dialect.name == "sqlite":  # PostgreSQL has no such command for a user
        for line in connection.exec_driver_sql("PRAGMA integrity_check(20)").scalars():
            if line != "ok":
                yield Finding("database", "integrity_check", str(line))
    with reading_on():
        for check in (_values, _texts, _references, _trajectories, _requests, _parts_and_steps, _uses, _tasks):
            yield from check(connection)


def _values(connection: Connection) -> Iterator[Finding]:
    """Values that are none of their columns': whatever reads them elsewhere reads nothing."""
    for table in metadata.sorted_tables:
        own = [(c.name, c, c.type) for c in table.columns if isinstance(c.type, CheckedValue)]
        key = [sa.type_coerce(column, sa.types.NullType()).label(None) for column in table.primary_key]
        raw = [sa.type_coerce(column, sa.types.NullType()).label(None) for _, column, _ in own]
        for row in _streamed(connection, sa.select(*key, *raw)):
            for (name, _, kind), value in zip(own, row[len(key) :], strict=True):
                try:
                    if value is not None:
                        kind.read(value)
                except ValueError as error:
                    yield Finding("value", f"{table.name} {row[: len(key)]!a}"[:200], f"{name}: {error}")


def _texts(connection: Connection) -> Iterator[Finding]:
    for name, blob in _streamed(connection, sa.select(texts.c.hash, texts.c.body)):
        try:
            check_text(name, blob)
        except (MuaError, ValueError) as error:
            yield Finding("text", f"texts {name}", str(error))


def _references(connection: Connection) -> Iterator[Finding]:
    """Rows that name rows which are not there; SQLite looks only where it was asked to when they were written."""
    named: list[list[tuple[sa.Column[Any], sa.Column[Any]]]] = [
        [(element.parent, element.column) for element in constraint.elements]
        for table in metadata.sorted_tables
        for constraint in table.foreign_key_constraints
    ]
    for table in (trajectories, requests, tool_calls, steps, tasks):
        named.append([(table.c.run_id, parts.c.run_id), (table.c.part, parts.c.part)])
    named += [
        [(episodes.c.trajectory_id, trajectories.c.id)],
        [(uses.c.run_id, runs.c.id)],
        [(requests.c.reply, texts.c.hash)],
        [(requests.c.tools, texts.c.hash)],
        [(tool_calls.c.result, texts.c.hash)],
    ]
    for pairs in named:
        own, others = zip(*pairs, strict=True)
        table = own[0].table
        theirs = others[0].table.alias()
        joined = sa.and_(*(mine == theirs.c[other.name] for mine, other in zip(own, others, strict=True)))
        set_ = sa.and_(*(mine.is_not(None) for mine in own))
        key = list(table.primary_key.columns)
        lacking = sa.select(*key, *own).where(set_, ~sa.select(sa.literal(1)).where(joined).exists())
        for row in connection.execute(lacking):
            names = {column.name: value for column, value in zip((*key, *own), row, strict=True)}
            yield Finding("reference", table.name, f"{names} names no row of {others[0].table.name}")
    columns = [uses.c.run_id, uses.c.step, uses.c.trajectory_id, uses.c.segment]
    there = sa.select(segments.c.number).where(
        segments.c.trajectory_id == uses.c.trajectory_id, segments.c.number == uses.c.segment
    )
    for row in connection.execute(sa.select(*columns).where(uses.c.source.is_(None), ~there.exists())):
        yield Finding("reference", "uses", f"{tuple(row)} names no segment of this store")


def _trajectories(connection: Connection) -> Iterator[Finding]:
    ids = list(connection.execute(sa.select(trajectories.c.id).order_by(trajectories.c.id)).scalars())
    for at in range(0, len(ids), _MANY):
        some = ids[at : at + _MANY]
        parts_of: dict[str, list[Any]] = defaultdict(list)
        of_some = sa.select(segments).where(segments.c.trajectory_id.in_(some)).order_by(segments.c.number)
        for part in connection.execute(of_some).mappings():
            parts_of[part["trajectory_id"]].append(part)
        for row in connection.execute(sa.select(trajectories).where(trajectories.c.id.in_(some))).mappings():
            yield from _trajectory(row, parts_of[row["id"]])


def _trajectory(row: Any, parts_of: list[Any]) -> Iterator[Finding]:
    where = f"trajectories {row['id']}"
    if EpisodeKey.of(row).trajectory_id != row["id"]:
        yield Finding("trajectory", where, "its id is not that of its episode key")
    if row["outcome"] in set(Outcome) and Outcome(row["outcome"]).scored != row["scored"]:
        yield Finding("trajectory", where, f"outcome {row['outcome']} and scored {row['scored']} do not agree")
    for part in parts_of:
        for blob in ("arrays", "experts"):
            allowed = row["pruned"] == "arrays" or (blob == "experts" and row["pruned"] == "experts")
            if part[blob] is None and blob == "arrays" and not allowed:
                yield Finding("segment", f"segments {row['id']} {part['number']}", "has no arrays, and was not pruned")
            elif part[blob] is not None and allowed:
                yield Finding("segment", f"segments {row['id']} {part['number']}", f"pruned, and has {blob}")
    for name in ("tokens", "sampled_tokens"):
        if (total := sum(part[name] for part in parts_of)) != row[name]:
            yield Finding("trajectory", where, f"has {row[name]} {name}, its segments {total}")
    if row["pruned"] == "arrays" or any(part["arrays"] is None for part in parts_of):
        return
    try:
        whole = trajectory_from_rows(row, parts_of)
    except MuaError as error:
        yield Finding("trajectory", where, str(error))
        return
    if len(whole.turn_rewards) != row["turns"]:
        yield Finding("trajectory", where, f"has {len(whole.turn_rewards)} turn rewards for {row['turns']} turns")
    sampled = [segment.version[segment.loss_mask] for segment in whole.segments]
    versions = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
    bounds = (int(versions.min()), int(versions.max())) if len(versions) else (None, None)
    if bounds != (shown := (row["version_low"], row["version_high"])):
        yield Finding("trajectory", where, f"says versions {shown}, its tokens have {bounds}")
    for part, segment in zip(parts_of, whole.segments, strict=True):
        for what in segment_faults(segment, part["sampled_tokens"]):
            yield Finding("segment", f"segments {row['id']} {part['number']}", what)


def segment_faults(segment: Segment, sampled: int) -> Iterator[str]:
    """What of a segment is not as :class:`mua.types.Segment` says. ``sampled`` is the count its row has."""
    mask = segment.loss_mask
    if int(mask.sum()) != sampled:
        yield f"has {int(mask.sum())} sampled tokens, its row says {sampled}"
    if (segment.ids < 0).any():
        yield "has a negative token id"
    if segment.logprobs[~mask].any() or not (np.isfinite(segment.logprobs).all() and (segment.logprobs <= 1e-3).all()):
        yield "has a log-probability where no token was sampled, or one that is none"
    if (segment.version[~mask] != -1).any() or (segment.version[mask] < 0).any():
        yield "has a version where no token was sampled, or lacks one"
    if (segment.turn < 0).any() or (np.diff(segment.turn) < 0).any():
        yield "has turns that go back"
    if segment.teacher_logprobs is not None and segment.teacher_logprobs[~mask].any():
        yield "has a teacher's log-probability where no token was sampled"


def _requests(connection: Connection) -> Iterator[Finding]:
    """Ranges of tokens, lists of messages, and the trajectory that a request says it belongs to."""
    c = requests.c
    found = connection.execute(sa.select(segments.c.trajectory_id, segments.c.number, segments.c.tokens))
    lengths = {(name, number): tokens for name, number, tokens in found}
    names = ("run_id", "part", "round", "ordinal", "sample", "attempt", "role")
    order = (*(c[name] for name in names), c.number)
    hashes = set(connection.execute(sa.select(texts.c.hash)).scalars())
    group: list[Any] = []
    rows = connection.execution_options(yield_per=500).execute(sa.select(requests).order_by(*order)).mappings()
    for row in rows:
        if group and any(group[0][name] != row[name] for name in names):
            yield from _conversation(group, hashes)
            group = []
        group.append(row)
        where = f"requests {row['id']}"
        if row["trajectory_id"] is not None and row["trajectory_id"] != EpisodeKey.of(row).trajectory_id:
            yield Finding("request", where, f"belongs to trajectory {row['trajectory_id']}, which is another episode")
        if row["segment"] is not None and row["trajectory_id"] is not None:
            length = lengths.get((row["trajectory_id"], row["segment"]))
            start, end = row["token_start"], row["token_end"]
            if length is None or start is None or end is None or not 0 <= start <= end <= length:
                yield Finding("request", where, f"tokens [{start}, {end}) are not in a segment of {length} tokens")
            elif row["completion_tokens"] not in (None, end - start):
                yield Finding("request", where, f"has {row['completion_tokens']} new tokens, and [{start}, {end})")
    yield from _conversation(group, hashes)


def _conversation(group: list[Any], hashes: set[str]) -> Iterator[Finding]:
    """The requests of one role and attempt."""
    if not group:
        return
    where = f"requests {group[0]['id']} to {group[-1]['id']} ({group[0]['role']})"
    try:
        lists = message_lists(group)
    except MuaError as error:
        yield Finding("request", where, str(error))
        return
    missing = {name for messages in lists.values() for name in messages} - hashes
    for name in sorted(missing):
        yield Finding("request", where, f"message {name} is not in the store")


def _parts_and_steps(connection: Connection) -> Iterator[Finding]:
    """Parts are counted from 1; the steps that stand follow each other from the first, all but the last done."""
    of_run: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for run, part, first in connection.execute(
        sa.select(parts.c.run_id, parts.c.part, parts.c.from_step).order_by(parts.c.run_id, parts.c.part)
    ):
        of_run[run].append((part, first))
    for run, found in of_run.items():
        if [part for part, _ in found] != list(range(1, len(found) + 1)):
            yield Finding("step", f"parts {run}", f"are {[part for part, _ in found]}, not counted from 1")
    standing: dict[str, list[tuple[int, str]]] = defaultdict(list)
    chosen = sa.select(steps.c.run_id, steps.c.step, steps.c.state).where(~lost_step())
    for run, step, state in connection.execute(chosen.order_by(steps.c.run_id, steps.c.step, steps.c.part)):
        standing[run].append((step, state))
    for run, rows in standing.items():
        numbers = [step for step, _ in rows]
        first = min((first for _, first in of_run.get(run, ())), default=0)
        if numbers != list(range(first, first + len(numbers))):
            gap = next(step for i, step in enumerate(numbers) if step != first + i)
            yield Finding("step", f"steps {run}", f"step {gap} stands where {first + numbers.index(gap)} should")
        for step, state in rows[:-1]:
            if state != "done":
                yield Finding("step", f"steps {run} {step}", f"is {state}, and later ones are there")


def _uses(connection: Connection) -> Iterator[Finding]:
    key = (uses.c.run_id, uses.c.step, uses.c.part, uses.c.epoch, uses.c.trajectory_id, uses.c.segment)
    its = (segments.c.trajectory_id == uses.c.trajectory_id) & (segments.c.number == uses.c.segment)
    joined = sa.outerjoin(uses, segments, its & uses.c.source.is_(None))
    columns = (*key, uses.c.tokens, uses.c.arrays, segments.c.tokens.label("length"), segments.c.arrays.label("read"))
    for row in _streamed(connection, sa.select(*columns).select_from(joined).where(uses.c.arrays.is_not(None))):
        where = f"uses {tuple(row[: len(key)])}"
        try:
            arrays = unpack_arrays(row.arrays, where)
            provenance = None if row.read is None else unpack_arrays(row.read, where).get("provenance")
        except MuaError as error:
            yield Finding("use", where, str(error))
            continue
        wrong = {
            name: len(a) for name, a in arrays.items() if a.ndim and row.length is not None and len(a) != row.length
        }
        if wrong:
            yield Finding("use", where, f"arrays {json.dumps(wrong)} for a segment of {row.length} tokens")
            continue
        weights = arrays.get("weights")
        if weights is None:
            yield Finding("use", where, "has no weights")
            continue
        if int((weights != 0).sum()) != row.tokens:
            yield Finding("use", where, f"says {row.tokens} trained tokens, its weights {int((weights != 0).sum())}")
        if not all(np.isfinite(a).all() for a in arrays.values()):
            yield Finding("use", where, "has a number that is not finite")
        if provenance is not None and len(provenance) == len(weights) and (weights[provenance != 4] != 0).any():
            yield Finding("use", where, "trained on a token that the policy did not sample")


def _tasks(connection: Connection) -> Iterator[Finding]:
    """A complete or taken group has all its episodes done, and each of these its trajectory."""
    here = (episodes.c.run_id == tasks.c.run_id) & (episodes.c.round == tasks.c.round)
    here &= episodes.c.ordinal == tasks.c.ordinal
    count = sa.func.count(episodes.c.sample)
    done = sa.func.coalesce(sa.func.sum(sa.case((episodes.c.state == "done", 1), else_=0)), 0)
    key = (tasks.c.run_id, tasks.c.round, tasks.c.ordinal)
    chosen = sa.select(*key, tasks.c.state, tasks.c.size, count, done).select_from(sa.outerjoin(tasks, episodes, here))
    for run, round_, ordinal, state, size, members, ended in connection.execute(
        chosen.group_by(*key, tasks.c.state, tasks.c.size)
    ):
        if members and (members != size or (state in ("complete", "taken") and ended != size)):
            what = f"is {state} with {ended} of {members} episodes done, and is of {size}"
            yield Finding("task", f"tasks {(run, round_, ordinal)}", what)
    lacking = sa.select(episodes.c.run_id, episodes.c.round, episodes.c.ordinal, episodes.c.sample).where(
        episodes.c.state == "done", episodes.c.trajectory_id.is_(None)
    )
    for row in connection.execute(lacking):
        yield Finding("task", f"episodes {tuple(row)}", "is done, and names no trajectory")


def _streamed(connection: Connection, chosen: Any) -> Iterator[Any]:
    yield from connection.execution_options(yield_per=_MANY).execute(chosen)
