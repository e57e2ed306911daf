"""What the trainer writes into the store, and how store and checkpoint stay of one mind.

A step is written in one transaction: its row, the groups it took, and what its loss read of every segment. A
checkpoint gets its name only when all steps before it are in the store. So a run that is killed anywhere has a store
with every step of its newest checkpoint, and perhaps some after it; the next start counts these as lost
(:func:`mua.store.queries.lost_step`) and makes them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from mua.config.schema import ExperimentConfig
from mua.observe.metrics_log import without_evaluation
from mua.observe.provenance import provenance
from mua.store.blobs import pack_arrays
from mua.store.database import Store, store_url
from mua.store.faults import StoreError
from mua.store.recorder import Recorder
from mua.store.retention import pruning
from mua.store.starts import begin_part, missing_steps
from mua.store.tables import parts, runs, steps, tasks, uses, versions
from mua.store.writer import Insert, Update, Write, Writer
from mua.tokens.same_tokenizer import tokenizer_digest
from mua.types import Float32Array, Group, Json, TrainBatch, TrainSequence

LOSS_ARRAYS = (
    "weights", "advantages", "old_logprobs", "reference_logprobs", "values", "returns",
)  # fmt: skip
"""Of what the loss read of a segment, what is not the segment's own."""
DIGESTS_OF = {"policy": "gradients", "critic": "critic_gradients"}
"""Where ``steps.details`` has the digests of a network's gradients, one an optimizer step."""

OWN_LOGPROBS = "update_logprobs"
"""The trainer's own log-probabilities, as the update found them; where they were not computed before it."""

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
            made = provenance(config)
            masked = made.pop("config")
            self.run, self.part, round_ = begin_part(
                self.store, config.output, config.name, masked,
                made | {"tokenizer": tokenizer_digest(config.model.path)},
                from_step=from_step, seconds=chosen.outage_seconds,
            )  # fmt: skip
            self._tell_missing(from_step)
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
        self._figures: dict[str, float] = {}
        self._of_versions: dict[int, dict[str, float]] = {}
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

    def _tell_missing(self, before: int) -> None:
        with self.store.read() as connection:
            lacking = missing_steps(connection, self.run, before)
        if lacking:
            log.warning(
                "store %s: lacks what steps %d to %d of this run did: it was begun, or restored, after them",
                self.store.name, lacking[0], lacking[-1],
            )  # fmt: skip

    def metrics(self) -> dict[str, float]:
        """What writing took since the last call, under ``resources/store/``: ``cpu_seconds`` of the writer's thread,
        ``waited_seconds`` of those who waited for room in its queue, ``bytes`` and ``rows`` given to it."""
        done, before = self.writer.figures, self._figures
        found = {
            "resources/store/cpu_seconds": done.cpu_seconds, "resources/store/waited_seconds": done.blocked_seconds,
            "resources/store/bytes": float(done.bytes), "resources/store/rows": float(done.rows),
        }  # fmt: skip
        self._figures = found
        return {name: value - before.get(name, 0.0) for name, value in found.items()}

    def synced(self, version: int, metrics: Mapping[str, float]) -> None:
        """The engines have the policy ``version``."""
        row = {"run_id": self.run, "version": version, "part": self.part, "synced_at": time.time()}
        self._of_versions[version] = dict(metrics)
        self.writer.put([Insert(versions, [row | {"metrics": dict(metrics)}], "replace")])

    def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
        """Held-out figures of the policy ``version``, which the engines have had in this start of the run."""
        self._of_versions[version] = known = self._of_versions.get(version, {}) | dict(metrics)
        where = {"run_id": self.run, "version": version, "part": self.part}
        self.writer.put([Update(versions, where, {"metrics": dict(known)})])

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
        details |= {DIGESTS_OF[network]: digests for network, digests in learned.digests.items()}
        row = {
            "run_id": self.run, "step": step, "part": self.part, "state": "done", "version": step,
            "metrics": without_evaluation(metrics),
            "denominators": learned.batches[0].denominators if learned.batches else {},
            "gradient": next(iter(learned.digests.get("policy", [])), None), "details": details, "started_at": began,
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
            for minibatch, (batch, logprobs) in enumerate(learned.read()):
                for position, (sequence, own) in enumerate(zip(batch, logprobs, strict=True)):
                    assert sequence.origin is not None, "sequences of trajectories say where they come from"
                    ordinal, sample, number = sequence.origin
                    rows.append({
                        "run_id": self.run, "step": step, "part": self.part, "epoch": epoch,
                        "trajectory_id": of[ordinal, sample], "segment": number, "minibatch": minibatch,
                        "position": position, "source": None, "tokens": int(sequence.trained.sum()),
                        "arrays": None if epoch else pack_arrays(read_by_loss(sequence, lengths[sequence.origin], own)),
                    })  # fmt: skip
        return [Insert(uses, rows)] if rows else []


class Learned:
    """What the optimizer steps of one step read; :func:`mua.trainer.rl.learn` fills it in."""

    def __init__(self, *, keeps_logprobs: bool = False) -> None:
        """``keeps_logprobs``: whether somebody wants the log-probabilities that losses computed themselves."""
        self.keeps_logprobs = keeps_logprobs
        self.batches: list[TrainBatch] = []
        self.logprobs: list[list[Float32Array] | None] = []
        """Of each batch's first update, of each sequence float32 ``[T]``; None where they were there before."""
        self.epochs = 0
        self.digests: dict[str, list[str]] = {}
        """Of the gradients of each network's optimizer steps; none where they are not watched."""

    def read(self) -> Iterator[tuple[TrainBatch, Sequence[Float32Array | None]]]:
        """Each batch with the log-probabilities of its sequences."""
        for batch, logprobs in zip(self.batches, self.logprobs or [None] * len(self.batches), strict=True):
            yield batch, logprobs or [None] * len(batch.sequences)


def layout_of(config: ExperimentConfig) -> str:
    """The parallel layout, which the bits of a gradient depend on."""
    chosen = config.megatron
    sizes = {
        "tp": chosen.tensor_parallel, "pp": chosen.pipeline_parallel, "cp": chosen.context_parallel,
        "ep": chosen.expert_parallel, "world": chosen.world_size,
    }  # fmt: skip
    return " ".join(f"{name}{size}" for name, size in sizes.items())


def read_by_loss(sequence: TrainSequence, length: int, own: Float32Array | None = None) -> Json:
    """What the loss read of a segment of ``length`` tokens: 0 after its last trained token. ``own`` are the
    log-probabilities that it computed itself."""
    found: dict[str, Any] = {}
    for name in (*LOSS_ARRAYS, OWN_LOGPROBS):
        array = own if name == OWN_LOGPROBS else getattr(sequence, name)
        if array is None or (name == "old_logprobs" and array is sequence.behaviour_logprobs):
            continue
        whole = np.zeros(length, np.float32)
        whole[: len(array)] = np.where(sequence.trained, array, 0.0) if name != "weights" else array
        found[name] = whole
    return found
