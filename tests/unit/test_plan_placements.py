"""What `mua plan --placements` compares: the splits that fit, who is faster when something is slow, what is shown.

The comparisons are of simulations with drawn episodes, always the same ones; no time is measured. How near the
simulation itself is to real runs: docs/benchmarks/timeline.md. No GPU has confirmed any of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mua.config.load import load_config
from mua.launch.plan.placements import SimulatedPlacement, compare_placements, draw_episode, mean_episode_tokens
from mua.launch.plan.planner import Plan, make_plan
from workbench.plan_tables import placements_text

FEW = ("algorithm.groups_per_step=4", "algorithm.group_size=4")


def plan_of(*overrides: str) -> Plan:
    return make_plan(load_config(Path("configs/qwen3-8b-1x8.yaml"), [*FEW, *overrides]))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of()


@pytest.fixture(scope="module")
def compared(plan: Plan) -> list[SimulatedPlacement]:
    return compare_placements(plan, staleness=[1])


def test_every_placement_uses_all_gpus_and_no_step_is_shorter_than_what_it_consists_of(
    compared: list[SimulatedPlacement],
) -> None:
    assert {placement.name for placement in compared} == {"in turns", "at once", "separate"}
    assert [p.step_seconds for p in compared] == sorted(p.step_seconds for p in compared)
    for placement in compared:
        together = placement.trainer_gpus + placement.engine_gpus
        assert together == (8 if placement.name == "separate" else 16)
        assert placement.training_seconds < placement.step_seconds
        assert 0 < placement.efficiency <= 1.02
        assert placement.lag_max <= placement.staleness
    turns = next(placement for placement in compared if placement.name == "in turns")
    assert turns.step_seconds > turns.generation_seconds + turns.training_seconds


def test_a_trainer_at_another_utilisation_changes_the_step_as_far_as_it_is_waited_for(
    compared: list[SimulatedPlacement],
) -> None:
    turns = next(placement for placement in compared if placement.name == "in turns")
    assert turns.at(0.5) == pytest.approx(turns.step_seconds + turns.training_seconds)
    assert turns.at(1.0) == pytest.approx(turns.step_seconds)


def test_the_table_says_what_is_assumed(plan: Plan, compared: list[SimulatedPlacement]) -> None:
    shown = placements_text(plan, compared)
    for part in ("assumed", "16,384 tokens on", "25% MFU", "45% MFU", "in turns", "at once", "separate"):
        assert part in shown


def test_episodes_have_the_expected_mean_and_stay_within_their_budgets() -> None:
    file = Path("configs/qwen3-8b-1x8.yaml")
    config = load_config(file, ["cluster.episode_tokens=8000", "cluster.length_spread=0.4"])
    drawn = [draw_episode(config, ordinal, 0) for ordinal in range(400)]
    mean = sum(episode.tokens for episode in drawn) / len(drawn)
    assert mean == pytest.approx(mean_episode_tokens(config), rel=0.1)
    assert all(episode.tokens <= config.rollout.max_tokens for episode in drawn)
    assert all(turn.sampled <= config.rollout.max_turn_tokens for episode in drawn for turn in episode.turns)
    assert draw_episode(config, 3, 1) == draw_episode(config, 3, 1)
