"""`mua eval` as a whole in one process: a scripted endpoint plays two domains' tasks; resuming; what is written.

The policy is a scripted server with native tool calls (tests/chat_fixtures.py); runner, environments, users, store and
report are the real ones. An engine's place is taken by a script; a real one, and a run that is killed, are covered by
tests/e2e/test_evaluation.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from mua.cli import app
from mua.config.load import load_config
from mua.config.schema import ExperimentConfig
from mua.rollout import runner as runner_module
from mua.rollout import service
from mua.store.traces import read_traces
from mua.trainer.evaluation import evaluator
from mua.types import Json
from mua.utils.errors import ConfigError
from tests.chat_fixtures import ChatServer, chat_server
from tests.clerks import clerk, idler
from tests.rollout_fixtures import ScriptedPool
from tests.tokens_fixtures import chat_family, model_folder
from workbench.compare import compare


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)


def config(tmp_path: Path, server: ChatServer, *overrides: str) -> ExperimentConfig:
    path = tmp_path / "eval.yaml"
    path.write_text(
        f"""\
name: clerk
output: {tmp_path}/out
environment: {{name: help_desk, prompt: short}}
user: {{personas: [brief]}}
rollout: {{max_turns: 8, max_retries: 0}}
evaluation:
  split: test
  tasks: 6
  outputs: [json]
  samples: 3
  resamples: 200
  policy:
    kind: endpoint
    endpoint:
      {{base_url: "{server.base_url}", model: clerk, api_key: sk-hidden, max_retries: 0, price_per_million_out: 3.0}}
observe: {{progress: false}}
"""
    )
    return load_config(path, overrides)


async def evaluated(loaded: ExperimentConfig) -> Json:
    loaded.output.mkdir(parents=True, exist_ok=True)
    await asyncio.to_thread(evaluator.evaluate, loaded)
    result: Json = json.loads((loaded.output / "evaluation.json").read_text())
    return result


async def test_an_evaluation_of_an_endpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with chat_server(clerk) as server:
        result = await evaluated(config(tmp_path, server, "evaluation.outputs=[json, markdown, plots]"))
    assert (len(result["per_task"]), result["tasks"], result["episodes"], result["unscored"]) == (6, 6, 18, 0)
    assert result["policy"]["kind"] == "endpoint"
    assert 0 < result["success"]["mean"] < 1  # it helps whoever wants to cancel
    assert result["success"]["low"] <= result["success"]["mean"] <= result["success"]["high"]
    assert result["kinds"]["cancel"]["mean"] > 0.5
    assert list(result["pass_hat"]) == list(result["pass_at"]) == ["1", "2", "3"]
    for k in "123":
        assert result["pass_hat"][k]["mean"] <= result["success"]["mean"] + 1e-9 <= result["pass_at"][k]["mean"] + 2e-9
    assert sum(result["outcomes"].values()) == 18
    assert result["usage"]["completion_tokens"] == pytest.approx(5 * result["turns"])
    assert result["cost"]["policy_cost"] == pytest.approx(result["usage"]["completion_tokens"] * 3e-6)
    assert "success on test" in capsys.readouterr().out
    page = (tmp_path / "out" / "report.md").read_text()
    assert "### pass^k" in page
    assert max(map(len, page.splitlines())) < 200
    assert "![passes.png](passes.png)" in page
    for name in ("success.png", "passes.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert len(list(read_traces(tmp_path / "out" / "traces"))) == 18
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file() and b"sk-hidden" in path.read_bytes()]


async def test_the_evaluation_decides_on_tasks_and_temperature(tmp_path: Path) -> None:
    chosen = ("evaluation.temperature=0.25", "rollout.temperature=0.75", "evaluation.samples=1")
    async with chat_server(clerk) as server:
        result = await evaluated(config(tmp_path, server, *chosen))
    assert {request["temperature"] for request in server.requests} == {0.25}
    assert {task["task"].split("/")[1] for task in result["per_task"]} == {"test"}


async def test_a_checkpoint_is_played_as_the_evaluation_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ScriptedPool(chat_family("qwen3", False), lambda session, turn: "I do not know.")
    monkeypatch.setattr(service, "EnginePool", lambda *_, **__: pool)
    async with chat_server(clerk) as server:
        loaded = config(
            tmp_path, server, "evaluation.temperature=0.25", "rollout.temperature=0.75", "evaluation.samples=1",
            "evaluation.policy.kind=engine", f"model.path={model_folder('qwen3')}", "rollout.max_turns=1",
            "trainer={steps: 1}",
        )  # fmt: skip
        result = await evaluated(loaded)
    assert (result["episodes"], result["unscored"], server.requests) == (6, 0, [])
    assert {request.params.temperature for request in pool.requests} == {0.25}
    assert len({request.session for request in pool.requests}) == 6


async def test_a_second_run_plays_only_what_is_missing(tmp_path: Path) -> None:
    async with chat_server(clerk) as server:
        first = await evaluated(config(tmp_path, server, "evaluation.samples=2"))
        asked = len(server.requests)
        again = await evaluated(config(tmp_path, server, "evaluation.samples=2", "rollout.concurrency=3"))
        assert len(server.requests) == asked
        assert again == first
        more = await evaluated(config(tmp_path, server))
        assert more["episodes"] == 18
        assert asked < len(server.requests) < 2 * asked
        straight = await evaluated(config(tmp_path, server, f"output={tmp_path}/other"))
    seconds = ("seconds",)
    for result in (more, straight):
        for part in (result, *result["domains"].values()):
            for key in seconds:
                part.pop(key)
    assert more == straight


@pytest.mark.slow
async def test_a_changed_setting_is_not_mixed_in(tmp_path: Path) -> None:
    def openings() -> int:
        return sum(len(request["messages"]) == 2 for request in server.requests)

    async with chat_server(clerk) as server:
        first = await evaluated(config(tmp_path, server, "evaluation.samples=1"))
        assert openings() == 6
        for number, change in enumerate(["evaluation.temperature=1.0", "rollout.max_turns=7", "seed=2"], start=2):
            other = await evaluated(config(tmp_path, server, "evaluation.samples=1", change))
            assert openings() == 6 * number, f"every task is played again under {change}"
            assert other["setting_digest"] != first["setting_digest"]
        asked = len(server.requests)
        again = await evaluated(config(tmp_path, server, "evaluation.samples=1"))
        assert len(server.requests) == asked  # what was there is there still
        assert again == first


@pytest.mark.slow
async def test_unscored_episodes_count_nowhere_and_are_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = 0

    def flaky(body: Json) -> Json | web.Response:
        nonlocal failing
        if len(body["messages"]) == 2 and failing < 3:
            failing += 1
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        return clerk(body)

    async with chat_server(flaky) as server:
        broken = await evaluated(config(tmp_path, server, "evaluation.samples=1"))
        assert (broken["unscored"], broken["outcomes"]["engine_error"]) == (3, 3)
        assert broken["success"]["episodes"] == 3
        assert [task["episodes"] for task in broken["per_task"]].count(0) == 3
        assert "out of memory" in broken["errors"][0]["error"]
        assert "3 of 6 episodes could not be scored" in capsys.readouterr().out
        asked = len(server.requests)
        whole = await evaluated(config(tmp_path, server, "evaluation.samples=1"))
        assert (whole["unscored"], whole["success"]["episodes"]) == (0, 6)
        assert len(server.requests) - asked < asked


@pytest.mark.parametrize(("most", "status"), [(0.05, 3), (0.6, 0)])
async def test_too_many_unscored_episodes_have_a_status_of_their_own(tmp_path: Path, most: float, status: int) -> None:
    """An endpoint that answers HTTP 500 to the customers of one half of the tasks."""

    def half(body: Json) -> Json | web.Response:
        if len(body["messages"][1]["content"]) % 2:
            return web.json_response({"error": {"message": "overloaded"}}, status=500)
        return clerk(body)

    async with chat_server(half) as server:
        loaded = config(tmp_path, server, "evaluation.samples=1", "evaluation.tasks=12")
        command = ["eval", str(tmp_path / "eval.yaml"), "evaluation.samples=1", "evaluation.tasks=12"]
        done = await asyncio.to_thread(CliRunner().invoke, app, [*command, f"evaluation.max_unscored={most}"])
    result = json.loads((loaded.output / "evaluation.json").read_text())
    assert done.exit_code == status
    assert 0.05 * 12 < result["unscored"] < 0.6 * 12
    assert result["bounds"]["high"] - result["bounds"]["low"] == pytest.approx(result["unscored"] / 12)
    assert sum(one["unscored"] for one in result["missing"]) == result["unscored"]


async def test_an_endpoint_that_refuses_the_key_ends_the_run_at_once(tmp_path: Path) -> None:
    refused = web.json_response({"error": {"message": "no such key"}}, status=401)
    async with chat_server(lambda body: refused) as server:
        with pytest.raises(ExceptionGroup) as raised:
            await evaluated(config(tmp_path, server))
    assert raised.group_contains(ConfigError, match=r"evaluation\.policy\.endpoint\.api_key")


@pytest.mark.slow
async def test_domains_are_evaluated_side_by_side(tmp_path: Path) -> None:
    domains = "evaluation.domains=[help_desk, gyms/function]"
    small = ("evaluation.samples=1", "evaluation.tasks=4", "evaluation.outputs=[json, markdown]")
    async with chat_server(clerk) as server:
        result = await evaluated(config(tmp_path, server, domains, *small))
        alone = await evaluated(config(tmp_path, server, *small, f"output={tmp_path}/alone"))
    assert sorted(result["domains"]) == ["gyms/function", "help_desk"]
    assert (result["episodes"], result["domains"]["help_desk"]["episodes"]) == (8, 4)
    means = [part["success"]["mean"] for part in result["domains"].values()]
    assert result["domain_mean"] == pytest.approx(sum(means) / 2)
    own = [task for task in result["per_task"] if task["domain"] == "help_desk"]
    assert own == alone["per_task"]  # what stands beside a task changes nothing of it
    assert not (tmp_path / "out" / "success.png").exists()


@pytest.mark.slow
async def test_two_policies_are_compared_on_the_same_users(tmp_path: Path) -> None:
    few = ("evaluation.samples=2",)
    async with chat_server(clerk) as server:
        good = await evaluated(config(tmp_path, server, *few, f"output={tmp_path}/good"))
    async with chat_server(idler) as server:
        bad = await evaluated(config(tmp_path, server, *few, f"output={tmp_path}/bad"))
    assert good["setting_digest"] == bad["setting_digest"]
    openings = [
        {(t.ordinal, t.sample): t.messages[1]["content"] for t in read_traces(tmp_path / name / "traces")}
        for name in ("good", "bad")
    ]
    assert openings[0] == openings[1]
    assert len(openings[0]) == 12
    compare(tmp_path / "bad", tmp_path / "good", tmp_path)
    found = json.loads((tmp_path / "comparison.json").read_text())
    assert (found["common"], found["same_setting"], found["all"]["first"]) == (6, True, 0.0)
    assert found["all"]["difference"]["mean"] == pytest.approx(good["success"]["mean"])
    assert found["all"]["worse"] == 0 < found["all"]["better"]
