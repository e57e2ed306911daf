"""`mua eval --matrix`: policies and populations of users, over the same tasks, resumed, with holes, and bad files.

Policies are scripted servers with native tool calls (tests/clerks.py) and a scripted engine; the users are scripted,
replayed, and a server that plays a language model's part. Runner, environments, stores and statistics are the real
ones. A checkpoint of a real run as a policy of a matrix is in tests/e2e/test_best.py.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from mua.cli import app
from mua.rollout import runner as runner_module
from mua.rollout import service
from mua.store.traces import read_traces
from mua.trainer.evaluation import evaluator
from mua.types import Json
from mua.utils.errors import ConfigError, RunStopped
from tests.chat_fixtures import ChatServer, chat_server, says
from tests.clerks import clerk, idler
from tests.rollout_fixtures import ScriptedPool
from tests.tokens_fixtures import chat_family, model_folder
from workbench.compare import load_result
from workbench.matrix import evaluate_matrix
from workbench.matrix_config import load_cells

TASKS, SAMPLES = 4, 2


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)


def write(folder: Path, policies: str, users: str) -> tuple[Path, Path]:
    """Configuration and matrix."""
    config, matrix = folder / "eval.yaml", folder / "matrix.yaml"
    config.write_text(
        f"""\
name: clerks
output: {folder}/out
model: {{path: {model_folder("qwen3")}}}
trainer: {{steps: 1}}
environment: {{name: help_desk, prompt: short}}
rollout: {{max_turns: 8, max_retries: 0}}
evaluation: {{split: test, tasks: {TASKS}, samples: {SAMPLES}, resamples: 200, outputs: [json]}}
observe: {{progress: false}}
"""
    )
    matrix.write_text(f"policies:\n{policies}users:\n{users}")
    return config, matrix


def endpoint(name: str, server: ChatServer) -> str:
    told = f"{{base_url: '{server.base_url}', model: {name}, max_retries: 0}}"
    return f"  {name}: {{evaluation.policy: {{kind: endpoint, endpoint: {told}}}}}\n"


def llm(name: str, server: ChatServer, more: str = "") -> str:
    told = f"{{base_url: '{server.base_url}', model: {name}, max_retries: 0}}"
    return f"  {name}: {{user.kind: llm, user.check: 'off', user.llm: {told}{more}}}\n"


async def played(config: Path, matrix: Path, *overrides: str) -> Json:
    base, cells = load_cells(config, list(overrides), matrix)
    base.output.mkdir(exist_ok=True)
    await asyncio.to_thread(evaluate_matrix, base, cells)
    result: Json = json.loads((base.output / "matrix.json").read_text())
    return result


def customer(body: Json) -> Json:
    """A language model's part as a customer who gives order E5 and leaves after the second answer."""
    said = sum(message["role"] == "assistant" for message in body["messages"])
    return says(["Hello, I want to cancel order E5.", "It is order E5.", "Thanks. ###STOP###"][min(said, 2)])


@pytest.mark.slow
async def test_every_policy_meets_every_population(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with chat_server(clerk) as good, chat_server(idler) as bad, chat_server(customer) as people:
        policies = endpoint("clerk", good) + endpoint("idler", bad)
        users = "  scripted: {}\n" + llm("people", people) + llm("steady", people, ", user.manners: false")
        config, matrix = write(tmp_path, policies, users)
        await played(config, matrix)
        recorded = tmp_path / "out" / "clerk" / "scripted" / "traces" / "step_000000.jsonl"
        before = {path: path.read_bytes() for path in (tmp_path / "out").glob("*/*/traces/*.jsonl")}
        matrix.write_text(matrix.read_text() + f"  replayed: {{user: {{kind: replay, replay: '{recorded}'}}}}\n")
        asked = len(good.requests)
        found = await played(config, matrix)
        new = tmp_path / "out" / "clerk" / "replayed" / "traces" / "step_000000.jsonl"
        turns = sum(len(trajectory.turn_rewards) for trajectory in read_traces(new))
        assert len(good.requests) - asked == turns > 0, "three of four columns were done already"
        assert before == {path: path.read_bytes() for path in before}
        asked = len(good.requests), len(bad.requests), len(people.requests)
        assert await played(config, matrix) == found
        assert asked == (len(good.requests), len(bad.requests), len(people.requests))

    columns = ["scripted", "people", "steady", "replayed"]
    assert list(found["users"]) == columns
    assert found["users"]["people"]["llm"]["api_key"] != "none"  # masked
    assert (found["tasks"], found["samples"]) == (TASKS, SAMPLES)
    good_row, bad_row = found["cells"]["clerk"], found["cells"]["idler"]
    assert good_row["scripted"]["success"]["mean"] == good_row["replayed"]["success"]["mean"] > 0
    for users in columns:
        # A cell is an evaluation as mua eval makes it, with the interval that it gives.
        alone = load_result(tmp_path / "out" / "clerk" / users)
        assert good_row[users]["success"] == alone["success"]
        assert bad_row[users]["success"]["mean"] == 0
        assert bad_row[users]["difference"]["mean"] == pytest.approx(-good_row[users]["success"]["mean"])
    of_all = good_row["all users"]["success"]
    assert of_all["mean"] == pytest.approx(sum(good_row[users]["success"]["mean"] for users in columns) / 4)
    assert of_all["low"] <= of_all["mean"] <= of_all["high"]
    assert bad_row["all users"]["difference"]["tasks"] == TASKS

    page = (tmp_path / "out" / "matrix.md").read_text()
    assert "| policy | scripted | people | steady | replayed | all users |" in page
    assert "## Difference to clerk" in page
    assert "success on test" in capsys.readouterr().out
    # Users of one population begin alike with either policy: same tasks, same seeds.
    for users in columns:
        openings = [
            {
                (t.ordinal, t.sample): t.messages[1]["content"]
                for t in read_traces(tmp_path / "out" / p / users / "traces")
            }
            for p in ("clerk", "idler")
        ]
        if users != "replayed":  # the recording is of the clerk's conversations, sample by sample
            assert openings[0] == openings[1]
        assert len(openings[0]) == TASKS * SAMPLES


async def test_a_cell_is_what_mua_eval_gives(tmp_path: Path) -> None:
    async with chat_server(clerk) as good:
        config, matrix = write(tmp_path, endpoint("clerk", good), "  scripted: {}\n")
        found = await played(config, matrix)
        base, cells = load_cells(config, [f"output={tmp_path}/alone"], matrix)
        cell = cells["clerk"]["scripted"].model_copy(update={"output": base.output})
        base.output.mkdir()
        await asyncio.to_thread(evaluator.evaluate, cell)
    alone = load_result(tmp_path / "alone")
    assert found["cells"]["clerk"]["scripted"]["success"] == alone["success"]
    assert found["cells"]["clerk"]["scripted"]["setting_digest"] == alone["setting_digest"]


@pytest.mark.slow
async def test_one_service_of_engines_plays_a_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[ScriptedPool] = []

    def pool(*_: Any, **__: Any) -> ScriptedPool:
        pools.append(ScriptedPool(chat_family("qwen3", False), lambda session, turn: "I do not know."))
        return pools[-1]

    monkeypatch.setattr(service, "EnginePool", pool)
    folder = model_folder("qwen3")
    async with chat_server(customer) as people:
        users = "  scripted: {}\n" + llm("people", people)
        config, matrix = write(tmp_path, f"  tiny: {folder}\n  same: {{model.path: {folder}}}\n", users)
        found = await played(config, matrix)
        assert len(pools) == 2
        assert len(people.requests) > 0
        await played(config, matrix)
        assert len(pools) == 2, "nothing was missing, so no engine was started"
    assert found["policies"]["tiny"]["weights"] == found["policies"]["same"]["weights"]
    said = {
        text
        for t in read_traces(tmp_path / "out" / "tiny" / "people" / "traces")
        for text in [t.messages[1]["content"]]
    }
    assert said == {"Hello, I want to cancel order E5."}
    assert found["cells"]["tiny"]["scripted"]["episodes"] == TASKS * SAMPLES


@pytest.mark.slow
async def test_a_column_that_nobody_could_score_costs_the_others_nothing(tmp_path: Path) -> None:
    broken = True

    def sometimes(body: Json) -> Any:
        return web.json_response({}, status=500) if broken else customer(body)

    async with chat_server(clerk) as good, chat_server(sometimes) as people:
        config, matrix = write(tmp_path, endpoint("clerk", good), llm("people", people) + "  scripted: {}\n")
        with pytest.raises(
            RunStopped, match="clerk with people: not one of 8 episodes could be scored; most ended as user"
        ):
            await played(config, matrix)
        matrix_found = json.loads((tmp_path / "out" / "matrix.json").read_text())["cells"]["clerk"]
        assert matrix_found["people"]["success"] is None
        assert matrix_found["all users"]["success"] is None
        assert matrix_found["scripted"]["success"]["mean"] > 0
        broken = False
        mended = await played(config, matrix)
    assert mended["cells"]["clerk"]["people"]["success"] is not None


@pytest.mark.parametrize(
    ("policies", "users", "says_"),
    [
        ("  a: x\n", "  b: {environment.name: retail}\n", "users: b: 'environment.name' cannot differ within a matrix"),
        ("  a: x\n", "  b: {seed: 2}\n", "users: b: 'seed' cannot differ within a matrix, only keys of user"),
        ("  a: {user.kind: llm}\n", "  b: {}\n", "policies: a: 'user.kind' cannot differ within a matrix"),
        ("  a: {evaluation: {tasks: 3}}\n", "  b: {}\n", "'evaluation.tasks' cannot differ within a matrix"),
        ("  a/b: x\n", "  b: {}\n", "'a/b' cannot be a name, which is that of a folder too"),
        ("  ..: x\n", "  b: {}\n", "'..' cannot be a name"),
        ("  {}\n", "  b: {}\n", "policies: at least one is needed"),
        ("  a: x\n", "  b: {user.knd: llm}\n", "policies.a with users.b: command line: user.knd: unknown key; did you"),
        ("  a: x\n", "  b: {user.kind: llm}\n", "policies.a with users.b: .*kind 'llm' needs the section user.llm"),
        ("  a: x\n", "  b: 3\n", "users.b"),
    ],
)
def test_bad_files_are_refused_by_file_and_cell(tmp_path: Path, policies: str, users: str, says_: str) -> None:
    config, matrix = write(tmp_path, policies, users)
    with pytest.raises(ConfigError, match=says_) as error:
        load_cells(config, [], matrix)
    assert all(str(matrix) in line for line in str(error.value).splitlines())


def test_the_command_takes_a_matrix_and_refuses_one_that_is_not_there(tmp_path: Path) -> None:
    config, _ = write(tmp_path, "  a: x\n", "  b: {}\n")
    result = CliRunner().invoke(app, ["eval", "--matrix", str(tmp_path / "none.yaml"), str(config)])
    assert result.exit_code == 2
    assert "none.yaml: cannot be read" in result.output


def test_values_reach_the_cells_as_they_stand(tmp_path: Path) -> None:
    users = "  b: {user: {leak_words: 3, temperatures: [0.5, 1.5]}, user.tool_rounds: 2}\n"
    config, matrix = write(tmp_path, "  a: {engine.extra: {x: '1e-06', y: 1.0e-6}, model.path: 'a: b'}\n", users)
    base, cells = load_cells(config, ["seed=5"], matrix)
    cell = cells["a"]["b"]
    assert (cell.user.leak_words, cell.user.temperatures, cell.user.tool_rounds, cell.seed) == (3, [0.5, 1.5], 2, 5)
    assert (cell.engine.extra, str(cell.model.path)) == ({"x": "1e-06", "y": 1e-6}, "a: b")
    assert cell.output == base.output / "a" / "b"
