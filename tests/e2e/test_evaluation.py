"""`mua eval` on a real engine over two domains: killed, continued, and compared with another policy.

The policies are far too small to be any good. Endpoints as policies are covered by tests/unit/test_evaluation_run.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_support import Workshop, finish, kill_group, mua, running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOTH = ["evaluation.domains=[help_desk, graded_desk]", "evaluation.tasks=5", "evaluation.samples=2"]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out" / "episodes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_evaluation_continues_and_is_compared(recipe: Path, workshop: Workshop, tmp_path: Path) -> None:
    tuned, random = tmp_path / "tuned", tmp_path / "random"
    for folder in (tuned, random):
        folder.mkdir()
    with running("eval", recipe, *BOTH, "rollout.concurrency=1", cwd=tuned) as process:
        until(lambda: len(lines(tuned)) >= 3, process, "three episodes")
        kill_group(process)
        assert finish(process, tuned)[0] != 0
    kept = lines(tuned)
    assert 3 <= len(kept) < 20
    assert not (tuned / "out" / "evaluation.json").exists()

    shown = mua("eval", recipe, *BOTH, cwd=tuned)
    assert lines(tuned)[: len(kept)] == kept
    assert len(lines(tuned)) == 20
    result = json.loads((tuned / "out" / "evaluation.json").read_text())
    assert {name: part["episodes"] for name, part in result["domains"].items()} == {"graded_desk": 10, "help_desk": 10}
    assert (result["policy"]["kind"], result["unscored"]) == ("engine", 0)
    assert result["tokens"]["sampled"] > 0
    assert set(result["pass_hat"]) == {"1", "2"}
    assert "success on validation" in shown
    assert (tuned / "out" / "report.md").is_file()

    again = mua("eval", recipe, *BOTH, cwd=tuned)  # nothing is left to play, so no engine starts
    assert "success on validation" in again
    assert json.loads((tuned / "out" / "evaluation.json").read_text()) == result

    mua("eval", recipe, f"model.path={workshop.model}", *BOTH, cwd=random)
    told = mua("compare", random / "out", tuned / "out", cwd=tmp_path)
    comparison = json.loads((tuned / "out" / "comparison.json").read_text())
    assert (comparison["common"], comparison["same_setting"]) == (10, True)
    assert set(comparison["domains"]) == {"graded_desk", "help_desk"}
    assert "difference" in told
