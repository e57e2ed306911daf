"""What of a run's blobs is dropped, by the rules ``store.keep_*``. Rows of what happened, messages and texts stay.

Never dropped is what a run may still need: the tokens of groups that no step has taken yet, and whatever a step from
``protect`` on trained on, because a checkpoint before it is kept, from which that step can be made again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.config.storage import StoreConfig
from mua.store.faults import StoreError
from mua.store.tables import runs, segments, steps, tasks, trajectories, uses
from mua.store.writer import Call
from mua.utils.run_identity import known_run

_MANY = 200


@dataclass(frozen=True, slots=True)
class Dropped:
    """What one pruning drops, or would."""

    experts: list[str]
    """Trajectories whose expert choices go."""
    arrays: list[str]
    """Trajectories whose tokens go, with their expert choices."""
    uses: int
    """Rows of ``uses`` whose arrays go."""

    def __bool__(self) -> bool:
        return bool(self.experts or self.arrays or self.uses)

    def as_json(self) -> dict[str, int]:
        return {"experts": len(self.experts), "arrays": len(self.arrays), "uses": self.uses}


def checkpoint_steps(output: Path) -> list[int]:
    """The steps after which the checkpoints in a run's output folder were made, the first step they lead to."""
    found = (re.fullmatch(r"step_(\d+)", folder.name) for folder in (output / "checkpoints").glob("step_*"))
    return sorted(int(match.group(1)) for match in found if match)


def oldest_checkpoint(connection: Connection, run: str, folder: Path | None) -> int | None:
    """The step from which a run may still go on: what it and later ones trained on is protected. None: the run made no
    steps, so that it has no checkpoints.

    ``folder`` is the output folder that a person named. None: it is where the store says, if that run is still there.
    Raises :class:`StoreError` where no checkpoint is found: it may be elsewhere, and needs what would be dropped.
    """
    if connection.execute(sa.select(steps.c.step).where(steps.c.run_id == run).limit(1)).scalar() is None:
        return None
    where = folder
    if where is None:
        recorded = Path(connection.execute(sa.select(runs.c.output).where(runs.c.id == run)).scalar_one())
        where = recorded if known_run(recorded) == run else None
    if where is not None and (found := checkpoint_steps(where)):
        return found[0]
    lacks = "its output folder is not where the store says" if where is None else f"{where} has no checkpoint"
    raise StoreError(
        f"run {run}: {lacks}; name the folder with --output, or add --no-checkpoints where all are gone: nothing is "
        "then kept for them"
    )


def pruning(run: str, rules: StoreConfig, output: Path) -> list[Call]:
    """For the writer of a run that has just saved a checkpoint into ``output``: what its rules drop now; nothing where
    they keep everything, or where the checkpoint is not there. They are looked at when this is called."""
    if rules.keep_arrays_steps is None and rules.keep_experts_steps is None and rules.keep_failed_attempts:
        return []
    found = checkpoint_steps(output)
    return [Call(lambda connection: prune(connection, run, rules, protect=found[0]))] if found else []


def prune(
    connection: Connection, run: str, rules: StoreConfig, *, protect: int | None = None, dry: bool = False
) -> Dropped:
    """Drop what ``rules`` do not keep of a run's blobs, within the caller's transaction.

    Args:
        connection: of :meth:`mua.store.database.Store.begin`, or of ``read`` where ``dry``.
        run: its id.
        rules: only ``keep_*`` are read; None keeps all.
        protect: the step after the oldest checkpoint kept (its number): what it and later steps trained on stays. None:
            nothing is.
        dry: only say what would be dropped.
    """
    # Of a run without steps of its own (imported, or only rolled out): the last that took a group, or the newest
    # policy.
    columns = (steps.c.step, tasks.c.taken_step, trajectories.c.version_high)
    last = (sa.select(sa.func.max(one)).where(one.table.c.run_id == run) for one in columns)
    found = (connection.execute(chosen).scalar() for chosen in last)
    newest = next((int(step) for step in found if step is not None), None)
    if newest is None:
        return Dropped([], [], 0)

    def before(kept_steps: int | None) -> int:
        """Steps below this lose their blobs."""
        if kept_steps is None:
            return -1
        return min(newest + 1 - kept_steps, newest + 1 if protect is None else protect)

    arrays_before = before(rules.keep_arrays_steps)
    experts_before = max(before(rules.keep_experts_steps), arrays_before)
    c = trajectories.c
    group = (tasks.c.run_id == c.run_id) & (tasks.c.round == c.round) & (tasks.c.ordinal == c.ordinal)
    # The last step that a trajectory was trained on, or was taken for, or the policy's that played it.
    trained = sa.select(sa.func.max(uses.c.step)).where(uses.c.trajectory_id == c.id).scalar_subquery()
    taken = sa.select(tasks.c.taken_step).where(group).scalar_subquery()
    step = sa.func.coalesce(trained, taken, c.version_high, 0)
    # Not of a group that a step may still take.
    waiting = sa.select(tasks.c.ordinal).where(group, tasks.c.state.in_(("open", "complete")), c.round == 0)
    old = (c.run_id == run) & ~waiting.exists()
    goes = old & (step < arrays_before) & ~c.pruned.is_not_distinct_from("arrays")
    if rules.keep_successes:
        goes &= ~(c.success & (c.round == 0))
    if not rules.keep_failed_attempts:
        goes |= old & ~c.scored & ~c.pruned.is_not_distinct_from("arrays")
    has_experts = sa.select(segments.c.number).where(segments.c.trajectory_id == c.id, segments.c.experts.is_not(None))
    loses_experts = old & (step < experts_before) & has_experts.exists() & ~goes
    used = (uses.c.run_id == run) & (uses.c.step < arrays_before) & uses.c.arrays.is_not(None)
    dropped = Dropped(
        list(connection.execute(sa.select(c.id).where(loses_experts).order_by(c.id)).scalars()),
        list(connection.execute(sa.select(c.id).where(goes).order_by(c.id)).scalars()),
        connection.execute(sa.select(sa.func.count()).select_from(uses).where(used)).scalar_one(),
    )
    if not dry:
        _drop(connection, dropped.experts, "experts", {"experts": None})
        _drop(connection, dropped.arrays, "arrays", {"experts": None, "arrays": None})
        connection.execute(sa.update(uses).where(used).values(arrays=None))
    return dropped


def _drop(connection: Connection, ids: list[str], state: str, blobs: dict[str, None]) -> None:
    for at in range(0, len(ids), _MANY):
        some = ids[at : at + _MANY]
        connection.execute(sa.update(segments).where(segments.c.trajectory_id.in_(some)).values(blobs))
        connection.execute(sa.update(trajectories).where(trajectories.c.id.in_(some)).values(pruned=state))
