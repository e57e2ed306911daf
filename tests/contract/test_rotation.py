"""CI's choice of slow tests: all run within three landings, what a change concerns runs at once, the budget holds."""

from __future__ import annotations

import pytest

from tests.rotation import BUDGET, THIRDS, choose, current, rooms_of, slow_files


def test_every_slow_file_runs_within_three_landings() -> None:
    for first in range(5):
        runs = [choose(slow_files(), landing, [], {}).taken for landing in range(first, first + THIRDS)]
        assert {file for taken in runs for file in taken} == set(slow_files())


@pytest.mark.parametrize("landing", range(THIRDS))
def test_a_file_whose_room_changed_runs_while_the_budget_holds(landing: int) -> None:
    file = "tests/e2e/test_samplers.py"
    assert "mua.rollout" in rooms_of(file)
    changed = ["mua/rollout/service.py"]
    cheap = choose(slow_files(), landing, changed, dict.fromkeys(slow_files(), 0.0))
    assert file in cheap.taken
    dear = choose(slow_files(), landing, changed, dict.fromkeys(slow_files(), BUDGET))
    third = choose(slow_files(), landing, [], {}).taken
    assert dear.taken == third or len(third) == 0
    assert set(dear.taken) | set(dear.left) == set(slow_files())


def test_this_commits_choice_is_known_and_says_what_it_leaves_out() -> None:
    rotation = current()
    assert set(rotation.taken).isdisjoint(rotation.left)
    assert set(rotation.taken) | set(rotation.left) == set(slow_files())
