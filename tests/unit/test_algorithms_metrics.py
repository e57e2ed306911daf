"""Rollout metrics on groups small enough to count by hand.

Does not cover where the metrics are written.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mua.algorithms.rollout_metrics import diversity, rollout_metrics
from mua.observe.catalog import unknown
from mua.types import Group, Outcome, Provenance, Segment, Trajectory
from tests.segments import segment_of

S, U, T, M, A = (Provenance.SYSTEM, Provenance.USER, Provenance.TOOL, Provenance.TEMPLATE, Provenance.SAMPLED)


def segment(provenance: list[Provenance], version: int = 5) -> Segment:
    kinds = np.array(provenance, dtype=np.uint8)
    n = len(kinds)
    versions = np.where(kinds == A, version, -1).astype(np.int32)
    return Segment(np.zeros(n, np.int32), kinds, np.zeros(n, np.float32), versions, np.zeros(n, np.int32))


def trajectory(reward: float, outcome: Outcome = Outcome.USER_STOP, **kw) -> Trajectory:
    segments = kw.pop("segments", [segment([S, U, A, A])])
    turns = kw.pop("turns", 1)
    return Trajectory("t", 0, 0, segments, [0.0] * (turns - 1) + [reward], reward, reward == 1.0, outcome, **kw)


def example() -> list[Group]:
    mixed = Group(
        0,
        "a",
        [
            trajectory(1.0, turns=3, metrics={"tool_calls/find": 2.0, "tool_errors/find": 1.0, "other": 9.0}),
            trajectory(0.0, Outcome.MAX_TURNS, segments=[segment([S, A], 3), segment([M, A, T, A], 5)]),
            trajectory(77.0, Outcome.TIMEOUT, turns=50, attempts=4, metrics={"tool_calls/find": 100.0}),
        ],
    )
    solved = Group(1, "b", [trajectory(1.0), trajectory(1.0, Outcome.TERMINAL_TOOL)])
    lost = Group(2, "c", [trajectory(0.0, Outcome.ENGINE_ERROR), trajectory(0.0, Outcome.ENGINE_ERROR)])
    return [mixed, solved, lost]


def test_metrics_of_an_example_counted_by_hand():
    metrics = rollout_metrics(example(), version=6)
    assert unknown(metrics) == []
    root_half = 1 / (math.sqrt(0.5) + 1e-6)
    expected = {
        "rollout/reward/mean": 0.75,
        "rollout/reward/std": math.sqrt(3) / 4,
        "rollout/reward/min": 0.0,
        "rollout/reward/max": 1.0,
        "rollout/success": 0.75,
        "rollout/outcome/user_stop": 2 / 7,
        "rollout/outcome/terminal_tool": 1 / 7,
        "rollout/outcome/max_turns": 1 / 7,
        "rollout/outcome/length": 0.0,
        "rollout/outcome/malformed": 0.0,
        "rollout/outcome/agent_end": 0.0,
        "rollout/outcome/repetition": 0.0,
        "rollout/outcome/user_error": 0.0,
        "rollout/outcome/environment_error": 0.0,
        "rollout/outcome/judge_error": 0.0,
        "rollout/outcome/engine_error": 2 / 7,
        "rollout/outcome/timeout": 1 / 7,
        "rollout/trajectories/count": 7.0,
        "rollout/trajectories/unscored": 3 / 7,
        "rollout/attempts/mean": 10 / 7,
        "rollout/attempts/max": 4.0,
        "rollout/turns/mean": 1.5,
        "rollout/turns/max": 3.0,
        "rollout/turns/cut_by_time": 0.0,
        "rollout/tokens/system": 1.0,
        "rollout/tokens/user": 0.75,
        "rollout/tokens/tool": 0.25,
        "rollout/tokens/template": 0.25,
        "rollout/response_len/mean": 9 / 4,
        "rollout/tokens/segment_max": 4.0,
        "rollout/segments/mean": 1.25,
        "rollout/segments/max": 2.0,
        "env/tool_calls/find": 0.5,
        "env/tool_errors/find": 0.25,
        "env/tool_used/find": 0.25,
        "rollout/diversity/unique_turns": 2 / 5,
        "rollout/diversity/unique_episodes": 2 / 4,
        "rollout/reward/length_correlation": -1.0,
        "rollout/groups/count": 2.0,
        "rollout/groups/zero_std": 0.5,
        "rollout/groups/solve_all": 0.5,
        "rollout/groups/solve_none": 0.0,
        "rollout/advantage/abs_mean": 0.25 * root_half,
        "rollout/off_policy_level/mean": (8 * 1 + 1 * 3) / 9,
        "rollout/off_policy_level/max": 3.0,
    }
    assert metrics.keys() == expected.keys()
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_diversity_counts_what_is_sampled_within_a_turn() -> None:
    def says(*turns: list[int]) -> Trajectory:
        ids = [i for said in turns for i in [9, *said]]
        numbers = [turn for turn, said in enumerate(turns) for _ in [9, *said]]
        sampled = np.array([kind for said in turns for kind in [U, *[A] * len(said)]], np.uint8)
        zeros = np.zeros(len(ids), np.float32)
        part = Segment(np.array(ids, np.int32), sampled, zeros, zeros.astype(np.int32), np.array(numbers, np.int32))
        return trajectory(1.0, segments=[part])

    # Grams: 1234 2345 | 1234 2345, 1235 | none: of five, three differ. Nothing crosses a turn or what others say.
    three = [says([1, 2, 3, 4, 5]), says([1, 2, 3, 4, 5], [1, 2, 3, 5]), says([1, 2], [3, 4])]
    found = diversity(three)
    assert found == {
        "rollout/diversity/distinct_4grams": 3 / 5,
        "rollout/diversity/unique_turns": 4 / 5,
        "rollout/diversity/unique_episodes": 1.0,
    }
    assert diversity([says([1, 2], [3, 4]), says([1, 2, 3, 4])])["rollout/diversity/unique_episodes"] == 1.0
    assert diversity([says([1, 2]), says([1, 2])]) == {
        "rollout/diversity/unique_turns": 0.5, "rollout/diversity/unique_episodes": 0.5
    }  # fmt: skip
    assert diversity([]) == diversity([says([])]) == {}


def test_nothing_scored_reports_outcomes_and_no_rewards():
    metrics = rollout_metrics([Group(0, "a", [trajectory(0.0, Outcome.TIMEOUT)])])
    assert metrics["rollout/trajectories/unscored"] == 1.0
    assert "rollout/reward/mean" not in metrics
    assert "rollout/groups/zero_std" not in metrics


def test_several_domains_are_told_apart_and_one_alone_is_not() -> None:
    def of(domain: str, reward: float, outcome: Outcome = Outcome.USER_STOP) -> Trajectory:
        segments = [segment_of([True])]
        return Trajectory("t", 0, 0, segments, [reward], reward, reward > 0.5, outcome, domain=domain)

    one = Group(0, "a", [of("retail", 1.0), of("retail", 0.0)])
    other = Group(1, "b", [of("gyms/turtle", 0.25), of("gyms/turtle", 9.0, Outcome.JUDGE_ERROR)])
    lost = Group(2, "c", [of("telecom", 0.0, Outcome.USER_ERROR)])
    found = rollout_metrics([one, other, lost])
    assert unknown(found) == []
    assert found["rollout/domain/retail/reward/mean"] == 0.5
    assert found["rollout/domain/gyms/turtle/reward/mean"] == 0.25
    assert [found[f"rollout/domain/{n}/unscored"] for n in ("retail", "gyms/turtle", "telecom")] == [0.0, 0.5, 1.0]
    assert [found[f"rollout/domain/{n}/share"] for n in ("retail", "gyms/turtle", "telecom")] == [0.4, 0.4, 0.2]
    assert [found[f"rollout/domain/{n}/zero_std"] for n in ("retail", "gyms/turtle")] == [0.0, 1.0]
    assert found["rollout/domain/retail/turns"] == 1.0
    assert not any(name.startswith("rollout/domain/telecom/reward") for name in found)
    assert not any(name.startswith("rollout/domain/") for name in rollout_metrics([one]))
