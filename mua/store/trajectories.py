"""Trajectories as rows of the store, and back exactly as they were when they were written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.blobs import pack_arrays, pack_messages, unpack_arrays, unpack_messages
from mua.store.faults import DamagedData, StoreError
from mua.store.tables import segments, trajectories
from mua.store.writer import Insert
from mua.types import Json, Outcome, Provenance, Segment, Trajectory

SEGMENT_DTYPES = {
    "ids": "<i4", "provenance": "u1", "logprobs": "<f4", "version": "<i4", "turn": "<i4", "teacher_logprobs": "<f4",
}  # fmt: skip
"""Of a segment, in one blob; its expert choices are a blob of their own, which is pruned first."""
_AS_THEY_ARE = ("domain", "task_id", "error", "attempts", "turn_rewards", "metrics", "details")


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Which try of which episode of which start of a run; see :mod:`mua.store.tables`."""

    run_id: str
    part: int
    round: int
    ordinal: int
    sample: int
    attempt: int = 1

    @property
    def trajectory_id(self) -> str:
        return f"{self.run_id}/{self.part}/{self.round}/{self.ordinal}/{self.sample}/{self.attempt}"

    @classmethod
    def of(cls, row: Any) -> Self:
        """From the columns of a row (a mapping)."""
        names = ("run_id", "part", "round", "ordinal", "sample", "attempt")
        return cls(*(row[name] for name in names))

    def columns(self) -> dict[str, Any]:
        return {
            "run_id": self.run_id, "part": self.part, "round": self.round, "ordinal": self.ordinal,
            "sample": self.sample, "attempt": self.attempt,
        }  # fmt: skip


def trajectory_inserts(
    key: EpisodeKey,
    trajectory: Trajectory,
    *,
    ended_at: float,
    started_at: float | None = None,
    sampler: str | None = None,
    sampling: Json | None = None,
) -> list[Insert]:
    """The rows of a trajectory and its segments. ``key`` must have its ordinal and sample; its attempt counts those of
    groups that were cancelled and began again too.

    Raises ValueError for another key, and for a reward that is no finite number: no average could hold it.
    """
    if (key.ordinal, key.sample) != (trajectory.ordinal, trajectory.sample):
        raise ValueError(f"the key {key} is not that of the trajectory")
    if not math.isfinite(trajectory.reward):
        raise ValueError(f"trajectory {key.trajectory_id}: reward {trajectory.reward} is no finite number")
    sampled = [segment.version[segment.loss_mask] for segment in trajectory.segments]
    versions = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
    row = key.columns() | {
        "id": key.trajectory_id,
        "outcome": trajectory.outcome.value,
        "scored": trajectory.scored,
        "reward": float(trajectory.reward),
        "success": bool(trajectory.success),
        "passing": bool(trajectory.passing),
        "turns": len(trajectory.turn_rewards),
        "segments": len(trajectory.segments),
        "tokens": sum(map(len, trajectory.segments)),
        "sampled_tokens": len(versions),
        "version_low": int(versions.min()) if len(versions) else None,
        "version_high": int(versions.max()) if len(versions) else None,
        "messages": pack_messages(trajectory.messages),
        "sampling": trajectory.sampling or sampling,
        "sampler": sampler,
        "started_at": started_at,
        "ended_at": ended_at,
        "seconds": 0.0 if started_at is None else ended_at - started_at,
        "pruned": None,
    } | {name: getattr(trajectory, name) for name in _AS_THEY_ARE}  # fmt: skip
    rows = [segment_row(key.trajectory_id, n, segment) for n, segment in enumerate(trajectory.segments)]
    return [Insert(trajectories, [row]), Insert(segments, rows)]


def segment_row(trajectory_id: str, number: int, segment: Segment) -> dict[str, Any]:
    """The row of ``segments``."""
    return {
        "trajectory_id": trajectory_id,
        "number": number,
        "tokens": len(segment),
        "sampled_tokens": int(segment.loss_mask.sum()),
        "arrays": pack_arrays(_present(segment)),
        "experts": None if segment.experts is None else pack_arrays({"experts": segment.experts}),
    }


def _present(segment: Segment) -> dict[str, npt.NDArray[Any]]:
    arrays = {name: getattr(segment, name) for name in SEGMENT_DTYPES}
    return {name: array for name, array in arrays.items() if array is not None}


def trajectory_size(trajectory: Trajectory) -> int:
    """About how many bytes a trajectory keeps in memory, for the writer's queue."""
    arrays = sum(sum(a.nbytes for a in _present(s).values()) for s in trajectory.segments)
    experts = sum(s.experts.nbytes for s in trajectory.segments if s.experts is not None)
    return 2048 + arrays + experts + 512 * len(trajectory.messages)


_MANY = 64


def read_trajectories(connection: Connection, ids: Iterable[str]) -> Iterator[Trajectory]:
    """The trajectories of ``ids``, in order, a few in memory at a time.

    Raises :class:`StoreError` for one that is not there or whose arrays were pruned, :class:`DamagedData` for one
    that is not what was written.
    """
    wanted = list(ids)
    for at in range(0, len(wanted), _MANY):
        some = wanted[at : at + _MANY]
        found = connection.execute(sa.select(trajectories).where(trajectories.c.id.in_(some))).mappings()
        rows = {row["id"]: dict(row) for row in found}
        parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in some}
        of_some = sa.select(segments).where(segments.c.trajectory_id.in_(some)).order_by(segments.c.number)
        for part in connection.execute(of_some).mappings():
            parts[part["trajectory_id"]].append(dict(part))
        for name in some:
            if name not in rows:
                raise StoreError(f"trajectory {name}: not in the store")
            yield trajectory_from_rows(rows[name], parts[name])


def trajectory_from_rows(row: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Trajectory:
    """A trajectory from its row and those of its segments, in order. Raises as :func:`read_trajectories`."""
    name = f"trajectory {row['id']}"
    if row["messages"] is None:
        raise StoreError(f"{name}: its messages and tokens were pruned")
    if [part["number"] for part in parts] != list(range(len(parts))) or len(parts) != row["segments"]:
        raise DamagedData(f"{name}: has {row['segments']} segments, and the store {[p['number'] for p in parts]}")
    if row["outcome"] not in set(Outcome):
        raise DamagedData(f"{name}: outcome {row['outcome']!a} is none")
    return Trajectory(
        **{key: row[key] for key in (*_AS_THEY_ARE, "ordinal", "sample", "reward", "success", "passing")},
        segments=[segment_from_row(part) for part in parts],
        outcome=Outcome(row["outcome"]),
        messages=unpack_messages(row["messages"], f"{name}: messages"),
        sampling=row["sampling"] or {},
    )


def segment_from_row(row: Mapping[str, Any]) -> Segment:
    """A segment from its row. Raises as :func:`read_trajectories`."""
    name = f"trajectory {row['trajectory_id']} segment {row['number']}"
    if row["arrays"] is None:
        raise StoreError(f"{name}: its tokens were pruned")
    arrays = unpack_arrays(row["arrays"], f"{name}: arrays")
    for key, array in arrays.items():
        if key in SEGMENT_DTYPES and (array.dtype, array.shape) != (np.dtype(SEGMENT_DTYPES[key]), (row["tokens"],)):
            raise DamagedData(f"{name}: {key} is {array.dtype}{list(array.shape)}, of {row['tokens']} tokens")
    if missing := SEGMENT_DTYPES.keys() - arrays.keys() - {"teacher_logprobs"}:
        raise DamagedData(f"{name}: has no {min(missing)}")
    if set(arrays) - set(SEGMENT_DTYPES):
        raise DamagedData(f"{name}: has arrays that no segment has: {', '.join(set(arrays) - set(SEGMENT_DTYPES))}")
    if arrays["provenance"].max(initial=0) > max(Provenance):
        raise DamagedData(f"{name}: a token has a provenance that there is not")
    experts = None
    if row["experts"] is not None:
        found = unpack_arrays(row["experts"], f"{name}: experts")
        experts = found.get("experts")
        if list(found) != ["experts"] or experts is None or experts.ndim != 2 or len(experts) != row["tokens"]:
            raise DamagedData(f"{name}: expert choices do not fit its {row['tokens']} tokens")
    return Segment(**arrays, experts=experts)
