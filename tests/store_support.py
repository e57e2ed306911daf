"""A small run written into a store, whole and in agreement with itself, for tests of what reads stores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import sqlalchemy as sa

from mua.store.blobs import pack_arrays, text_inserts
from mua.store.database import Store
from mua.store.tables import episodes, parts, requests, runs, scores, steps, tasks, tool_calls, uses
from mua.store.trajectories import EpisodeKey, trajectory_inserts
from mua.store.writer import Insert, Write, execute
from mua.types import Outcome, Segment, Trajectory

STEPS = 4
GROUP = 2


def played(ordinal: int, sample: int, version: int, *, success: bool, length: int = 12) -> Trajectory:
    """An episode of two turns: half of its tokens are sampled, by policy ``version``."""
    draw = np.random.default_rng([ordinal, sample])
    provenance = np.array(([0, 1, 3, 4, 4, 4] * length)[:length], np.uint8)
    sampled = provenance == 4
    logprobs = np.where(sampled, -draw.random(length), 0.0).astype(np.float32)
    turn = (np.arange(length) >= length // 2).astype(np.int32)
    return Trajectory(
        task_id=f"task {ordinal % 3}",
        ordinal=ordinal,
        sample=sample,
        segments=[
            Segment(
                draw.integers(0, 300, length).astype(np.int32), provenance, logprobs,
                np.where(sampled, version, -1).astype(np.int32), turn,
                experts=draw.integers(0, 8, (length, 4)).astype(np.uint8),
            )
        ],
        turn_rewards=[0.0, float(success)],
        reward=float(success),
        success=success,
        outcome=Outcome.USER_STOP,
        messages=[{"role": "user", "content": f"hello {ordinal}"}, {"role": "assistant", "content": "yes"}],
        domain="help_desk",
    )  # fmt: skip


def run_writes(run: str = "r", steps_done: int = STEPS) -> Iterator[Write]:
    """A run of ``steps_done`` steps of one group each: the first sample fails, the second succeeds."""
    yield Insert(runs, [{"id": run, "output": f"/nowhere/{run}", "state": "done", "started_at": 1.0}])
    yield Insert(parts, [{"run_id": run, "part": 1, "from_step": 0, "started_at": 1.0}])
    for step in range(steps_done):
        yield Insert(tasks, [{
            "run_id": run, "round": 0, "ordinal": step, "kind": "train", "domain": "help_desk",
            "task_id": f"task {step % 3}", "size": GROUP, "state": "taken", "made_at": 1.0, "taken_step": step,
        }])  # fmt: skip
        yield Insert(steps, [{
            "run_id": run, "step": step, "part": 1, "state": "done", "version": step, "started_at": 2.0,
        }])  # fmt: skip
        for sample in range(GROUP):
            key = EpisodeKey(run, 1, 0, step, sample)
            trajectory = played(step, sample, step, success=sample == 1)
            yield from trajectory_inserts(key, trajectory, ended_at=2.0 + step)
            yield Insert(episodes, [{
                "run_id": run, "round": 0, "ordinal": step, "sample": sample, "state": "done",
                "trajectory_id": key.trajectory_id,
            }])  # fmt: skip
            yield from _beside(key, trajectory, step)


def _beside(key: EpisodeKey, trajectory: Trajectory, step: int) -> Iterator[Write]:
    name = {"trajectory_id": key.trajectory_id}
    for number in range(2):
        said = [{"role": "system", "content": "be brief"}, *trajectory.messages[: number + 1]]
        hashes, writes = text_inserts([*said, {"reply": number}])
        yield from writes
        kept = 2 if number else 0  # of the messages of the request before
        yield Insert(requests, [key.columns() | name | {
            "role": "user", "number": number, "turn": number, "started_at": 1.5, "seconds": 0.1, "reply": hashes[-1],
            "follows": 0 if number else None, "kept": kept or None, "messages": hashes[kept:-1],
        }])  # fmt: skip
    yield Insert(requests, [key.columns() | name | {
        "role": "policy", "number": 0, "turn": 0, "started_at": 1.5, "segment": 0, "token_start": 3, "token_end": 6,
        "completion_tokens": 3, "version": step,
    }])  # fmt: skip
    hashes, writes = text_inserts(["done"])
    yield from writes
    yield Insert(tool_calls, [key.columns() | name | {
        "turn": 0, "number": 0, "name": "look", "arguments": "{}", "result": hashes[0], "started_at": 1.6,
    }])  # fmt: skip
    yield Insert(scores, [name | {"scorer": "environment", "value": trajectory.reward}])
    segment = trajectory.segments[0]
    weights = segment.loss_mask.astype(np.float32) / 8
    yield Insert(uses, [name | {
        "run_id": key.run_id, "step": step, "part": 1, "epoch": 0, "segment": 0, "tokens": int(segment.loss_mask.sum()),
        "arrays": pack_arrays({"weights": weights, "advantages": weights * 2, "old_logprobs": segment.logprobs}),
    }])  # fmt: skip


def write_run(store: Store, run: str = "r", steps_done: int = STEPS) -> None:
    with store.begin() as connection:
        execute(connection, run_writes(run, steps_done))


def spoil(store: Store, statement: str, *values: object) -> None:
    """Change a store behind its back, foreign keys or not."""
    if store.postgres:
        with store.begin() as connection:
            connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
            connection.exec_driver_sql(statement.replace("?", "%s"), values)
        return
    raw = store.engine.raw_connection()
    try:
        cursor = raw.cursor()
        cursor.execute("PRAGMA foreign_keys=OFF")
        cursor.execute(statement, values)
        cursor.execute("PRAGMA foreign_keys=ON")
    finally:
        raw.close()


def count(store: Store, table: sa.Table, *where: sa.ColumnElement[bool]) -> int:
    with store.read() as connection:
        chosen = sa.select(sa.func.count()).select_from(table).where(*where)
        return int(connection.execute(chosen).scalar_one())
