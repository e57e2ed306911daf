"""What the trainer writes into the store, and how store and checkpoint stay of one mind.

A step is written in one transaction: its row, the groups it took, and what its loss read of every segment. A
checkpoint gets its name only when all steps before it are in the store. So a run that is killed anywhere has a store
with every step of its newest checkpoint, and perhaps some after it; the next start counts these as lost
(:func:`mua.store.queries.lost_step`) and makes them again.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import numpy as np
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from megatron_bridge.atomic import replace_text
from mua.config.schema import ExperimentConfig
from mua.launch.provenance import provenance
from mua.store.arrays import pack_arrays
from mua.store.database import Store, store_url
from mua.store.faults import StoreError
from mua.store.queries import lost_step
from mua.store.recorder import Recorder
from mua.store.retention import pruning
from mua.store.tables import parts, runs, steps, tasks, uses, versions
from mua.store.writer import Insert, Update, Write, Writer
from mua.tokens.same_tokenizer import tokenizer_digest
from mua.types import Group, Json, TrainBatch, TrainSequence

RUN_FILE = "store_run"
"""In the output folder: the run's id in its store."""
LOSS_ARRAYS = (
    "weights", "advantages", "old_logprobs", "reference_logprobs", "values", "returns",
)  # fmt: skip
"""Of what the loss read of a segment, what is not the segment's own."""

log = logging.getLogger(__name__)


class RunRecord:
    """One start of a run in its store. Use as a context manager."""

    def __init__(self, config: ExperimentConfig, from_step: int) -> None:
        """``from_step`` is the next step to take: what an earlier start wrote of it and later ones is lost."""
        chosen = config.store
        url = store_url(config.output, chosen)
        self._config = config
        self._stack = ExitStack()
        try:
            self.store = self._stack.enter_context(Store.open(url, busy_seconds=chosen.busy_seconds))
            self.run = run_of(config.output)
            self.part, round_ = self._begin(from_step)
            self.writer = self._stack.enter_context(
                Writer(
                    self.store,
                    every_seconds=chosen.write_seconds,
                    queue_bytes=chosen.queue_megabytes * 2**20,
                    outage_seconds=chosen.outage_seconds,
                    name=self.run,
                )
            )
        except BaseException:
            self._stack.close()
            raise
        self.recorder = Recorder(self.writer, self.run, self.part, round=round_, sampler=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        state, now = "done" if error is None else "left", time.time()
        try:
            if error is None or not isinstance(error, StoreError):
                ended = {"ended_at": now}
                self.writer.put([
                    Update(runs, {"id": self.run}, ended | {"state": state}),
                    Update(parts, {"run_id": self.run, "part": self.part}, ended),
                ])  # fmt: skip
        except StoreError:
            if error is None:
                raise
        finally:
            self._stack.__exit__(kind, error, trace)

    def synced(self, version: int, metrics: Mapping[str, float]) -> None:
        """The engines have the policy ``version``."""
        row = {"run_id": self.run, "version": version, "part": self.part, "synced_at": time.time()}
        self.writer.put([Insert(versions, [row | {"metrics": dict(metrics)}], "replace")])

    def stepped(self, step: int, groups: Sequence[Group], usable: Sequence[Group], learned: Learned, began: float,
                metrics: Mapping[str, float]) -> None:  # fmt: skip
        """``step`` is done: it took ``groups``, learned from what is ``usable`` of them."""
        ended = time.time()
        of = {(g.ordinal, t.sample): self.recorder.key(g.ordinal, t.sample).trajectory_id
              for g in groups for t in g.trajectories}  # fmt: skip
        chosen = {group.ordinal for group in usable}
        details = {
            "groups": [
                [g.ordinal, g.task_id, [of[g.ordinal, t.sample] for t in g.trajectories], g.ordinal in chosen]
                for g in groups
            ],
            "updates": [batch.denominators for batch in learned.batches],
            "layout": layout_of(self._config),
        }  # fmt: skip
        if learned.digests:
            details["gradients"] = learned.digests
        row = {
            "run_id": self.run, "step": step, "part": self.part, "state": "done", "version": step,
            "metrics": dict(metrics), "denominators": learned.batches[0].denominators if learned.batches else {},
            "gradient": learned.digests[0] if learned.digests else None, "details": details, "started_at": began,
            "ended_at": ended,
        }  # fmt: skip
        lengths = {
            (g.ordinal, t.sample, number): len(segment)
            for g in groups for t in g.trajectories for number, segment in enumerate(t.segments)
        }  # fmt: skip

        def made() -> list[Write]:
            taken: list[Write] = [
                Update(tasks, {"run_id": self.run, "round": 0, "ordinal": group.ordinal},
                       {"state": "taken", "taken_step": step})
                for group in groups
            ]  # fmt: skip
            return [Insert(steps, [row]), *self._uses(step, learned, of, lengths), *taken]

        size = sum(4 * len(LOSS_ARRAYS) * len(s) for batch in learned.batches for s in batch)
        self.writer.put(made, size + 4096)

    def before_checkpoint(self) -> None:
        """Everything so far is in the store. Raises where it does not come there in ``store.flush_seconds``."""
        self.writer.flush(self._config.store.flush_seconds)

    def after_checkpoint(self, step: int, folder: Path) -> None:
        """The state after ``step`` is in ``folder``."""
        where = {"run_id": self.run, "version": step + 1, "part": self.part}
        writes: list[Write] = [Update(versions, where, {"checkpoint": folder.name})]
        self.writer.put([*writes, *pruning(self.run, self._config.store, self._config.output)])

    def _uses(
        self, step: int, learned: Learned, of: Mapping[tuple[int, int], str],
        lengths: Mapping[tuple[int, int, int], int],
    ) -> list[Write]:  # fmt: skip
        rows = []
        for epoch in range(learned.epochs):
            for minibatch, batch in enumerate(learned.batches):
                for position, sequence in enumerate(batch):
                    assert sequence.origin is not None, "sequences of trajectories say where they come from"
                    ordinal, sample, number = sequence.origin
                    rows.append({
                        "run_id": self.run, "step": step, "part": self.part, "epoch": epoch,
                        "trajectory_id": of[ordinal, sample], "segment": number, "minibatch": minibatch,
                        "position": position, "source": None, "tokens": int(sequence.trained.sum()),
                        "arrays": None if epoch else pack_arrays(read_by_loss(sequence, lengths[sequence.origin])),
                    })  # fmt: skip
        return [Insert(uses, rows)] if rows else []

    # ---- the beginning

    def _begin(self, from_step: int) -> tuple[int, int]:
        """The part that begins, and the last round of evaluation."""
        config = self._config
        made = provenance(config)
        made["tokenizer"] = tokenizer_digest(config.model.path)
        masked = made.pop("config")
        now = time.time()

        def begin(connection: Connection) -> tuple[int, int]:
            of_run = sa.select(parts.c.part, parts.c.started_at).where(parts.c.run_id == self.run)
            newest = connection.execute(of_run.order_by(parts.c.part.desc()).limit(1)).one_or_none()
            if newest is not None and newest.started_at == now:  # done, and only the answer was lost
                return int(newest.part), _rounds(connection, self.run)
            last = None if newest is None else int(newest.part)
            if last is None:
                row = {"id": self.run, "output": str(config.output.resolve()), "name": config.name, "state": "running",
                       "started_at": now, "config": masked, "provenance": made}  # fmt: skip
                connection.execute(sa.insert(runs).values(row))
            else:
                _supersede(connection, self.run, from_step, now)
                again_ = {"state": "running", "ended_at": None, "output": str(config.output.resolve())}
                connection.execute(sa.update(runs).where(runs.c.id == self.run).values(again_))
            part = (last or 0) + 1
            connection.execute(sa.insert(parts).values(
                run_id=self.run, part=part, from_step=from_step, started_at=now, config=masked, pid=os.getpid(),
                host=socket.gethostname(),
            ))  # fmt: skip
            return part, _rounds(connection, self.run)

        part, rounds = self.store.patiently(begin, config.store.outage_seconds)
        if lacking := missing_steps(self.store, self.run, from_step):
            log.warning(
                "store %s: lacks what steps %s to %s of this run did: it was begun, or restored, after them",
                self.store.name, lacking[0], lacking[-1],
            )  # fmt: skip
        return part, rounds


class Learned:
    """What the optimizer steps of one step read; :func:`mua.trainer.rl.learn` fills it in."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []
        self.epochs = 0
        self.digests: list[str] = []


def layout_of(config: ExperimentConfig) -> str:
    """The parallel layout, which the bits of a gradient depend on."""
    chosen = config.megatron
    sizes = {
        "tp": chosen.tensor_parallel, "pp": chosen.pipeline_parallel, "cp": chosen.context_parallel,
        "ep": chosen.expert_parallel, "world": chosen.world_size,
    }  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in sizes.items())


def run_of(output: Path) -> str:
    """The id of the run in ``output``, made where there is none."""
    path = output / RUN_FILE
    if path.exists():
        return path.read_text(encoding="utf-8").strip()
    made = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid4().hex[:8]}"
    replace_text(path, made + "\n")
    return made


def missing_steps(store: Store, run: str, before: int) -> list[int]:
    """The steps below ``before``, which a checkpoint holds, that do not stand in the store as done."""
    chosen = sa.select(steps.c.step).where(steps.c.run_id == run, steps.c.state == "done", ~lost_step())
    with store.read() as connection:
        standing = set(connection.execute(chosen).scalars())
    return [step for step in range(before) if step not in standing]


def _rounds(connection: Connection, run: str) -> int:
    return int(connection.execute(sa.select(sa.func.max(tasks.c.round)).where(tasks.c.run_id == run)).scalar() or 0)


def _supersede(connection: Connection, run: str, from_step: int, now: float) -> None:
    """Groups that no step which stands has taken are cancelled; the part that begins makes those it needs again."""
    under_way = tasks.c.state.in_(("open", "complete"))
    lost = (tasks.c.state == "taken") & (tasks.c.taken_step >= from_step)
    connection.execute(
        sa.update(tasks)
        .where(tasks.c.run_id == run, under_way | lost)
        .values(state="cancelled", taken_step=None, ended_at=now)
    )


def read_by_loss(sequence: TrainSequence, length: int) -> Json:
    """What the loss read of a segment of ``length`` tokens: 0 after its last trained token."""
    found: dict[str, Any] = {}
    for name in LOSS_ARRAYS:
        array = getattr(sequence, name)
        if array is None or (name == "old_logprobs" and array is sequence.behaviour_logprobs):
            continue
        whole = np.zeros(length, np.float32)
        whole[: len(array)] = np.where(sequence.trained, array, 0.0) if name != "weights" else array
        found[name] = whole
    return found
