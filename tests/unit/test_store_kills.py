"""kill -9 of a run at drawn moments: its store stays whole, and of one mind with its checkpoints.

Each attempt is a process of its own that continues the run: the output folder, the record, the recorder of episodes and
the writer are the run's own; policy and episodes are made up. Moments are drawn over time, over the statements that the
store sends, before its commits and before the system calls of a checkpoint's save. After every kill the store must
verify and hold every step of the newest checkpoint. Not covered: the real policy (tests/e2e/test_chaos_runs.py),
PostgreSQL.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa
from sqlalchemy.engine.default import DefaultDialect

from mua.algorithms.batch import make_batches
from mua.config.schema import ExperimentConfig
from mua.store.database import Store, store_url
from mua.store.faults import NoStore
from mua.store.queries import lost_step
from mua.store.retention import checkpoint_steps
from mua.store.starts import missing_steps
from mua.store.tables import steps, tasks, trajectories, uses
from mua.store.verification import verify
from mua.trainer import observers, run_folder
from mua.trainer.observers import DoneStep, Learned, RunRecord
from mua.trainer.run_folder import Run
from mua.types import Group, Outcome, Segment, Trajectory
from mua.utils.atomic import hidden_folder, publish_folder
from mua.utils.run_identity import known_run

GROUPS, SIZE = 2, 2
KINDS = {"time": 1, "statement": 400, "commit": 60, "save": 150}
"""Where an attempt dies, and before which of its events at most."""


@dataclass(frozen=True)
class Death:
    """When an attempt dies: at the ``count``-th event of its ``kind``, ``seconds`` later."""

    kind: str
    count: int
    seconds: float


def die_at(death: Death) -> None:
    """Kill this process at that moment. For one that does nothing else: it changes SQLAlchemy for good."""
    left = itertools.count(death.count - 1, -1)

    def die() -> None:
        time.sleep(death.seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def note(kind: str) -> None:
        if kind == death.kind and next(left) == 0:
            threading.Thread(target=die, daemon=True).start() if death.seconds else die()

    commit = DefaultDialect.do_commit

    def watched(dialect: Any, connection: Any) -> None:
        note("commit")
        commit(dialect, connection)

    DefaultDialect.do_commit = watched  # type: ignore[method-assign]
    for name in ("before_cursor_execute", "after_cursor_execute"):
        sa.event.listen(sa.engine.Engine, name, lambda *_: note("statement"))
    # Of a save: each system call on the hidden folder of a checkpoint.
    sys.addaudithook(lambda event, given: note("save") if given and ".partial" in str(given[0]) else None)
    note("time")


class CountingPolicy:
    """Counts its updates; its checkpoints are whole or not there, by the functions that write the real ones."""

    updates = 0

    def save(self, folder: Path, extra_state: dict[str, Any], *_: Any, **__: Any) -> None:
        partial = hidden_folder(folder)
        partial.mkdir(parents=True, exist_ok=True)
        for number in range(4):
            (partial / f"weights_{number}").write_bytes(bytes(100_000))
        (partial / "manifest.json").write_text(json.dumps(extra_state))
        publish_folder(partial, folder)

    def load(self, folder: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        self.updates = state["step"]
        return state

    def finish_save(self) -> None:
        pass


def experiment(output: Path, run_steps: int) -> ExperimentConfig:
    """Every step has its checkpoint; the store is written as often as can be."""
    return ExperimentConfig.model_validate(
        {
            "name": "kills", "output": str(output), "model": {"path": "none"}, "environment": {"name": "help_desk"},
            "algorithm": {"group_size": SIZE, "groups_per_step": GROUPS, "epochs": 2},
            "trainer": {"steps": run_steps, "save_every": 2, "keep": 2},
            "store": {"write_seconds": 0.002},
            "observe": {"tensorboard": False, "progress": False, "traces": False},
        }
    )  # fmt: skip


def trajectory(ordinal: int, sample: int, version: int) -> Trajectory:
    """An episode of 40 tokens, the same whenever it is played."""
    draw = np.random.default_rng([ordinal, sample])
    provenance = np.array([0, 1, 3, 4, 4, 4, 4, 2] * 5, np.uint8)
    sampled = provenance == 4
    segment = Segment(
        draw.integers(0, 500, 40).astype(np.int32), provenance,
        np.where(sampled, -draw.random(40), 0).astype(np.float32),
        np.where(sampled, version, -1).astype(np.int32), (np.arange(40) // 8).astype(np.int32),
    )  # fmt: skip
    reward = float(sample)
    return Trajectory(
        f"task {ordinal}", ordinal, sample, [segment], [0.0] * 4 + [reward], reward, sample == 1, Outcome.USER_STOP,
        messages=[{"role": "user", "content": f"hello {ordinal}"}], domain="help_desk",
    )  # fmt: skip


def play(config: ExperimentConfig) -> None:
    """The run from where it is to its end."""
    # To ask git takes longer than all the rest of an attempt.
    for module in (run_folder, observers):
        module.__dict__["provenance"] = lambda _: {"config": {}}
    policy: Any = CountingPolicy()
    with Run(config, policy) as run, RunRecord(config, run.step) as record:
        run.store = record
        for step in range(run.step, config.trainer.steps):
            _step(config, run, record, step)


def _step(config: ExperimentConfig, run: Run, record: RunRecord, step: int) -> None:
    recorder, groups = record.recorder, []
    record.synced(step, {})
    for ordinal in range(step * GROUPS, (step + 1) * GROUPS):
        recorder.opened(ordinal, "help_desk", f"task {ordinal}", SIZE, step, "train")
        members = []
        for sample in range(SIZE):
            note = recorder.episode(ordinal, sample, {"temperature": 1.0}, evaluation=False)
            members.append(made := trajectory(ordinal, sample, step))
            note.request("user", time.time(), messages=made.messages, reply={"role": "assistant", "content": "yes"})
            note.request(
                "policy",
                time.time(),
                messages=made.messages,
                conversation=made.messages,
                segment=0,
                token_start=3,
                token_end=7,
                completion_tokens=4,
            )
            note.tool_call(time.time(), "done", turn=0, name="look", arguments="{}")
            if sample == 0 and ordinal % 3 == 0:
                note.failed()
                note = recorder.episode(ordinal, sample, {"temperature": 1.0}, evaluation=False)
            asyncio.run(note.ended(made, made.reward))
        groups.append(Group(ordinal, f"task {ordinal}", members))
        recorder.completed(groups[-1])
    learned = Learned()
    learned.batches, learned.epochs = make_batches([groups], config.algorithm, 1.0), config.algorithm.epochs
    record.stepped(DoneStep(step, groups, groups, None, learned, metrics={"train/loss": 0.0}))
    run.log(step, {"train/loss": 0.0})
    if run.due(config.trainer.save_every, step):
        run.save(step)


def faults(config: ExperimentConfig) -> list[str]:
    """What store and checkpoints disagree about, and what of the store is not whole."""
    output = config.output
    try:
        opened = Store.open(store_url(output, config.store), create=False)
    except NoStore:  # it was killed before there were tables
        return ["checkpoints without a store"] if checkpoint_steps(output) else []
    with opened as store, store.read() as found:
        wrong = [str(finding) for finding in verify(found)]
        run = known_run(output)
        if lacking := missing_steps(found, run, max(checkpoint_steps(output), default=0)):
            wrong.append(f"a checkpoint is there, and steps {lacking} are not in the store")
        for step in found.execute(sa.select(steps).where(steps.c.run_id == run, ~lost_step())):
            there = (uses.c.run_id == run) & (uses.c.step == step.step) & (uses.c.part == step.part)
            names = [name for group in step.details["groups"] for name in group[2]]
            taken = (tasks.c.run_id == run) & (tasks.c.state == "taken") & (tasks.c.taken_step == step.step)
            chosen = ((uses, there), (trajectories, trajectories.c.id.in_(names)), (tasks, taken))
            counts = [
                found.execute(sa.select(sa.func.count()).select_from(table).where(where)).scalar_one()
                for table, where in chosen
            ]
            if counts != [2 * GROUPS * SIZE, GROUPS * SIZE, GROUPS]:
                wrong.append(f"step {step.step} has {counts} uses, trajectories and groups")
        return wrong


def campaign(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill a run so often, check after each, let it end; how often it was killed, with every fault in ``faults``."""
    draw, killed, wrong = random.Random(seed), 0, list[str]()
    config = experiment(folder / "out", 100 * kills + 8)  # more than any attempt comes to
    config.output.mkdir(parents=True)
    for number in range(kills):
        kind = list(KINDS)[number % len(KINDS)]
        # A commit of a few rows takes a fraction of a millisecond on SQLite, some on a PostgreSQL.
        seconds = {"time": 0.02 + 0.4 * draw.random(), "commit": 0.001 * draw.random() ** 2}.get(kind, 0.0)
        status = attempt(config, death := Death(kind, draw.randrange(1, KINDS[kind] + 1), seconds))
        killed += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            wrong.append(f"kill {number}: the attempt ended before with status {os.waitstatus_to_exitcode(status)}")
        wrong += [f"kill {number} ({death}): {fault}" for fault in faults(config)]
    last = experiment(config.output, max(checkpoint_steps(config.output), default=0) + 6)
    if status := attempt(last, None):
        wrong.append(f"the last attempt ended with status {status}")
    wrong += [f"end: {fault}" for fault in faults(last)]
    with Store.open(store_url(last.output, last.store), create=False) as store, store.read() as found:
        mine = (
            sa.select(sa.func.count()).select_from(steps).where(steps.c.run_id == known_run(last.output), ~lost_step())
        )
        if (standing := found.execute(mine).scalar_one()) != last.trainer.steps:
            wrong.append(f"{last.trainer.steps} steps were made, {standing} stand in the store")
    return {"killed": killed, "steps": standing, "faults": wrong}


def attempt(config: ExperimentConfig, death: Death | None) -> int:
    """The status of a process that plays on."""
    if (child := os.fork()) == 0:
        try:
            if death is not None:
                die_at(death)
            play(config)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.slow
def test_store_and_checkpoints_agree_after_kills_at_drawn_moments(tmp_path: Path) -> None:
    found = campaign(tmp_path / "kills", 6, seed=3)
    assert found["faults"] == []
    assert found["killed"] == 6
