"""Two runs side by side on the tasks that both met, with the test of a difference that `mua compare` uses."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.queries import same_task
from mua.store.tables import tasks, trajectories
from mua.trainer.evaluation.estimators import paired_test
from mua.types import Json
from mua.view.run_overview import kind_of
from mua.view.viewed_runs import ViewedRun

MOST_TASKS = 2000
"""Listed, those with the largest differences first; figures are of all."""


def compared(first: tuple[Connection, ViewedRun, int], second: tuple[Connection, ViewedRun, int]) -> Json:
    """Success and reward of both on every task that has a scored episode in both.

    Each side is a connection, a run and a round of evaluation (0: training). The task is the unit.
    """
    sides = [_by_task(connection, run.id, round_) for connection, run, round_ in (first, second)]
    common = [key for key in sides[0] if key in sides[1]]
    rows = [_row(key, sides[0][key], sides[1][key]) for key in common]
    rows.sort(key=lambda row: (-abs(row["difference"]), row["domain"], row["task"]))
    test = None
    if rows:
        values = [[row[side]["success"] for row in rows] for side in ("first", "second")]
        verdict = paired_test(values[0], values[1], seed=0)
        test = {"name": verdict.name, "p_value": verdict.p_value}
    return {
        "tasks": rows[:MOST_TASKS],
        "common": len(common),
        "only_first": len(sides[0]) - len(common),
        "only_second": len(sides[1]) - len(common),
        "means": [_mean(row[side]["success"] for row in rows) for side in ("first", "second")],
        "rewards": [_mean(row[side]["reward"] for row in rows) for side in ("first", "second")],
        "better": sum(row["difference"] > 0 for row in rows),
        "worse": sum(row["difference"] < 0 for row in rows),
        "test": test,
    }


def _by_task(connection: Connection, run: str, round_: int) -> dict[tuple[str, str], Any]:
    t = trajectories.c
    chosen = (
        sa.select(t.domain, t.task_id, tasks.c.details, sa.func.count().label("episodes"),
                  sa.func.avg(sa.case((t.success, 1.0), else_=0.0)).label("success"),
                  sa.func.avg(t.reward).label("reward"), sa.func.avg(t.turns).label("turns"),
                  sa.func.max(t.id).label("id"))
        .select_from(trajectories.outerjoin(tasks, same_task()))
        .where(t.run_id == run, t.round == round_, t.scored)
        .group_by(t.domain, t.task_id, tasks.c.details)
    )  # fmt: skip
    return {(row["domain"], row["task_id"]): row for row in connection.execute(chosen).mappings()}


def _row(key: tuple[str, str], first: Any, second: Any) -> Json:
    def side(row: Any) -> Json:
        return {name: row[name] for name in ("episodes", "id")} | {
            name: float(row[name]) for name in ("success", "reward", "turns")
        }

    return {
        "domain": key[0], "task": key[1], "kind": kind_of(first["details"]), "first": side(first),
        "second": side(second), "difference": float(second["success"]) - float(first["success"]),
    }  # fmt: skip


def _mean(values: Any) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
