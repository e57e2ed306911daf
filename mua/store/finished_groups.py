"""Groups that had ended when a run was left or killed, and that its next start may take as they are.

An episode counts as the run's own only if the policies that sampled it are: a version that an earlier start reached,
and that a later one did not begin from, was made again by other steps, and is another policy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mua.store.tables import parts, trajectories
from mua.store.trajectories import EpisodeKey, read_trajectories
from mua.types import Group, Json


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """Of one group of training the last try of each of its episodes, all of them scored and whole."""

    ordinal: int
    domain: str
    task_id: str
    members: tuple[EpisodeKey, ...]
    """By sample, from 0."""
    oldest: int | None
    """The oldest version that sampled a token of it; None: it has no sampled token."""

    def read(self, connection: Connection) -> Group:
        """Raises as :func:`mua.store.trajectories.read_trajectories`."""
        names = [member.trajectory_id for member in self.members]
        return Group(self.ordinal, self.task_id, list(read_trajectories(connection, names)))


def finished_groups(connection: Connection, run: str, part: int, *, first: int, size: int) -> Iterator[FinishedGroup]:
    """Groups of ``size`` episodes that earlier starts than ``part`` have rolled out by policies which are still the
    run's, from the ordinal ``first`` on. Of an episode that was played several times the last one counts.
    """
    known = _versions_that_stand(connection, run, part)
    c = trajectories.c
    columns = [c[name] for name in ("run_id", "part", "round", "ordinal", "sample", "attempt")]
    columns += [c.domain, c.task_id, c.scored, c.pruned, c.version_low, c.version_high]
    chosen = sa.select(*columns).where(c.run_id == run, c.round == 0, c.part < part, c.ordinal >= first)
    groups: dict[int, dict[int, Any]] = defaultdict(dict)
    for row in connection.execute(chosen.order_by(c.ordinal, c.sample, c.part, c.attempt)).mappings():
        groups[row["ordinal"]][row["sample"]] = row
    for ordinal, found in groups.items():
        rows = [found[sample] for sample in sorted(found)]
        if sorted(found) == list(range(size)) and all(_usable(row, rows[0], known) for row in rows):
            oldest = min((row["version_low"] for row in rows if row["version_low"] is not None), default=None)
            keys = tuple(EpisodeKey.of(row) for row in rows)
            yield FinishedGroup(ordinal, rows[0]["domain"], rows[0]["task_id"], keys, oldest)


def configurations(connection: Connection, run: str, numbers: Sequence[int]) -> dict[int, Json]:
    """What starts of a run were given, masked; empty where that is not known."""
    chosen = sa.select(parts.c.part, parts.c.config).where(parts.c.run_id == run, parts.c.part.in_(numbers))
    return {row.part: row.config or {} for row in connection.execute(chosen)}


def _versions_that_stand(connection: Connection, run: str, part: int) -> dict[int, int]:
    """Of each part before ``part`` the newest version that it and all later ones have in common."""
    chosen = sa.select(parts.c.part, parts.c.from_step).where(parts.c.run_id == run, parts.c.part <= part)
    first = {row.part: int(row.from_step) for row in connection.execute(chosen)}
    return {one: min(step for other, step in first.items() if other > one) for one in first if one < part}


def _usable(row: Mapping[str, Any], beside: Mapping[str, Any], known: Mapping[int, int]) -> bool:
    if not row["scored"] or row["pruned"] is not None or row["part"] not in known:
        return False
    if (row["domain"], row["task_id"]) != (beside["domain"], beside["task_id"]):
        return False
    return row["version_high"] is None or row["version_high"] <= known[row["part"]]
