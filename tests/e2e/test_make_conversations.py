"""`mua conversations --agent policy`: killed, continued, and its result trained on.

The policy is a scripted clerk over HTTP. What is refused and preferred is covered by tests/unit/test_rollout_curate.py
and test_evaluation_collect.py, a model that `mua serve` serves by test_users_served.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from threading import Event

import pytest
from e2e_support import SECONDS, kill_group, mua, until

from tests.chat_fixtures import chat_server, held_back
from tests.clerks import clerk
from tests.collect_support import CONFIG, episodes, policy_at, report, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


async def test_a_killed_collection_goes_on_and_its_result_trains(recipe: Path, tmp_path: Path) -> None:
    dead = Event()
    held = held_back(clerk, lambda: len(episodes(tmp_path)) >= 5 and not dead.is_set())
    async with chat_server(held) as server:
        (tmp_path / "collect.yaml").write_text(CONFIG.replace("max_turns: 4", "max_turns: 8"))
        arguments = [*policy_at(server.base_url, "clerk"), "--samples=2", "--tasks=22", "--per-task=2"]

        def killed() -> list[str]:
            process = start(tmp_path, *arguments)
            until(lambda: len(episodes(tmp_path)) >= 5, process, "five episodes")
            kill_group(process)
            dead.set()
            process.wait()
            return episodes(tmp_path)

        before = await asyncio.to_thread(killed)
        assert not (tmp_path / "x.jsonl").exists()
        assert await asyncio.to_thread(lambda: start(tmp_path, *arguments).wait(SECONDS)) == 0
    after = episodes(tmp_path)
    assert after[: len(before)] == before
    assert len(before) >= 5
    assert len([line for line in after if '"trajectory"' in line]) == 44
    written = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert report(tmp_path)["written"] == len(written) >= 2
    assert json.loads((tmp_path / "stdout").read_text())["written"] == len(written)

    data = f"data: {tmp_path}/x.jsonl, batch_size: 2, overlong: skip"
    sft = [f"sft={{{data}, validation: 0.5, validate_every: 1}}", "trainer.steps=2"]
    await asyncio.to_thread(mua, "sft", recipe, *sft, cwd=tmp_path)
    metrics = [json.loads(line) for line in (tmp_path / "out" / "evaluations.jsonl").read_text().splitlines()]
    assert [line["eval/loss"] > 0 for line in metrics] == [True, True]
