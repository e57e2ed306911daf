"""`mua eval` by its command, on a real engine over two domains and on an endpoint: killed, continued, compared.

The policies are no good: a far too small one, and a scripted clerk who cancels whatever order it hears of. What the
numbers are is covered by tests/unit/test_evaluation_*.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from e2e_support import killed, mua, whole_lines

from tests.chat_fixtures import ChatServer, chat_server, held_back
from tests.clerks import clerk, idler

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


CLERK = """\
name: clerk
output: out
environment: {{name: help_desk, prompt: short}}
rollout: {{max_turns: 8, concurrency: 2}}
evaluation:
  split: test
  tasks: 6
  samples: 2
  policy: {{kind: endpoint, endpoint: {{base_url: "{url}", model: {model}, api_key: sk-this-must-not-appear}}}}
"""


async def evaluated(server: ChatServer, folder: Path, model: str) -> dict[str, Any]:
    """Evaluate what answers at ``server``, killed after two episodes and continued."""
    folder.mkdir()
    (folder / "eval.yaml").write_text(CLERK.format(url=server.base_url, model=model))
    dead = Event()
    server.reply = held_back(server.reply, lambda: len(lines(folder)) >= 2 and not dead.is_set())

    await asyncio.to_thread(killed, "eval", "eval.yaml", cwd=folder, when=lambda: len(lines(folder)) >= 2)
    dead.set()
    kept = lines(folder)
    assert 2 <= len(kept) < 12
    await asyncio.to_thread(mua, "eval", "eval.yaml", cwd=folder)
    assert lines(folder)[: len(kept)] == kept
    for path in (path for path in folder.rglob("*") if path.is_file() and path.name != "eval.yaml"):
        assert b"sk-this-must-not-appear" not in path.read_bytes(), path
    result: dict[str, Any] = json.loads((folder / "out" / "evaluation.json").read_text())
    return result


async def test_endpoints_are_evaluated_killed_continued_and_compared(tmp_path: Path) -> None:
    async with chat_server(clerk) as server:
        good = await evaluated(server, tmp_path / "good", "clerk")
    async with chat_server(idler) as server:
        bad = await evaluated(server, tmp_path / "bad", "idler")
    assert (good["episodes"], good["unscored"], bad["episodes"]) == (12, 0, 12)
    assert good["success"]["mean"] > bad["success"]["mean"] == 0
    told = await asyncio.to_thread(mua, "compare", "bad/out", "good/out", cwd=tmp_path)
    comparison = json.loads((tmp_path / "good" / "out" / "comparison.json").read_text())
    assert (comparison["common"], comparison["same_setting"]) == (6, True)
    assert comparison["all"]["difference"]["mean"] == pytest.approx(good["success"]["mean"])
    assert "difference" in told
