"""What runs with samplers apart have in common: quick leases, and what their store holds at the end."""

from __future__ import annotations

import sqlalchemy as sa

from mua.store.database import Store
from mua.store.tables import episodes, samplers, tasks, trajectories
from mua.store.verification import verify
from tests.e2e_support import GROUPS, SECONDS, SIZE, STEPS

QUICK = (
    "samplers.enabled=true", "samplers.lease_seconds=3", "samplers.heartbeat_seconds=0.5", "samplers.poll_seconds=0.05",
    f"samplers.start_seconds={SECONDS}",
)  # fmt: skip


def check_store(store: Store) -> None:
    """Every group taken, every episode done once, by a trajectory of its own; nothing is wrong with the store."""
    with store.read() as connection:
        states = connection.execute(sa.select(tasks.c.state, sa.func.count()).group_by(tasks.c.state)).all()
        assert [tuple(row) for row in states] == [("taken", STEPS * GROUPS)]
        rows = connection.execute(sa.select(episodes.c.state, episodes.c.trajectory_id, episodes.c.sampler)).all()
        assert {row.state for row in rows} == {"done"}
        assert len({row.trajectory_id for row in rows}) == len(rows) == STEPS * GROUPS * SIZE
        assert connection.execute(sa.select(sa.func.count()).select_from(trajectories)).scalar_one() == len(rows)
        played = {row.sampler for row in rows}
        known = set(connection.execute(sa.select(samplers.c.id)).scalars())
        assert len(played) > 1
        assert played <= known
        assert list(verify(connection)) == []
