"""Trajectories out of the store, exactly as they were when they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.arrays import unpack_arrays
from mua.store.faults import DamagedRecord, StoreError
from mua.store.records import SEGMENT_ARRAYS
from mua.store.tables import segments, trajectories
from mua.store.texts import unpack_messages
from mua.types import Outcome, Provenance, Segment, Trajectory

_DTYPES = {
    "ids": "i4", "provenance": "u1", "logprobs": "f4", "version": "i4", "turn": "i4", "teacher_logprobs": "f4",
}  # fmt: skip
_MANY = 64


def read_trajectories(connection: Connection, ids: Iterable[str]) -> Iterator[Trajectory]:
    """The trajectories of ``ids``, in order, a few in memory at a time.

    Raises :class:`StoreError` for one that is not there or whose arrays were pruned, :class:`DamagedRecord` for one
    that is not what was written.
    """
    wanted = list(ids)
    for at in range(0, len(wanted), _MANY):
        some = wanted[at : at + _MANY]
        rows = {row["id"]: row for row in _rows(connection, trajectories, trajectories.c.id.in_(some))}
        parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in some}
        for row in _rows(connection, segments, segments.c.trajectory_id.in_(some), segments.c.number):
            parts[row["trajectory_id"]].append(row)
        for name in some:
            if name not in rows:
                raise StoreError(f"trajectory {name}: not in the store")
            yield trajectory_from_rows(rows[name], parts[name])


def trajectory_from_rows(row: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Trajectory:
    """A trajectory from its row and those of its segments, in order. Raises as :func:`read_trajectories`."""
    name = f"trajectory {row['id']}"
    if row["messages"] is None:
        raise StoreError(f"{name}: its messages and tokens were pruned")
    if [part["number"] for part in parts] != list(range(row["segments"])):
        raise DamagedRecord(f"{name}: has {row['segments']} segments, and the store {[p['number'] for p in parts]}")
    if row["outcome"] not in set(Outcome):
        raise DamagedRecord(f"{name}: outcome {row['outcome']!a} is none")
    return Trajectory(
        task_id=row["task_id"],
        ordinal=row["ordinal"],
        sample=row["sample"],
        segments=[segment_from_row(part) for part in parts],
        turn_rewards=row["turn_rewards"],
        reward=row["reward"],
        success=row["success"],
        outcome=Outcome(row["outcome"]),
        messages=unpack_messages(row["messages"], f"{name}: messages"),
        metrics=row["metrics"],
        details=row["details"],
        attempts=row["attempts"],
        error=row["error"],
        domain=row["domain"],
        sampling=row["sampling"] or {},
        passing=row["passing"],
    )


def segment_from_row(row: Mapping[str, Any]) -> Segment:
    """A segment from its row. Raises as :func:`read_trajectories`."""
    name = f"trajectory {row['trajectory_id']} segment {row['number']}"
    if row["arrays"] is None:
        raise StoreError(f"{name}: its tokens were pruned")
    arrays = unpack_arrays(row["arrays"], f"{name}: arrays")
    for key in SEGMENT_ARRAYS:
        present = key in arrays
        if not present and key != "teacher_logprobs":
            raise DamagedRecord(f"{name}: has no {key}")
        if present and (arrays[key].dtype != np.dtype(_DTYPES[key]) or arrays[key].shape != (row["tokens"],)):
            raise DamagedRecord(
                f"{name}: {key} is {arrays[key].dtype}{list(arrays[key].shape)}, of {row['tokens']} tokens"
            )
    if set(arrays) - set(SEGMENT_ARRAYS):
        raise DamagedRecord(f"{name}: has arrays that no segment has: {', '.join(set(arrays) - set(SEGMENT_ARRAYS))}")
    if arrays["provenance"].max(initial=0) > max(Provenance):
        raise DamagedRecord(f"{name}: a token has a provenance that there is not")
    experts = None
    if row["experts"] is not None:
        found = unpack_arrays(row["experts"], f"{name}: experts")
        experts = found.get("experts")
        if list(found) != ["experts"] or experts is None or experts.ndim != 2 or len(experts) != row["tokens"]:
            raise DamagedRecord(f"{name}: expert choices do not fit its {row['tokens']} tokens")
    return Segment(**arrays, experts=experts)


def _rows(
    connection: Connection, table: sa.Table, condition: sa.ColumnElement[bool], *order: sa.ColumnElement[Any]
) -> Iterator[Any]:
    yield from connection.execute(sa.select(table).where(condition).order_by(*order)).mappings()
