"""Conversations from a policy at an endpoint: played, curated, written, continued; read back as supervised data.

The policy is a scripted server with native tool calls (tests/chat_fixtures.py) that misbehaves by order number; runner,
environments, users, store and reader are the real ones. What is refused and preferred in detail is covered by
test_rollout_curate.py, a served model and a killed run by tests/e2e/test_make_conversations.py.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from environments.help_desk import HelpDeskDomain
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.environment.protocol import Split, Task
from mua.trainer.conversations import load_conversations
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError
from tests.chat_fixtures import ChatServer, calls, chat_server
from tests.chat_server import Clock
from tests.clerks import clerk, idler
from tests.tokens_fixtures import chat_family, runs
from workbench.collect import Wanted, collect


def sloppy(body: Json) -> Json:
    """The clerk, who by what the customer said asks twice, invents a tool or writes no JSON, yet helps."""
    turn = clerk(body)
    looks = [c["function"]["name"] for c in turn.get("tool_calls", ())] == ["get_order"]
    called = [c["function"] for m in body["messages"] for c in m.get("tool_calls", ())]
    names = [call["name"] for call in called]
    told = " ".join(message["content"] or "" for message in body["messages"] if message["role"] == "user")
    fault = zlib.crc32(told.encode()) % 4
    if fault == 1 and names == ["check_owner", "get_order"]:
        return calls(("get_order", called[1]["arguments"]))
    if fault == 2 and looks and "find_order" not in names:
        return calls(("find_order", {"order": "?"}))
    if fault == 3 and looks:
        return calls(("get_order", "{order"))
    if fault == 3 and names == ["check_owner", "get_order"]:
        return calls(("get_order", {"order": json.loads(called[0]["arguments"])["order"]}))
    return turn


@pytest.fixture(autouse=True)
def only_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks in which the customer wants what the clerk does, and those in which it should have refused."""
    every = HelpDeskDomain.tasks

    def some(self: HelpDeskDomain, split: Split) -> list[Task]:
        return [task for task in every(self, split) if task.data["kind"] in ("cancel", "refused_by_status")]

    monkeypatch.setattr(HelpDeskDomain, "tasks", some)


def config(tmp_path: Path, server: ChatServer, *overrides: str) -> ExperimentConfig:
    path = tmp_path / "collect.yaml"
    path.write_text(
        f"""\
name: collect
output: {tmp_path}/out
model: {{path: none}}
environment: {{name: help_desk}}
user: {{personas: [brief]}}
rollout: {{max_turns: 10, max_retries: 0}}
trainer: {{steps: 1}}
evaluation: {{policy: {{kind: endpoint, endpoint: {{base_url: "{server.base_url}", model: clerk, max_retries: 0}}}}}}
observe: {{progress: false}}
"""
    )
    return load_config(path, overrides)


async def collected(loaded: ExperimentConfig, out: Path, wanted: Wanted) -> Json:
    return await asyncio.to_thread(collect, loaded, out, wanted)


def written(out: Path) -> list[Json]:
    return [json.loads(line) for line in out.read_text().splitlines()]


async def test_only_clean_successes_are_written_and_they_are_supervised_data(tmp_path: Path) -> None:
    out = tmp_path / "data" / "conversations.jsonl"
    async with chat_server(sloppy) as server:
        loaded = config(tmp_path, server)
        report = await collected(loaded, out, Wanted(count=1000, samples=3, tasks=30))
    assert report["episodes"] == 3 * 30
    assert report["refused"]["not successful"] > 0
    assert min(report["refused"][name] for name in ("same call, same answer", "unknown tool", "malformed call")) > 0
    assert report["kept"] + sum(report["refused"].values()) == report["episodes"]
    records = written(out)
    assert report["written"] == len(records) == report["tasks"] == report["kept"] - report["beyond_per_task"] > 0
    assert json.loads(out.with_suffix(".report.json").read_text()) | {"roles": {}} == report
    for one in records:
        names = [tool["function"]["name"] for tool in one["tools"]]
        used = [c["function"]["name"] for m in one["messages"] for c in m.get("tool_calls", ())]
        assert used == ["check_owner", "get_order", "cancel_order"]
        assert set(used) <= set(names)
    family = chat_family("qwen3", False)
    read = load_conversations(out, family, sft(loaded, out))
    for one, (segment,) in zip(records, read, strict=True):
        said = [text for who, text in runs(family, segment) if who == "SAMPLED"]
        turns = [message for message in one["messages"] if message["role"] == "assistant"]
        assert len(said) == len(turns)
        assert all(message["content"] in text for message, text in zip(turns, said, strict=True))
        assert '"cancel_order"' in family.decode(segment.ids[: int(segment.loss_mask.argmax())])  # its schema


def sft(loaded: ExperimentConfig, out: Path) -> ExperimentConfig:
    told = loaded.model_dump() | {"sft": {"data": str(out)}}
    return ExperimentConfig.model_validate(told)


@pytest.mark.slow
async def test_a_second_run_plays_what_is_missing_and_selects_anew(tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    async with chat_server(clerk) as server:
        loaded = config(tmp_path, server)
        await collected(loaded, out, Wanted(count=1000, samples=1, tasks=8))
        episodes = out.with_suffix(".episodes.jsonl").read_bytes()
        asked = len(server.requests)
        more = await collected(loaded, out, Wanted(count=1000, samples=2, tasks=8, per_task=2))
        assert asked < len(server.requests) < 3 * asked
        assert out.with_suffix(".episodes.jsonl").read_bytes().startswith(episodes)
        asked = len(server.requests)
        few = await collected(loaded, out, Wanted(count=3, samples=2, tasks=8, per_task=2))
        assert len(server.requests) == asked
    assert (few["written"], few["beyond_count"]) == (3, more["written"] - 3)
    assert len({one["source"]["task"] for one in written(out)}) == 3  # a task's second best comes after all first ones


@pytest.mark.slow
async def test_what_ended_before_the_deadline_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, wanted, clock = tmp_path / "x.jsonl", Wanted(count=1000, samples=2, tasks=8), Clock()
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: clock.of_loop(loop))
    stuck = True

    def late(body: Json) -> Json:
        """After so many answers the time is up."""
        if stuck and len(server.requests) == 25:
            clock.ahead += 100.0
        return clerk(body)

    async with chat_server(late) as server:
        loaded = config(tmp_path, server, "rollout.concurrency=1")
        part = await collected(loaded, out, replace(wanted, seconds=100.0))
        before = out.with_suffix(".episodes.jsonl").read_bytes()
        assert 0 < part["episodes"] == len(before.splitlines()) < 16
        assert part["episodes"] + part["not_played"] == 16
        assert part["written"] == len(written(out)) > 0
        stuck = False
        whole = await collected(loaded, out, wanted)
    assert (whole["episodes"], whole["not_played"]) == (16, 0)
    assert out.with_suffix(".episodes.jsonl").read_bytes().startswith(before)


async def test_nothing_worth_keeping_is_an_error_that_names_the_report(tmp_path: Path) -> None:
    async with chat_server(idler) as server:
        with pytest.raises(MuaError, match=r"none of 4 episodes is a demonstration; .*x\.report\.json says why"):
            await collected(config(tmp_path, server), tmp_path / "x.jsonl", Wanted(count=9, samples=1, tasks=4))
    assert json.loads((tmp_path / "x.report.json").read_text())["refused"]["not successful"] == 4
    assert not (tmp_path / "x.jsonl").exists()
    async with chat_server(clerk) as server:
        with pytest.raises(ConfigError, match="'train' of gyms/search has no tasks"):
            await collected(config(tmp_path, server, "environment.name=gyms/search"), tmp_path / "y.jsonl", Wanted(9))
