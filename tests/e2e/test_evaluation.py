"""`mua eval` by its command, on a real engine over two domains: killed and continued.

The policy is no good, because it is far too small. Endpoints, comparisons and what the numbers are: see
tests/unit/test_evaluation_*.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_support import killed, mua, whole_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BOTH = ["evaluation.domains=[help_desk, graded_desk]", "evaluation.tasks=5", "evaluation.samples=2"]


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(folder / "out" / "episodes.jsonl")]


def test_a_killed_evaluation_continues(recipe: Path, tmp_path: Path) -> None:
    killed("eval", recipe, *BOTH, "rollout.concurrency=1", cwd=tmp_path, when=lambda: len(lines(tmp_path)) >= 3)
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

    def engine_logs() -> dict[str, int]:
        logs = (tmp_path / "out" / "logs").iterdir()
        return {path.name: path.stat().st_size for path in logs if path.name != "eval.log"}

    logs = engine_logs()
    assert logs
    again = mua("eval", recipe, *BOTH, cwd=tmp_path)
    assert "success on validation" in again
    assert engine_logs() == logs  # none was started
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == result
