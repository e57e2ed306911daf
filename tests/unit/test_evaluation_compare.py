"""Comparing two evaluations: pairing, the test of choice, what is written; and reading what is no result.

Results are made here with known successes; the statistics are covered by test_evaluation_estimators.py, results of
real runs by test_evaluation_evaluator.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.trainer.evaluation.estimators import mcnemar
from mua.types import Json
from mua.utils.errors import MuaError
from workbench.compare import compare, compared, comparison_page, load_result, missing_not_at_random, paired


def result(name: str, successes: list[int], episodes: int = 1, domain: str = "desk", **more: Json) -> Json:
    tasks = [
        {"domain": domain, "task": f"t{i}", "digest": "d", "episodes": episodes, "successes": count, "unscored": 0}
        for i, count in enumerate(successes)
    ]
    return {"name": name, "per_task": tasks, "setting_digest": "s", **more}


def test_single_episodes_are_compared_exactly() -> None:
    found = compared(result("a", [0] * 10 + [1] * 10), result("b", [1] * 8 + [0] * 2 + [1] * 9 + [0]))["all"]
    assert (found["first"], found["second"], found["better"], found["worse"]) == (0.5, 0.85, 8, 1)
    assert found["difference"]["mean"] == pytest.approx(0.35)
    assert 0 < found["difference"]["low"] < 0.35 < found["difference"]["high"] < 0.7
    assert (found["test"], found["p_value"]) == ("exact McNemar", mcnemar(1, 8))


def test_the_pairing_is_used() -> None:
    """The same two success rates: a consistent gain is seen, a shuffled one is not."""
    first = [0, 1, 2, 3] * 8
    steady = compared(result("a", first, 4), result("b", [count + 1 for count in first], 4))["all"]
    shuffled = compared(result("a", first, 4), result("b", [count + 1 for count in sorted(first)], 4))["all"]
    assert steady["difference"]["mean"] == shuffled["difference"]["mean"] == 0.25
    widths = [found["difference"]["high"] - found["difference"]["low"] for found in (steady, shuffled)]
    assert widths[0] == 0 < widths[1]
    assert steady["test"] == "sign-flip permutation"
    assert steady["p_value"] < 1e-4 < shuffled["p_value"]


def test_only_what_both_scored_with_the_same_content_is_compared() -> None:
    one, other = result("a", [1, 1, 1, 1]), result("b", [0, 0, 0, 0, 0])
    one["per_task"][0]["digest"] = "changed"
    other["per_task"][1]["episodes"] = 0
    pairs, changed = paired(one, other)
    assert ([pair.task for pair in pairs], changed) == (["t2", "t3"], 1)
    found = compared(one, other)
    assert (found["common"], found["only_in_first"], found["only_in_second"], found["changed"]) == (2, 1, 2, 1)


def test_equal_runs_are_equal_and_their_page_holds_no_control_characters() -> None:
    one = result("a", [0, 1] * 10, domain="desk\x1b[2J")
    found = compared(one, one) | {"first": "a\x9b1m", "second": "b\u202e", "missing": missing_not_at_random(one, one)}
    assert (found["all"]["difference"]["mean"], found["all"]["p_value"], found["missing"]) == (0.0, 1.0, [])
    assert not {"\x1b", "\x9b", "\u202e"} & set(comparison_page(found))


def test_domains_are_compared_apart_and_together() -> None:
    one = result("a", [0, 0]) | {
        "per_task": result("", [0, 0])["per_task"] + result("", [1, 1], domain="gym")["per_task"]
    }
    other = result("b", [1, 1]) | {
        "per_task": result("", [1, 1])["per_task"] + result("", [1, 0], domain="gym")["per_task"]
    }
    found = compared(one, other)
    assert {name: part["difference"]["mean"] for name, part in found["domains"].items()} == {"desk": 1.0, "gym": -0.5}
    assert found["all"]["difference"]["mean"] == 0.25


def unscored(tasks: int, *lost: int, kinds: int = 4, won: Callable[[int], int] = lambda at: at % 2) -> Json:
    found = result("r", [won(at) for at in range(tasks)])
    for at, task in enumerate(found["per_task"]):
        task["kind"] = f"kind {at % kinds}"
        if at in lost:
            task |= {"episodes": 0, "successes": 0, "unscored": 1}
    return found


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        (unscored(40), unscored(40, *range(0, 40, 2)), "20 of the second"),  # an endpoint that fails every second time
        (unscored(40, *range(20)), unscored(40), "20 tasks of the first"),
        (unscored(40, *range(0, 32, 4)), unscored(40, *range(0, 32, 4)), "8 of 10 tasks of desk: kind 0"),
        (unscored(40, *range(1, 25, 2)), unscored(40, *range(0, 24, 2)), "solves the task"),
    ],
)
def test_runs_whose_missing_tasks_are_not_random_are_refused(
    tmp_path: Path, one: Json, other: Json, named: str
) -> None:
    for name, found in (("a", one), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(json.dumps(found))
    command = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert named in refused.output
    assert not (tmp_path / "b" / "comparison.json").exists()
    told = CliRunner().invoke(app, [*command, "--allow-missing"])
    assert told.exit_code == 0
    assert any(named in reason for reason in json.loads((tmp_path / "b" / "comparison.json").read_text())["missing"])


@pytest.mark.parametrize("lost", [(), (3,), (3, 17, 22)])
def test_a_few_missing_tasks_of_any_kind_are_compared(lost: tuple[int, ...]) -> None:
    assert missing_not_at_random(unscored(40), unscored(40, *lost)) == []
    assert missing_not_at_random(unscored(40, *lost), unscored(40, 8)) == []


def test_runs_without_a_common_task_are_refused() -> None:
    with pytest.raises(MuaError, match="share no scored task"):
        compared(result("a", [1]), result("b", [1], domain="gym"))
    changed = result("b", [1])
    changed["per_task"][0]["digest"] = "x"
    with pytest.raises(MuaError, match="1 tasks have the same id but another content"):
        compared(result("a", [1]), changed)


def test_the_verb_prints_and_writes(tmp_path: Path) -> None:
    for name, successes in (("a", [0, 0, 1]), ("b", [1, 1, 1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(json.dumps(result(name, successes, setting_digest=name)))
    shown = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    assert shown.exit_code == 0, shown.output
    assert "+0.667" in shown.output
    assert "differ in their setting" in shown.output
    written = json.loads((tmp_path / "b" / "comparison.json").read_text())
    assert (written["all"]["p_value"], written["same_setting"]) == (0.5, False)
    assert "| desk | 3 | 0.333 | 1.000 |" in (tmp_path / "b" / "comparison.md").read_text()
    elsewhere = CliRunner().invoke(
        app, ["compare", str(tmp_path / "a"), str(tmp_path / "b" / "evaluation.json"), "--out", str(tmp_path / "c")]
    )
    assert elsewhere.exit_code == 0, elsewhere.output
    assert (tmp_path / "c" / "comparison.md").is_file()


TASK = '{"domain": "d", "task": "t", "digest": "x", "episodes": 2, "successes": 1}'


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"per_task": [{}]}', '{"per_task": 3}', "\xff", "[" * 100_000, "9" * 5000,
        f'{{"per_task": [{TASK}]}}', f'{{"name": "n", "per_task": [{TASK}, {TASK}]}}',
        f'{{"name": "n", "per_task": [{TASK.replace("2", "0")}]}}',
        f'{{"name": "n", "per_task": [{TASK.replace("1", "true")}]}}',
        f'{{"name": "n", "per_task": [{TASK.replace("1", "NaN")}]}}',
    ],
)  # fmt: skip
def test_what_is_no_result_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "evaluation.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(MuaError, match=r"evaluation\.json: not a result of mua eval"):
        load_result(tmp_path)


def test_a_missing_result_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MuaError, match="No such file or directory; give the output folder of mua eval"):
        compare(tmp_path / "a", tmp_path / "b", tmp_path)
