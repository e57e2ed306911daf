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
from typing import Any, TypeAlias

import numpy as np
import sqlalchemy as sa
import yaml
from sqlalchemy.engine import Connection

from mua.config.load import load_config
from mua.config.schema import ExperimentConfig, RolloutConfig, TrainerConfig
from mua.megatron.checkpoint import checkpoint_folder
from mua.store.blobs import unpack_arrays
from mua.store.database import FILE, Store
from mua.store.faults import StoreError
from mua.store.queries import lost_step
from mua.store.retention import checkpoint_steps
from mua.store.tables import parts, steps, trajectories, uses
from mua.store.trajectories import read_trajectories
from mua.trainer.learner import Learner
from mua.trainer.observers import DIGESTS_OF, OWN_LOGPROBS, Learned, read_by_loss
from mua.trainer.ranks import init_distributed, is_rank0
from mua.trainer.rl import learn
from mua.types import Group, Json
from mua.utils.errors import ConfigError
from mua.utils.run_identity import RUN_FILE, known_run

StoredUses: TypeAlias = dict[tuple[str, int], dict[str, Any]]
"""What the loss read, by the trajectory's id and the segment's number."""
CHANGEABLE = ("algorithm.", "critic.value_clip=")
"""What a replay may set: what decides the loss of a batch that is there, of a learner that is the same."""
SHOWN = (
    "train/tokens", "train/loss", "train/grad_norm", "train/entropy", "train/ratio",
    "train/pg_clipfrac_low", "train/pg_clipfrac_high", "train/advantage_abs", "train/train_rollout_kl_k3",
    "rollout/filters/groups_kept", "train/moe/replay_agreement", "train/critic/vf_loss",
    "train/critic/grad_norm", "train/critic/vf_explained_var",
)  # fmt: skip
"""Metrics that are shown, stored and replayed."""
COMPARED = ("train/loss", "train/grad_norm", "train/critic/vf_loss", "train/critic/grad_norm")
"""Of which these must agree."""
OF_THE_LEARNER = ("model", "megatron", "optimizer", "critic", "rollout", "trainer")
"""Sections that a learner is built from, or a batch is made by, beside ``algorithm``."""
_NOT_OF_THE_LEARNER = {
    "critic": {"value_clip"},
    "rollout": set(RolloutConfig.model_fields) - {"temperature"},
    "trainer": set(TrainerConfig.model_fields) - {"deterministic"},
}
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
    gradients: dict[str, list[str]]
    """Digests by network, one an optimizer step; none where the run was not deterministic."""
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
            if (run := known_run(output)) is None:
                raise ConfigError(f"{output}: not the output folder of a run with a store (no file {RUN_FILE})")
            start = max((s for s in checkpoint_steps(output) if s <= step), default=0)
            taken = {one: _standing(connection, run, one) for one in range(start, step + 1)}
            configs = {one: _configuration(connection, run, part, output) for one, part in taken.items()}
            config, changed = configs[step], _configuration(connection, run, taken[step], output, overrides)
            _check(configs, changed, step)
            experts = config.megatron.routing_replay != "off"
            recorded, stored_uses = list[StoredStep](), StoredUses()
            if is_rank0():  # before any rank starts: what is not in the store must not cost a model in memory
                recorded = [stored_step(connection, run, one, experts=experts) for one in taken]
                c, last = uses.c, recorded[-1]
                where = (c.run_id == run) & (c.step == step) & (c.part == last.part) & (c.epoch == 0)
                read = sa.select(c.trajectory_id, c.segment, c.arrays).where(where, c.arrays.is_not(None))
                for row in connection.execute(read):
                    stored_uses[row.trajectory_id, row.segment] = unpack_arrays(row.arrays, row.trajectory_id)
        init_distributed(config)
        reference = any(one.algorithm.kl_coefficient > 0 for one in (config, changed))
        learner = Learner.for_rl(config, with_reference=reference)
        if not is_rank0():
            learner.worker_loop()
            return None
        with learner, tempfile.TemporaryDirectory(prefix="mua-replay-") as spare:
            origin = checkpoint_folder(output / "checkpoints", start)
            if start == 0:  # the policy that the run began with, to come back to
                origin = Path(spare) / "step_00000000"
                learner.save(origin, {"step": 0})
            return _compare(recorded, stored_uses, configs, learner, origin, changed, list(overrides))


def _compare(
    recorded: list[StoredStep], stored_uses: StoredUses, configs: dict[int, ExperimentConfig], learner: Learner,
    origin: Path, changed: ExperimentConfig, overrides: list[str],
) -> Json:  # fmt: skip
    """What :func:`replay` found, from the checkpoint ``origin`` on."""
    asked = recorded[-1]

    def run(last: ExperimentConfig) -> tuple[Json, Learned, list[int]]:
        """From the checkpoint to the step, which is done as ``last`` says; metrics, what the loss read, and the steps
        on the way whose gradients were others than the stored ones."""
        learner.load(origin)
        drifted = []
        for one in recorded:
            learned = Learned(keeps_logprobs=True)
            own = last if one is asked else configs[one.step]
            metrics = learn(own, learner, one.groups, version=one.version, learned=learned)
            if one is not asked and _same_digests(one.gradients, learned.digests) is False:
                drifted.append(one.step)
        return metrics, learned, drifted

    learner.watch_gradients(keep=bool(overrides))
    metrics, learned, drifted = run(configs[asked.step])
    found: Json = {
        "step": asked.step,
        "from": recorded[0].step,
        "groups": len(asked.groups),
        "layout": asked.layout,
        "stored": {name: asked.metrics[name] for name in SHOWN if name in asked.metrics},
        "replayed": {name: metrics[name] for name in SHOWN if name in metrics},
        "gradients": {"stored": asked.gradients, "replayed": learned.digests},
        "same_gradients": _same_digests(asked.gradients, learned.digests),
        "same_batch": _same_arrays(stored_uses, learned, asked),
        "drifted_steps": drifted,
        "within_tolerance": all(
            math.isclose(asked.metrics[name], metrics[name], rel_tol=TOLERANCE, abs_tol=1e-7)
            for name in COMPARED
            if name in metrics and name in asked.metrics
        ),
    }
    if overrides:
        learner.hold_gradients()
        others, anew, _ = run(changed)
        found["changed"] = {
            "overrides": overrides,
            "metrics": {name: others[name] for name in SHOWN if name in others},
            "cosines": learner.gradient_cosines(),
            **_differences(learned, anew),
        }
    return found


def stored_step(connection: Connection, run: str, step: int, *, experts: bool = False) -> StoredStep:
    """A step that stands, with the groups it trained on and their scored members, as nothing else trains.

    Raises :class:`StoreError` where any of it is gone; with ``experts`` also where expert choices are.
    """
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
                failed = sa.select(trajectories.c.id).where(trajectories.c.id.in_(members), ~trajectories.c.scored)
                unscored = set(connection.execute(failed).scalars())
                # A member that is not there stays, to be missed.
                found = list(read_trajectories(connection, [name for name in members if name not in unscored]))
                groups.append(Group(ordinal, task_id, found))
                if experts and (t := next((t for t in found if any(s.experts is None for s in t.segments)), None)):
                    raise StoreError(f"sample {t.sample} of group {ordinal}: its expert choices were pruned")
    except StoreError as error:
        raise StoreError(
            f"step {step} of run {run} cannot be replayed: {error}; store.keep_arrays_steps and keep_experts_steps say "
            "for how long tokens are kept, and a kept checkpoint before the step (trainer.keep) holds on to them"
        ) from None
    gradients = {network: details[key] for network, key in DIGESTS_OF.items() if details.get(key)}
    return StoredStep(step, part, row["version"], groups, row["metrics"] or {}, gradients, details.get("layout", ""))


def _standing(connection: Connection, run: str, step: int) -> int:
    """The part whose ``step`` stands. Raises :class:`StoreError` with the steps there are."""
    chosen = sa.select(steps.c.step, steps.c.part).where(steps.c.run_id == run, steps.c.state == "done", ~lost_step())
    found = {row.step: row.part for row in connection.execute(chosen)}
    if step not in found:
        there = f"steps {min(found)} to {max(found)}" if found else "no step"
        raise StoreError(f"run {run}: the store has {there}, not step {step}")
    return int(found[step])


def _configuration(
    connection: Connection, run: str, part: int, output: Path, overrides: Sequence[str] = ()
) -> ExperimentConfig:
    """What the part was started with, and ``overrides``."""
    row = connection.execute(sa.select(parts.c.config).where(parts.c.run_id == run, parts.c.part == part)).scalar()
    if row is None:
        raise StoreError(f"run {run}: the store has no configuration of part {part}")
    with tempfile.TemporaryDirectory(prefix="mua-replay-") as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(yaml.safe_dump(row), encoding="utf-8")
        # Absolute, because what it was given relative to may not be here; no endpoint or engine is started.
        return load_config(file, [f"output={output.resolve()}", *overrides])


def _check(configs: dict[int, ExperimentConfig], changed: ExperimentConfig, step: int) -> None:
    """Raises :class:`ConfigError` where one learner cannot take all of the steps."""
    config = configs[step]
    if (config.algorithm.advantage == "gae") != (changed.algorithm.advantage == "gae"):
        raise ConfigError(
            "algorithm.advantage: a replay has the networks of the run: gae needs its critic, others none"
        )
    mine = _of_the_learner(config)
    for other, theirs in ((one, _of_the_learner(chosen)) for one, chosen in configs.items()):
        if different := [key for key in mine if mine[key] != theirs[key]]:
            raise ConfigError(
                f"step {step} cannot be replayed: there is no checkpoint between it and step {other}, which was taken "
                f"with another {different[0]}; replay step {other}, or keep more checkpoints (trainer.keep)"
            )


def _of_the_learner(config: ExperimentConfig) -> dict[str, Any]:
    found = {
        f"{section}.{key}": value
        for section in OF_THE_LEARNER
        for key, value in getattr(config, section).model_dump().items()
        if key not in _NOT_OF_THE_LEARNER.get(section, ())
    }
    found["algorithm.advantage"] = config.algorithm.advantage == "gae"
    if any(one.schedule != "constant" for one in (config.optimizer, config.critic.optimizer)):
        found["trainer.steps, on which the learning rate depends,"] = config.optimizer_steps
    return found


def _same_digests(stored: dict[str, list[str]], replayed: dict[str, list[str]]) -> bool | None:
    """Whether the gradients of every network are the stored ones; None where none are stored."""
    return all(replayed.get(network) == digests for network, digests in stored.items()) if stored else None


def _same_arrays(stored: StoredUses, learned: Learned, step: StoredStep) -> bool | None:
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
            # Stored before they were kept; kept for other settings, of a run without a reference.
            for name in (OWN_LOGPROBS, "reference_logprobs"):
                if before is not None and name not in before:
                    now.pop(name, None)
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
