"""What is written of an episode, as the rows that :mod:`mua.store.reader` reads back bit for bit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mua.store.arrays import pack_arrays
from mua.store.tables import segments, trajectories
from mua.store.texts import pack_messages
from mua.store.writer import Insert
from mua.types import Json, Segment, Trajectory

SEGMENT_ARRAYS = ("ids", "provenance", "logprobs", "version", "turn", "teacher_logprobs")
"""Of a segment, in one blob; its expert choices are a blob of their own, which is pruned first."""


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
    """The rows of a trajectory and its segments. ``key`` must have its ordinal, sample and attempt.

    Raises ValueError for another key, and for a reward that is no finite number: no average could hold it.
    """
    if (key.ordinal, key.sample, key.attempt) != (trajectory.ordinal, trajectory.sample, trajectory.attempts):
        raise ValueError(f"the key {key} is not that of the trajectory")
    if not math.isfinite(trajectory.reward):
        raise ValueError(f"trajectory {key.trajectory_id}: reward {trajectory.reward} is no finite number")
    sampled = [segment.version[segment.loss_mask] for segment in trajectory.segments]
    versions = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
    row = key.columns() | {
        "id": key.trajectory_id,
        "domain": trajectory.domain,
        "task_id": trajectory.task_id,
        "outcome": trajectory.outcome.value,
        "scored": trajectory.scored,
        "reward": float(trajectory.reward),
        "success": bool(trajectory.success),
        "passing": bool(trajectory.passing),
        "error": trajectory.error,
        "attempts": trajectory.attempts,
        "turns": len(trajectory.turn_rewards),
        "turn_rewards": trajectory.turn_rewards,
        "segments": len(trajectory.segments),
        "tokens": sum(map(len, trajectory.segments)),
        "sampled_tokens": len(versions),
        "version_low": int(versions.min()) if len(versions) else None,
        "version_high": int(versions.max()) if len(versions) else None,
        "messages": pack_messages(trajectory.messages),
        "metrics": trajectory.metrics,
        "details": trajectory.details,
        "sampling": trajectory.sampling or sampling,
        "sampler": sampler,
        "started_at": started_at,
        "ended_at": ended_at,
        "pruned": None,
    }  # fmt: skip
    rows = [_segment_row(key.trajectory_id, n, segment) for n, segment in enumerate(trajectory.segments)]
    return [Insert(trajectories, [row]), Insert(segments, rows)]


def _segment_row(trajectory_id: str, number: int, segment: Segment) -> dict[str, Any]:
    return {
        "trajectory_id": trajectory_id,
        "number": number,
        "tokens": len(segment),
        "sampled_tokens": int(segment.loss_mask.sum()),
        "arrays": pack_arrays(_present(segment)),
        "experts": None if segment.experts is None else pack_arrays({"experts": segment.experts}),
    }


def _present(segment: Segment) -> dict[str, npt.NDArray[Any]]:
    arrays = {name: getattr(segment, name) for name in SEGMENT_ARRAYS}
    return {name: array for name, array in arrays.items() if array is not None}


def trajectory_size(trajectory: Trajectory) -> int:
    """About how many bytes a trajectory keeps in memory, for the writer's queue."""
    arrays = sum(sum(a.nbytes for a in _present(s).values()) for s in trajectory.segments)
    experts = sum(s.experts.nbytes for s in trajectory.segments if s.experts is not None)
    return 2048 + arrays + experts + 512 * len(trajectory.messages)
