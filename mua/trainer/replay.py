"""``mua replay``: a past step once more, from the checkpoint before it and from what the store has of it.

checkpoint ≤ step ──► steps up to it, from the store ──► the step ──► digests of its gradients, its metrics
                                                          └──► again from the same weights, with other settings

Nothing of the run is written. The batch is made by the functions that made it then (:func:`mua.trainer.rl.learn`).
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa
import yaml
from sqlalchemy.engine import Connection

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.errors import ConfigError
from mua.megatron.checkpoint import checkpoint_folder
from mua.store.arrays import unpack_arrays
from mua.store.database import FILE, Store
from mua.store.faults import StoreError
from mua.store.queries import lost_step
from mua.store.reader import read_trajectories
from mua.store.retention import checkpoint_steps
from mua.store.starts import RUN_FILE
from mua.store.tables import parts, steps, uses
from mua.trainer.learner import Learner
from mua.trainer.rank_processes import become_rank, leads
from mua.trainer.rl import learn, optimizer_steps
from mua.trainer.run_record import OWN_LOGPROBS, Learned, read_by_loss
from mua.types import Group, Json

CHANGEABLE = ("algorithm.", "critic.value_clip=")
"""What a replay may set: what decides the loss of a batch that is there, of a learner that is the same."""
SHOWN = (
    "tokens", "loss", "grad_norm", "entropy", "actor/ratio", "actor/clip_fraction_low", "actor/clip_fraction_high",
    "actor/advantage_abs", "mismatch/kl_k3",
)  # fmt: skip
"""Metrics that are compared."""
TOLERANCE = 1e-3
"""Relative, of loss and gradient norm, where bits are not promised."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step as the store has it."""

    step: int
    part: int
    version: int
    groups: list[Group]
    """What it trained on, in order."""
    metrics: Json
    gradients: list[str]
    """Digests, one an optimizer step of the policy; none where the run was not deterministic."""
    layout: str


def replay(output: Path, step: int, overrides: Sequence[str] = (), *, store: str | None = None) -> Json | None:
    """Do ``step`` of the run in ``output`` again, and once more with ``overrides``; what was found, on rank 0.

    Raises :class:`StoreError` where the store has not all of it, :class:`ConfigError` for overrides that are about
    anything but the loss.
    """
    for override in overrides:
        if not override.startswith(CHANGEABLE):
            raise ConfigError(f"{override}: mua replay can set algorithm.* and critic.value_clip alone")
    with Store.open(store or output / FILE, create=False, write=False) as opened:
        with opened.read() as connection:
            run = _run_in(output)
            part = _standing(connection, run, step)
            config, changed = _configurations(connection, run, part, output, overrides)
        become_rank(config)
        total, critic = optimizer_steps(config)
        reference = any(one.algorithm.kl_coefficient > 0 for one in (config, changed))
        learner = Learner(config, total_steps=total, with_reference=reference, critic_steps=critic)
        if not leads():
            learner.follow()
            return None
        with learner, tempfile.TemporaryDirectory(prefix="mua-replay-") as spare:
            return _Replay(opened, output, run, step, learner, Path(spare)).result(config, changed, list(overrides))


class _Replay:
    def __init__(self, store: Store, output: Path, run: str, step: int, learner: Learner, spare: Path) -> None:
        self._learner, self._step = learner, step
        self._start = max((s for s in checkpoint_steps(output) if s <= step), default=0)
        self._from = checkpoint_folder(output / "checkpoints", self._start)
        if self._start == 0:  # the policy that the run began with, to come back to
            self._from = spare / "step_00000000"
            learner.save(self._from, {"step": 0})
        with store.read() as connection:
            self._recorded = [stored_step(connection, run, one) for one in range(self._start, step + 1)]
            self._uses = _stored_uses(connection, run, self._recorded[-1])

    def result(self, config: ExperimentConfig, changed: ExperimentConfig, overrides: list[str]) -> Json:
        asked = self._recorded[-1]
        self._learner.watch_gradients(keep=bool(overrides))
        metrics, learned, drifted = self._pass(config, config)
        exact = _same_arrays(self._uses, learned, asked)
        found: Json = {
            "step": self._step,
            "from": self._start,
            "groups": len(asked.groups),
            "layout": asked.layout,
            "stored": {name: asked.metrics[name] for name in SHOWN if name in asked.metrics},
            "replayed": {name: metrics[name] for name in SHOWN if name in metrics},
            "gradients": {"stored": asked.gradients, "replayed": learned.digests},
            "same_gradients": asked.gradients == learned.digests if asked.gradients else None,
            "same_batch": exact,
            "drifted_steps": drifted,
            "within_tolerance": all(
                math.isclose(asked.metrics[name], metrics[name], rel_tol=TOLERANCE, abs_tol=1e-7)
                for name in ("loss", "grad_norm")
                if name in metrics and name in asked.metrics
            ),
        }
        if overrides:
            self._learner.hold_gradients()
            others, anew, _ = self._pass(config, changed)
            found["changed"] = {
                "overrides": overrides,
                "metrics": {name: others[name] for name in SHOWN if name in others},
                "cosines": self._learner.gradient_cosines(),
                **_differences(learned, anew),
            }
        return found

    def _pass(self, config: ExperimentConfig, last: ExperimentConfig) -> tuple[Json, Learned, list[int]]:
        """From the checkpoint to the step, which is done as ``last`` says; metrics, what the loss read, and the steps
        on the way whose gradients were others than the stored ones."""
        self._learner.load(self._from)
        drifted = []
        for recorded in self._recorded:
            own, learned = last if recorded.step == self._step else config, Learned(keeps_logprobs=True)
            metrics = learn(own, self._learner, recorded.groups, version=recorded.version, learned=learned)
            if recorded.gradients and learned.digests != recorded.gradients and recorded.step != self._step:
                drifted.append(recorded.step)
        return metrics, learned, drifted


def stored_step(connection: Connection, run: str, step: int) -> StoredStep:
    """A step that stands, with the groups it trained on. Raises :class:`StoreError` where any of it is gone."""
    part = _standing(connection, run, step)
    where = (steps.c.run_id == run) & (steps.c.step == step) & (steps.c.part == part)
    row = connection.execute(sa.select(steps).where(where)).mappings().one()
    details = row["details"] or {}
    if "groups" not in details:
        raise StoreError(
            f"step {step} of run {run}: the store does not say which groups it took; it cannot be replayed"
        )
    groups = []
    try:
        for ordinal, task_id, members, usable in details["groups"]:
            if usable:
                groups.append(Group(ordinal, task_id, list(read_trajectories(connection, members))))
    except StoreError as error:
        raise StoreError(
            f"step {step} of run {run} cannot be replayed: {error}; store.keep_arrays_steps and keep_experts_steps say "
            "for how long tokens are kept, and a kept checkpoint before the step (trainer.keep) holds on to them"
        ) from None
    gradients = list(details.get("gradients") or [])
    return StoredStep(step, part, row["version"], groups, row["metrics"] or {}, gradients, details.get("layout", ""))


def _run_in(output: Path) -> str:
    path = output / RUN_FILE
    if not path.is_file():
        raise ConfigError(f"{output}: not the output folder of a run with a store (no file {RUN_FILE})")
    return path.read_text(encoding="utf-8").strip()


def _standing(connection: Connection, run: str, step: int) -> int:
    """The part whose ``step`` stands. Raises :class:`StoreError` with the steps there are."""
    chosen = sa.select(steps.c.step, steps.c.part).where(steps.c.run_id == run, steps.c.state == "done", ~lost_step())
    found = {row.step: row.part for row in connection.execute(chosen)}
    if step not in found:
        there = f"steps {min(found)} to {max(found)}" if found else "no step"
        raise StoreError(f"run {run}: the store has {there}, not step {step}")
    return int(found[step])


def _configurations(
    connection: Connection, run: str, part: int, output: Path, overrides: Sequence[str]
) -> tuple[ExperimentConfig, ExperimentConfig]:
    """What the part was started with, and the same with ``overrides``."""
    row = connection.execute(sa.select(parts.c.config).where(parts.c.run_id == run, parts.c.part == part)).scalar()
    if row is None:
        raise StoreError(f"run {run}: the store has no configuration of part {part}")
    with tempfile.TemporaryDirectory(prefix="mua-replay-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(row), encoding="utf-8")
        # Absolute, because what it was given relative to may not be here; no endpoint or engine is started.
        fixed = [f"output={output.resolve()}"]
        config, changed = load_config(file, fixed), load_config(file, [*fixed, *overrides])
    if (config.algorithm.advantage == "gae") != (changed.algorithm.advantage == "gae"):
        raise ConfigError(
            "algorithm.advantage: a replay has the networks of the run: gae needs its critic, others none"
        )
    return config, changed


def _stored_uses(connection: Connection, run: str, step: StoredStep) -> dict[tuple[str, int], dict[str, Any]]:
    c = uses.c
    where = (c.run_id == run) & (c.step == step.step) & (c.part == step.part) & (c.epoch == 0)
    rows = connection.execute(sa.select(c.trajectory_id, c.segment, c.arrays).where(where, c.arrays.is_not(None)))
    return {(row.trajectory_id, row.segment): unpack_arrays(row.arrays, row.trajectory_id) for row in rows}


def _same_arrays(stored: dict[tuple[str, int], dict[str, Any]], learned: Learned, step: StoredStep) -> bool | None:
    """Whether weights, advantages and log-probabilities are those that were stored, bit for bit; None: none were."""
    if not stored:
        return None
    lengths = {
        (g.ordinal, t.sample, n): len(segment) for g in step.groups for t in g.trajectories
        for n, segment in enumerate(t.segments)
    }  # fmt: skip
    seen = 0
    by_place = {(*name.split("/")[3:5], str(segment)): arrays for (name, segment), arrays in stored.items()}
    for batch, logprobs in learned.read():
        for sequence, own in zip(batch, logprobs, strict=True):
            assert sequence.origin is not None
            before = by_place.get((str(sequence.origin[0]), str(sequence.origin[1]), str(sequence.origin[2])))
            now = read_by_loss(sequence, lengths[sequence.origin], own)
            if before is not None and OWN_LOGPROBS not in before:  # stored before they were kept
                now.pop(OWN_LOGPROBS, None)
            if before is None or before.keys() != now.keys():
                return False
            if any(before[name].tobytes() != now[name].tobytes() for name in now):
                return False
            seen += 1
    return seen == len(stored)


def _differences(first: Learned, second: Learned) -> Json:
    """How advantages and weights differ, over tokens that either trains."""
    found = [{s.origin: s for batch in one.batches for s in batch} for one in (first, second)]
    changed: dict[str, Json] = {}
    for name in ("advantages", "weights"):
        differences = []
        for origin in found[0].keys() | found[1].keys():
            pair = [one.get(origin) for one in found]
            length = max(len(sequence) for sequence in pair if sequence is not None)
            whole = np.zeros((2, length))
            for row, sequence in zip(whole, pair, strict=True):
                if sequence is not None:
                    row[: len(sequence)] = np.where(sequence.trained, getattr(sequence, name), 0)
            differences.append(np.abs(whole[0] - whole[1]))
        flat = np.concatenate(differences) if differences else np.zeros(1)
        changed[name] = {"tokens_changed": int((flat > 0).sum()), "largest_change": float(flat.max(initial=0.0))}
    return changed
