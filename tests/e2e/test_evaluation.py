"""`mua eval` on a real engine over two domains: killed, continued, and reported again without an engine.

The policy is far too small to be any good. Endpoints as policies, and comparing two runs, are covered by
tests/unit/test_evaluation_run.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_support import finish, kill_group, mua, running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOTH = ["evaluation.domains=[help_desk, graded_desk]", "evaluation.tasks=5", "evaluation.samples=2"]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out" / "episodes.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_killed_evaluation_continues(recipe: Path, tmp_path: Path) -> None:
    with running("eval", recipe, *BOTH, "rollout.concurrency=1", cwd=tmp_path) as process:
        until(lambda: len(lines(tmp_path)) >= 3, process, "three episodes")
        kill_group(process)
        assert finish(process, tmp_path)[0] != 0
    kept = lines(tmp_path)
    assert 3 <= len(kept) < 20
    assert not (tmp_path / "out" / "evaluation.json").exists()

    shown = mua("eval", recipe, *BOTH, cwd=tmp_path)
    assert lines(tmp_path)[: len(kept)] == kept
    assert len(lines(tmp_path)) == 20
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert {name: part["episodes"] for name, part in result["domains"].items()} == {"graded_desk": 10, "help_desk": 10}
    assert (result["policy"]["kind"], result["unscored"]) == ("engine", 0)
    assert result["tokens"]["sampled"] > 0
    assert set(result["pass_hat"]) == {"1", "2"}
    assert "success on validation" in shown
    assert (tmp_path / "out" / "report.md").is_file()

    logs = {path: path.stat().st_size for path in (tmp_path / "out" / "logs").iterdir()}
    again = mua("eval", recipe, *BOTH, cwd=tmp_path)
    assert "success on validation" in again
    assert {path: path.stat().st_size for path in (tmp_path / "out" / "logs").iterdir()} == logs  # no engine started
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == result
