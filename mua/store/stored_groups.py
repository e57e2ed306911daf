"""Which groups and episodes of a store can be trained on again, and which a later start of a run may take as they are.

An episode counts as the run's own only if the policies that sampled it are: a version that an earlier start reached,
and that a later one did not begin from, was made again by other steps, and is another policy.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.config.schema import RolloutConfig
from mua.config.storage import StoredDemonstrations, StoredSource
from mua.store.queries import TrajectoryFilter, single_run
from mua.store.tables import parts, runs, tasks, trajectories
from mua.store.trajectories import EpisodeKey, read_trajectories
from mua.types import Group, Json, Trajectory
from mua.utils.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A group of training whose episodes are all there, with their tokens: of each the last try."""

    ordinal: int
    domain: str
    task_id: str
    members: tuple[EpisodeKey, ...]
    """By sample."""
    oldest: int | None
    """The oldest version that sampled a token of it; None: it has no sampled token."""
    newest: int | None

    @classmethod
    def of(cls, members: Mapping[int, Mapping[str, Any]]) -> Self:
        """From the rows of its trajectories, by sample."""
        rows = [members[sample] for sample in sorted(members)]
        oldest = min((row["version_low"] for row in rows if row["version_low"] is not None), default=None)
        newest = max((row["version_high"] for row in rows if row["version_high"] is not None), default=None)
        keys = tuple(EpisodeKey.of(row) for row in rows)
        return cls(keys[0].ordinal, rows[0]["domain"], rows[0]["task_id"], keys, oldest, newest)

    def read(self, connection: Connection) -> Group:
        """Raises as :func:`mua.store.trajectories.read_trajectories`."""
        names = [member.trajectory_id for member in self.members]
        return Group(self.ordinal, self.task_id, list(read_trajectories(connection, names)))


def _last_tries(connection: Connection, *conditions: sa.ColumnElement[bool]) -> dict[int, dict[int, Any]]:
    """By ordinal and sample, the rows of the last tries of a run's episodes of training, without blobs."""
    c = trajectories.c
    columns = [c[name] for name in ("run_id", "part", "round", "ordinal", "sample", "attempt")]
    columns += [c.domain, c.task_id, c.scored, c.pruned, c.version_low, c.version_high, c.ended_at, c.sampling]
    chosen = sa.select(*columns).where(c.round == 0, *conditions).order_by(c.ordinal, c.sample, c.part, c.attempt)
    groups: dict[int, dict[int, Any]] = defaultdict(dict)
    for row in connection.execute(chosen).mappings():
        groups[row["ordinal"]][row["sample"]] = row
    return groups


def stored_groups(
    connection: Connection, source: StoredSource, *, rollout: RolloutConfig, until: float | None = None
) -> tuple[list[StoredGroup], float]:
    """The groups of ``source`` in the order of its task stream, and the moment at which the last of them ended.

    Of an episode that was played again after a resume the last one counts. Groups that were cancelled, are not
    complete, lost tokens to pruning, or hold an episode that the source's conditions exclude are left out, and how many
    is logged: what is left of them would be no fair sample.

    Args:
        connection: of :meth:`mua.store.database.Store.read`.
        source: which.
        rollout: of this run; what was sampled from a distribution that it does not train cannot be trained on.
        until: leave out what ended later: a run that continues takes what it began with.

    Raises:
        ConfigError: another temperature, or a truncation or penalty without ``rollout.allow_truncated_sampling``.
    """
    run = single_run(connection, source.run)
    ended_by = [] if until is None else [trajectories.c.ended_at <= until]
    groups = _last_tries(connection, trajectories.c.run_id == run, *ended_by)
    known = connection.execute(
        sa.select(tasks.c.ordinal, tasks.c.size, tasks.c.state).where(tasks.c.run_id == run, tasks.c.round == 0)
    )
    of_task = {ordinal: (size, state) for ordinal, size, state in known}
    found, last = [], 0.0
    for ordinal, members in groups.items():
        size, state = of_task.get(ordinal, (len(members), "complete"))
        if len(members) != size or state not in ("complete", "taken"):
            continue
        if all(
            row["pruned"] != "arrays"
            and (not source.domains or row["domain"] in source.domains)
            and (row["version_low"] is None or row["version_low"] >= source.min_version)
            for row in members.values()
        ):
            found.append(StoredGroup.of(members))
            last = max(last, *(row["ended_at"] for row in members.values()))
    for group in found:
        for row in groups[group.ordinal].values():
            _check_distribution(EpisodeKey.of(row).trajectory_id, row["sampling"] or {}, rollout)
    if left := len(groups) - len(found):
        log.warning(
            "store %s: %d of %d groups are left out (incomplete, pruned, or not asked for)", run, left, len(groups)
        )
    return found, last


def demonstrations(connection: Connection, source: StoredDemonstrations) -> Iterator[tuple[str, Trajectory]]:
    """The episodes of ``source`` to imitate with their ids, in the order of the task stream; none that was pruned."""
    run = single_run(connection, source.run)
    c = trajectories.c
    condition = TrajectoryFilter(
        run=run, scored=True, kept=True, success=True if source.success else None, min_reward=source.min_reward
    ).condition()
    if not source.evaluations:
        condition &= c.round == 0
    if source.domains:
        condition &= c.domain.in_(source.domains)
    if source.min_version:
        condition &= c.version_low >= source.min_version
    order = (c.round, c.ordinal, c.sample, c.part, c.attempt)
    chosen = sa.select(c.id, c.domain, c.task_id, c.round, c.ordinal, c.sample).where(condition).order_by(*order)
    last = {(row.round, row.ordinal, row.sample): row for row in connection.execute(chosen)}
    seen: dict[tuple[str, str], int] = defaultdict(int)
    ids = []
    for row in last.values():
        seen[row.domain, row.task_id] += 1
        if source.max_per_task is None or seen[row.domain, row.task_id] <= source.max_per_task:
            ids.append(row.id)
    yield from zip(ids, read_trajectories(connection, ids), strict=True)


def recorded_run(connection: Connection, source: StoredSource) -> Json:
    """``id``, ``config`` and ``provenance`` of the run of ``source``; the last two empty where none was recorded."""
    run = single_run(connection, source.run)
    row = connection.execute(sa.select(runs.c.config, runs.c.provenance).where(runs.c.id == run)).one()
    return {"id": run, "config": row.config or {}, "provenance": row.provenance or {}}


def _check_distribution(name: str, known: Json, rollout: RolloutConfig) -> None:
    """Raises :class:`ConfigError` for what was sampled from a distribution that ``rollout`` does not train."""
    sampled = known.get("temperature", rollout.temperature)
    if sampled != rollout.temperature:
        raise ConfigError(
            f"rollout.temperature: {rollout.temperature:g}, and trajectory {name} was sampled at {sampled:g}: its "
            "log-probabilities are of another distribution; set rollout.temperature to that"
        )
    others = {key: value for key, value in known.items() if key not in ("temperature", "logprobs_of")}
    if others and not rollout.allow_truncated_sampling:
        shown = ", ".join(f"{key} {value:g}" for key, value in others.items())
        raise ConfigError(
            f"rollout.allow_truncated_sampling: trajectory {name} was sampled with {shown}, which the trainer "
            "does not reproduce; leave such runs out, or set it to true to train on them all the same"
        )


def finished_groups(connection: Connection, run: str, part: int, *, first: int, size: int) -> Iterator[StoredGroup]:
    """Groups of ``size`` episodes, all scored and whole, that earlier starts than ``part`` have rolled out by policies
    which are still the run's, from the ordinal ``first`` on."""
    chosen = sa.select(parts.c.part, parts.c.from_step).where(parts.c.run_id == run, parts.c.part <= part)
    begins = {row.part: int(row.from_step) for row in connection.execute(chosen)}
    # Of each earlier part the newest version that it and all later ones have in common.
    standing = {one: min(step for other, step in begins.items() if other > one) for one in begins if one < part}
    c = trajectories.c
    for members in _last_tries(connection, c.run_id == run, c.part < part, c.ordinal >= first).values():
        usable = all(
            row["scored"]
            and row["pruned"] is None
            and row["part"] in standing
            and (row["version_high"] is None or row["version_high"] <= standing[row["part"]])
            for row in members.values()
        )
        tasks_of = {(row["domain"], row["task_id"]) for row in members.values()}
        if usable and sorted(members) == list(range(size)) and len(tasks_of) == 1:
            yield StoredGroup.of(members)


def configurations(connection: Connection, run: str, numbers: Sequence[int]) -> dict[int, Json]:
    """What starts of a run were given, masked; empty where that is not known."""
    chosen = sa.select(parts.c.part, parts.c.config).where(parts.c.run_id == run, parts.c.part.in_(numbers))
    return {row.part: row.config or {} for row in connection.execute(chosen)}
