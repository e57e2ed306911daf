"""Which steps `mua replay` takes out of a store, and which it refuses, in one line each.

The store is real, its run is written by hand. Not covered: replays themselves (tests/e2e/test_replay.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from mua.store.database import Store
from mua.store.faults import StoreError
from mua.store.tables import segments, steps, trajectories
from mua.store.trajectories import EpisodeKey
from mua.trainer.observers import Learned
from mua.trainer.replay import _check, _same_arrays, replay, stored_step
from mua.types import Json, TrainBatch, TrainSequence
from mua.utils.errors import ConfigError
from tests.rollout_fixtures import experiment
from tests.store_support import write_run

NAMES = [EpisodeKey("r", 1, 0, 0, sample).trajectory_id for sample in (0, 1)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A run whose step 0 trained on a group of two, and had another that was of no use."""
    with Store.open(tmp_path / "store.db") as opened:
        write_run(opened, steps_done=1)
        groups = [[0, "task 0", NAMES, True], [1, "task 1", ["gone"], False]]
        details = {"groups": groups, "layout": "tp1", "gradients": ["a"], "critic_gradients": ["b"]}
        with opened.begin() as connection:
            connection.execute(sa.update(steps).values(details=details))
        yield opened


def changed(store: Store, statement: sa.Update) -> None:
    with store.begin() as connection:
        assert connection.execute(statement).rowcount == 1


def test_a_step_is_its_useful_groups_and_their_scored_members(store: Store) -> None:
    c = trajectories.c
    with store.read() as connection:
        whole = stored_step(connection, "r", 0, experts=True)
    assert [(g.ordinal, [t.sample for t in g.trajectories]) for g in whole.groups] == [(0, [0, 1])]
    assert whole.gradients == {"policy": ["a"], "critic": ["b"]}
    failed = {"scored": False, "pruned": "arrays", "messages": None}  # store.keep_failed_attempts: false
    changed(store, sa.update(trajectories).where(c.id == NAMES[0]).values(failed))
    with store.read() as connection:
        (group,) = stored_step(connection, "r", 0).groups
    assert [t.sample for t in group.trajectories] == [1]


def test_what_is_gone_is_said(store: Store) -> None:
    of_second = segments.c.trajectory_id == NAMES[1]
    changed(store, sa.update(segments).where(of_second).values(experts=None))
    with store.read() as connection:
        assert stored_step(connection, "r", 0).groups
        with pytest.raises(StoreError, match="step 0 of run r cannot be replayed: sample 1 of group 0: its expert"):
            stored_step(connection, "r", 0, experts=True)
        with pytest.raises(StoreError, match="the store has steps 0 to 0, not step 3"):
            stored_step(connection, "r", 3)
    changed(store, sa.update(segments).where(of_second).values(arrays=None))
    with store.read() as connection, pytest.raises(StoreError, match=r"were pruned; store\.keep_arrays_steps"):
        stored_step(connection, "r", 0)
    with store.begin() as connection:
        connection.execute(sa.update(steps).values(details=None))
    with store.read() as connection, pytest.raises(StoreError, match="does not say which groups it took"):
        stored_step(connection, "r", 0)


def test_what_would_be_another_batch_or_is_no_run_is_refused(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match=r"seed=3: mua replay can set algorithm\.\* and critic\.value_clip alone"):
        replay(tmp_path, 0, ["seed=3"])
    with pytest.raises(ConfigError, match="not the output folder of a run with a store"):
        replay(tmp_path, 0, store=str(tmp_path / "store.db"))


@pytest.mark.parametrize(
    ("earlier", "fault"),
    [
        ({"megatron": {"tensor_parallel": 2}}, r"another megatron\.tensor_parallel; replay step 1, or keep more"),
        ({"rollout": {"temperature": 0.5}}, r"rollout\.temperature"),
        ({"optimizer": {"learning_rate": 0.5}}, r"optimizer\.learning_rate"),
        ({"algorithm": {"advantage": "gae"}}, r"algorithm\.advantage"),
        ({"trainer": {"steps": 9}, "algorithm": {"clip_high": 0.5}, "rollout": {"max_turns": 2}}, None),
    ],
)
def test_steps_between_checkpoint_and_step_have_its_learner(earlier: dict[str, Json], fault: str | None) -> None:
    asked = experiment()
    if fault is None:
        _check({1: experiment(**earlier), 2: asked}, asked, 2)
        return
    with pytest.raises(ConfigError, match=fault):
        _check({1: experiment(**earlier), 2: asked}, asked, 2)


def test_more_steps_are_another_schedule_where_it_decays() -> None:
    decaying: Json = {"schedule": "cosine"}
    asked = experiment(optimizer=decaying)
    with pytest.raises(ConfigError, match="learning rate"):
        _check({1: experiment(optimizer=decaying, trainer={"steps": 9}), 2: asked}, asked, 2)


def test_a_reference_for_other_settings_makes_no_other_batch(store: Store) -> None:
    with store.read() as connection:
        step = stored_step(connection, "r", 0)
    segment = step.groups[0].trajectories[1].segments[0]
    mask, weights = segment.loss_mask, segment.loss_mask.astype(np.float32) / 8
    sequence = TrainSequence(
        ids=segment.ids, weights=weights, advantages=weights * 2,
        behavior_logprobs=segment.logprobs, old_logprobs=segment.logprobs + 1, origin=(0, 1, 0),
    )  # fmt: skip
    old = np.where(mask, segment.logprobs + 1, 0).astype(np.float32)
    arrays = {"weights": weights, "advantages": weights * 2, "old_logprobs": old}
    learned, uses = Learned(), {(NAMES[1], 0): arrays}
    for reference, stored, same in (
        (None, arrays, True),
        (segment.logprobs, arrays, True),
        (None, arrays | {"reference_logprobs": segment.logprobs}, False),
        (None, arrays | {"weights": weights * 2}, False),
    ):
        learned.batches = [TrainBatch([replace(sequence, reference_logprobs=reference)], 1.0, {})]
        uses[NAMES[1], 0] = stored
        assert _same_arrays(uses, learned, step) is same
