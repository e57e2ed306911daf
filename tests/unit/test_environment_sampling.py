"""A sample of a split stands for the split: every kind, in proportion, always the same tasks.

Does not cover who asks for samples: evaluation within training (test_evaluation_in_training.py), `mua eval`
(test_evaluation_evaluator.py), collecting (test_evaluation_collect.py).
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Task
from mua.environment.selection import Selection, apportioned, stratified


def tasks(**sizes: int) -> list[Task]:
    """So many tasks of each ``kind_difficulty``, kind after kind."""
    return [
        Task(f"{label}/{i}", "shop", "test", dict(zip(("kind", "difficulty"), label.split("_"), strict=True)))
        for label, size in sizes.items()
        for i in range(size)
    ]


def counted(found: list[Task], *labels: str) -> Counter[str]:
    return Counter("_".join(task.data[label] for label in labels) for task in found)


def test_kinds_and_difficulties_have_their_shares() -> None:
    split = tasks(cancel_easy=60, cancel_hard=20, status_easy=18, return_hard=2)
    found = stratified(split, 20)
    assert counted(found, "kind", "difficulty") == {
        "cancel_easy": 12,
        "cancel_hard": 4,
        "status_easy": 3,
        "return_hard": 1,
    }
    assert found == [task for task in split if task in found]  # in the split's order
    assert stratified(split, None) == stratified(split, 100) == stratified(split, 1000) == split


def test_position_decides_nothing_and_tasks_without_labels_are_alike() -> None:
    split = tasks(a_easy=30, b_hard=10)
    assert {task.id for task in stratified(split[::-1], 8)} == {task.id for task in stratified(split, 8)}
    bare = [Task(str(i), "shop", "test", {}) for i in range(50)]
    assert len(stratified(bare, 10)) == 10
    assert stratified(bare, 10) != bare[:10]


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 60), min_size=1), st.integers(1, 120))
def test_shares_are_whole_and_more_places_take_none_away(sizes: dict[str, int], places: int) -> None:
    given_, more = apportioned(sizes, places), apportioned(sizes, places + 1)
    assert sum(given_.values()) == min(places, sum(sizes.values()))
    assert all(given_[name] <= min(sizes[name], more[name]) for name in sizes)
    if places >= len(sizes):
        assert min(given_.values()) >= 1
        # The larger of two kinds never has fewer places.
        assert all(given_[a] >= given_[b] for a in sizes for b in sizes if sizes[a] > sizes[b])


@pytest.mark.parametrize("split", ["validation", "test"])
def test_sixty_tasks_of_retail_are_of_every_kind_and_difficulty(split: str) -> None:
    selection = Selection.from_config(EnvironmentConfig(name="retail"))
    whole, found = selection.tasks(split), selection.sampled_tasks(split, 60)  # type: ignore[arg-type]
    assert len(found) == 60
    kinds, taken = counted(whole, "kind"), counted(found, "kind")
    assert set(taken) == set(kinds)
    for kind, size in kinds.items():
        assert abs(taken[kind] - 60 * size / len(whole)) <= 1.5, kind
    easy = counted(found, "difficulty")["easy"] / 60
    assert easy == pytest.approx(counted(whole, "difficulty")["easy"] / len(whole), abs=0.1)
