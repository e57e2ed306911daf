"""Trace files of runs that kept no store, into one: what :mod:`mua.store.exporting` writes can be read back here."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mua.store.records import EpisodeKey, trajectory_inserts
from mua.store.tables import episodes, parts, runs, tasks
from mua.store.traces import read_traces
from mua.store.writer import Insert, Write
from mua.types import EVALUATION_ORDINALS, Json, Trajectory
from mua.utils.errors import ConfigError


def import_writes(run: str, files: Sequence[Path], *, config: Json | None = None) -> Iterator[Write]:
    """A run of its own with the trajectories of trace files or folders of them; ``config`` is what it was made with.

    The step in a file's name (``step_000012.jsonl``) is the one that took its groups. Raises
    :class:`mua.store.traces.TraceError` for a broken line, :class:`ConfigError` where there is no trajectory.
    """
    now = time.time()
    yield Insert(runs, [{
        "id": run, "output": str(files[0].absolute()), "name": "imported", "state": "done", "started_at": now,
        "ended_at": now, "config": config,
    }])  # fmt: skip
    yield Insert(parts, [{"run_id": run, "part": 1, "from_step": 0, "started_at": now}])
    count = 0
    for file in (one for path in files for one in (sorted(path.glob("step_*.jsonl")) if path.is_dir() else [path])):
        found = re.fullmatch(r"step_(\d+)", file.stem)
        step = int(found.group(1)) if found else None
        groups: dict[int, list[Trajectory]] = {}
        for trajectory in read_traces(file):
            groups.setdefault(trajectory.ordinal, []).append(trajectory)
        for ordinal, members in groups.items():
            yield from _group(run, ordinal, members, step, now)
            count += len(members)
    if not count:
        raise ConfigError(f"{files[0]}: no trajectory to import")


def _group(run: str, ordinal: int, members: list[Trajectory], step: int | None, now: float) -> Iterator[Write]:
    evaluation = ordinal >= EVALUATION_ORDINALS
    round_ = (step or 0) + 1 if evaluation else 0
    yield Insert(tasks, [{
        "run_id": run, "round": round_, "ordinal": ordinal, "kind": "evaluation" if evaluation else "train",
        "domain": members[0].domain, "task_id": members[0].task_id, "size": len(members),
        "state": "complete" if step is None else "taken", "made_at": now, "taken_step": None if evaluation else step,
    }])  # fmt: skip
    for trajectory in members:
        key = EpisodeKey(run, 1, round_, ordinal, trajectory.sample, trajectory.attempts)
        yield from trajectory_inserts(key, trajectory, ended_at=now)
        yield Insert(episodes, [{
            "run_id": run, "round": round_, "ordinal": ordinal, "sample": trajectory.sample, "state": "done",
            "attempts": trajectory.attempts, "trajectory_id": key.trajectory_id,
        }])  # fmt: skip
