"""Which groups of earlier starts a run that continues may take: whole, scored, and sampled by policies that stand.

The store is real, what is in it is made up. That such a run ends as an uninterrupted one, bit for bit, is shown in
tests/e2e/test_resume.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from mua.rollout.runner import StepDemand
from mua.store.database import Store
from mua.store.recorder import Recorder
from mua.store.starts import begin_part
from mua.store.stored_groups import finished_groups
from mua.store.tables import tasks
from mua.store.trajectories import EpisodeKey, trajectory_inserts
from mua.store.verification import verify
from mua.store.writer import Write, Writer
from mua.types import Group, Outcome
from tests.store_support import played


def test_groups_of_policies_that_stand_are_found_and_taken(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:

        def begin(step: int) -> tuple[str, int]:
            return begin_part(store, tmp_path, "test", {}, {}, from_step=step, seconds=5)[:2]

        def ended(part: int, ordinal: int, version: int, samples: int = 2, attempt: int = 1, **changed: Any) -> None:
            made: list[Write] = []
            for sample in range(samples):
                key = EpisodeKey(run, part, 0, ordinal, sample, attempt)
                one = replace(played(ordinal, sample, version, success=True), task_id=f"task {ordinal}", **changed)
                made += trajectory_inserts(key, one, ended_at=1.0)
            writer.put(made)

        def found(part: int, first: int = 0) -> dict[int, int | None]:
            writer.flush(30)
            with store.read() as connection:
                return {g.ordinal: g.oldest for g in finished_groups(connection, run, part, first=first, size=2)}

        with Writer(store, every_seconds=0.01) as writer:
            run, _ = begin(0)
            ended(1, 0, 0)
            ended(1, 1, 1)
            ended(1, 2, 2)
            ended(1, 3, 2)
            begin(2)
            assert found(2) == {0: 0, 1: 1, 2: 2, 3: 2}
            assert found(2, first=2) == {2: 2, 3: 2}
            ended(2, 4, 3)
            ended(2, 5, 2, samples=1)  # one of its two
            ended(2, 6, 2, outcome=Outcome.ENGINE_ERROR)  # not scored
            ended(2, 3, 3)  # played again, later
            begin(1)  # versions 2 and 3 are made again by other steps
            assert found(3) == {0: 0, 1: 1}
            ended(3, 7, 2)
            begin(2)
            assert found(4, first=1) == {1: 1, 7: 2}
            with store.read() as connection:
                taken = list(finished_groups(connection, run, 4, first=7, size=2))
                group = taken[0].read(connection)
            assert isinstance(group, Group)
            recorder = Recorder(writer, run, 4)
            recorder.took_over(group, "train", taken[0].members, 2, {"kind": "refund"})
            assert [recorder.key(7, sample).part for sample in range(2)] == [3, 3]
            recorder.episode(7, 0, {}, evaluation=False)  # it was cancelled, and begins again
            assert [recorder.key(7, sample).part for sample in range(2)] == [4, 3]
            writer.flush(30)
        with store.read() as connection:
            assert not list(verify(connection))
            details = connection.execute(sa.select(tasks.c.details).where(tasks.c.ordinal == 7)).scalar_one()
            assert details == {"kind": "refund"}


@pytest.mark.parametrize(
    ("demand", "place", "oldest"),
    [
        (StepDemand(groups=3, steps=9), 2, 5),
        (StepDemand(groups=3, steps=9, staleness=1), 2, 4),  # the step takes it that comes next
        (StepDemand(groups=3, steps=9, staleness=1), 3, 5),  # and the one after that
        (StepDemand(groups=3, steps=9, staleness=2, extra=1), 0, 5),  # nobody knows which
    ],
)
def test_how_old_a_group_may_be(demand: StepDemand, place: int, oldest: int) -> None:
    assert demand.oldest(place, 5) == oldest
