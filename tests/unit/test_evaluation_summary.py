"""The numbers of a report from trajectories made by hand, and the page they stand on.

The estimators are covered by test_evaluation_estimators.py. Not covered: how the pictures look.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mua.config.schema import EvaluationConfig
from mua.environment.protocol import Task
from mua.trainer.evaluation.report import TaskResult, console_table, draw, markdown, markdown_table, summarize
from mua.types import Json, Outcome, Provenance, Segment, Trajectory

CONFIG = EvaluationConfig(samples=3, resamples=100)


def played(success: bool, *rewards: float, outcome: Outcome = Outcome.USER_STOP, sampled: int = 2) -> Trajectory:
    kinds = np.array([Provenance.SYSTEM] * 3 + [Provenance.SAMPLED] * sampled, np.uint8)
    n = len(kinds)
    zeros = np.zeros(n, np.int32)
    segment = Segment(zeros, kinds, np.zeros(n, np.float32), zeros, zeros)
    metrics = {"tool_calls": 2.0, "prompt_tokens": 10.0, "policy_cost": 0.5, "seconds/user": 1.0}
    error = None if outcome.scored else "the engine is gone"
    return Trajectory("t", 0, 0, [segment], list(rewards), sum(rewards), success, outcome, [], metrics, error=error)


def result(name: str, *episodes: Trajectory, domain: str = "desk", **data: str) -> TaskResult:
    return TaskResult(Task(name, domain, "test", dict(data)), episodes)


LOST = played(False, outcome=Outcome.ENGINE_ERROR)
WON, FAILED = played(True, 0.0, 1.0), played(False, 0.0, sampled=6)


def summary(*results: TaskResult) -> Json:
    return {
        "name": "n", "policy": {"kind": "engine", "path": "p", "weights": "w"}, "setting_digest": "s",
        **summarize(CONFIG, results), "roles": {"user/llm/cost": 0.25},
    }  # fmt: skip


def test_tasks_count_alike_however_many_episodes_were_scored() -> None:
    found = summary(result("a", WON, WON, FAILED), result("b", FAILED, LOST, LOST), result("c", LOST, LOST, LOST))
    assert (found["tasks"], found["episodes"], found["unscored"]) == (3, 9, 5)
    assert found["success"]["mean"] == pytest.approx((2 / 3 + 0) / 2)
    assert found["success"]["episodes"] == 4
    assert found["outcomes"] == {"engine_error": 5, "user_stop": 4}
    assert [task["episodes"] for task in found["per_task"]] == [3, 1, 0]
    assert [task["reward"] for task in found["per_task"]] == [pytest.approx(2 / 3), 0.0, None]
    assert found["errors"][0] == {
        "domain": "desk", "task": "b", "outcome": "engine_error", "error": "the engine is gone",
    }  # fmt: skip


def test_unscored_episodes_leave_bounds_and_name_their_kinds() -> None:
    found = summary(
        result("a", WON, LOST, kind="x"), result("b", FAILED, FAILED, kind="x"), result("c", LOST, LOST, kind="y")
    )
    assert found["success"]["mean"] == pytest.approx(0.5)
    assert found["bounds"] == {"low": pytest.approx(0.5 / 3), "high": pytest.approx(2 / 3)}
    assert [(one["kind"], one["unscored"], one["episodes"]) for one in found["missing"]] == [("y", 2, 2), ("x", 1, 4)]
    assert "y 2 of 2; x 1 of 4" in markdown(found)
    whole = summary(result("a", WON), result("b", FAILED))
    assert (whole["bounds"], whole["missing"]) == ({"low": 0.5, "high": 0.5}, [])


def test_the_page_holds_no_control_characters() -> None:
    page = markdown(summary(result("a\x1b[2J", WON, LOST, domain="desk\x9b1m", kind="x\u202e"), result("b", LOST)))
    assert not {"\x1b", "\x9b", "\u202e"} & set(page)


def test_a_k_is_estimated_over_the_tasks_that_have_so_many_episodes() -> None:
    found = summary(result("a", WON, WON, FAILED), result("b", FAILED, LOST, LOST))
    assert {k: part["tasks"] for k, part in found["pass_hat"].items()} == {"1": 2, "2": 1, "3": 1}
    assert [part["mean"] for part in found["pass_hat"].values()] == pytest.approx([1 / 3, 1 / 3, 0])
    assert [part["mean"] for part in found["pass_at"].values()] == pytest.approx([1 / 3, 1, 1])


def test_domains_difficulties_and_kinds() -> None:
    found = summary(
        result("a", WON, difficulty="hard", kind="x"),
        result("b", FAILED, difficulty="easy", kind="x"),
        result("c", FAILED, difficulty="medium", kind="y"),
        result("d", WON, domain="gym"),
    )
    assert list(found["domains"]) == ["desk", "gym"]
    assert list(found["domains"]["desk"]["difficulties"]) == ["easy", "medium", "hard"]
    assert {name: part["mean"] for name, part in found["domains"]["desk"]["kinds"].items()} == {"x": 0.5, "y": 0.0}
    assert (found["success"]["mean"], found["domain_mean"]) == (0.5, pytest.approx((1 / 3 + 1) / 2))
    assert set(found["kinds"]) == {"desk: x", "desk: y", "gym: -"}


def test_the_shape_of_episodes() -> None:
    found = summary(result("a", WON, played(False, 0.5, 0.0, 0.0)), result("b", FAILED))
    assert found["turns"] == pytest.approx((2.5 + 1) / 2)
    assert found["effective_turns"] == pytest.approx((1.5 + 0) / 2)
    assert found["time_weighted_reward"] == pytest.approx((0.5 + 0) / 2)
    assert (found["tokens"]["system"], found["tokens"]["sampled"]) == (3.0, (2 + 6) / 2)
    assert (found["usage"], found["counts"]["tool_calls"]) == ({"prompt_tokens": 10.0}, 2.0)
    assert (found["cost"], found["seconds"]) == ({"policy_cost": 0.5}, {"user": 1.0})


def test_a_domain_without_a_scored_episode_has_its_counts_alone(tmp_path: Path) -> None:
    found = summary(result("a", WON), result("b", LOST, domain="gym"))
    assert (found["domains"]["gym"]["success"], found["domains"]["gym"]["unscored"]) == (None, 1)
    assert found["domain_mean"] is None
    page = markdown(found)
    assert "| gym | 1 | 1 | 1 | - | - |" in page
    assert "the engine is gone" in page
    assert [path.name for path in draw(found, tmp_path)] == ["success.png"]
    json.dumps(found, allow_nan=False)


def test_the_page_and_the_terminal_say_the_same() -> None:
    found = summary(result("a", WON, WON, FAILED, kind="x"), result("b", WON, kind="y"))
    page = markdown(found, ["success.png"])
    for words in ("pass^2", "pass@3", "![success.png](success.png)", "user/llm/cost | 0.25", "| desk | x | 3 |"):
        assert words in page, words
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(console_table(found))
    assert f"{found['success']['mean']:.3f}" in console.export_text()


def test_cells_cannot_break_a_table() -> None:
    assert markdown_table(("a", "b"), [["x|y\nz", 1.23456], ["w", 1234.5]]) == (
        "| a | b |\n|---|--:|\n| x\\|y z | 1.235 |\n| w | 1234 |"
    )
