"""A person as the user of a policy: what is typed reaches it, and the environment's verdict stands at the end.

An endpoint plays the policy, and in the engine's place a script. Does not cover a real engine, which is started as by
``mua eval`` (tests/e2e/test_evaluation.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from environments.help_desk import DOMAIN
from mua.cli import app
from mua.rollout import runner as runner_module
from mua.rollout import service
from tests.chat_fixtures import chat_server_beside
from tests.clerks import clerk
from tests.rollout_fixtures import ScriptedPool
from tests.tokens_fixtures import chat_family, model_folder
from workbench.play_policy import played_config

TASK = next(task for task in DOMAIN.tasks("test") if task.data["kind"] == "cancel")
ORDER, NAME = next((call[1]["order"], call[1]["name"]) for call in DOMAIN.gold(TASK) if call[0] == "check_owner")


def play(*words: str, typed: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["env", "play", "help_desk", "--as", "user", *words], input=typed)
    return done.exit_code, done.output


def test_a_person_talks_to_an_endpoint_and_sees_the_verdict(tmp_path: Path) -> None:
    typed = f"I want to cancel an order.\nIt is {ORDER}, I am {NAME}.\nThanks! ###STOP###\n"
    with chat_server_beside(clerk) as server:
        address = tmp_path / "address"
        lines = {"BASE_URL": server.base_url, "MODEL": "clerk", "API_KEY": "k3y"}
        address.write_text("".join(f"MUA_USER_{name}={value}\n" for name, value in lines.items()))
        status, said = play("--policy", str(address), "--task", TASK.id, typed=typed)
        assert status == 0, said
        assert set(server.keys) == {"Bearer k3y"}
        assert {request["model"] for request in server.requests} == {"clerk"}
        status, other = play("--policy", server.base_url, "--model", "x", "--task", TASK.id, typed="Hello?\n/quit\n")
    assert "agent: What are your order number and your name?" in said
    assert f"agent: Done, order {ORDER} is cancelled." in said
    assert f'agent calls: cancel_order {{"order": "{ORDER}"}}' in said
    assert "reward 1, success; it ended as user_stop" in said
    assert "k3y" not in said
    assert status == 0
    assert "no success; it ended as user_stop" in other
    assert f"an answer before get_order(order={ORDER})" in other  # the difference to gold


def test_a_checkpoint_plays_as_its_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prompts, budgets and sampling; in the engine's place a script."""
    shutil.copytree(model_folder("qwen3"), tmp_path / "run/hf")
    own = {"name": "own", "output": "elsewhere", "trainer": {"steps": 1}, "user": {"personas": ["brief"]},
           "model": {"path": "moved", "dtype": "float32", "max_length": 4096},
           "environment": {"name": "help_desk", "prompt": "short"}, "evaluation": {"temperature": 0.25},
           "rollout": {"max_turns": 3, "max_tokens": 4000}, "store": {"enabled": True}}  # fmt: skip
    (tmp_path / "run/config.yaml").write_text(json.dumps(own))
    config = played_config("help_desk", None, str(tmp_path / "run/hf"), None, tmp_path / "out")
    assert (config.model.path, config.model.max_length, config.model.dtype) == (tmp_path / "run/hf", 4096, "float32")
    assert (config.rollout.max_turns, config.evaluation.temperature, config.environment.prompt) == (3, 0.25, "short")
    assert (config.output, config.store.enabled, config.engine.count) == (tmp_path / "out", False, 1)
    other = played_config("retail", None, str(tmp_path / "run/hf"), None, tmp_path / "out")
    assert (other.environment.name, other.environment.prompt) == ("retail", "full")

    pool = ScriptedPool(chat_family("qwen3", False), lambda session, turn: "I do not know.")
    monkeypatch.setattr(service, "EnginePool", lambda *_, **__: pool)
    status, said = play("--policy", str(tmp_path / "run/hf"), "--task", TASK.id, typed="Hello?\nWhy?\n")
    assert status == 0, said
    assert said.count("agent: I do not know.") == 2
    assert "no success" in said

    pool = ScriptedPool(chat_family("qwen3", False), lambda session, turn: "Leo " * 5000)
    status, said = play("--policy", str(tmp_path / "run/hf"), "--task", TASK.id, typed="Hello?\n")
    assert status == 0, said
    assert "it ended as length" in said
    assert "agent, cut off: Leo Leo" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "http://127.0.0.1:1/v1"], "--model: missing"),
        (["--policy", "nowhere"], "--policy nowhere: no such folder"),
        (["--policy", "."], r"--policy .: neither a checkpoint of a run nor a model folder"),
        (["--policy", "file"], "--policy file: not an address file of mua serve"),
        (["--policy", ".", "--as", "agent"], "add --as user"),
    ],
)
def test_a_policy_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("nothing")
    status, said = play(*words, typed="")
    assert status == 2
    assert message in said


def test_an_endpoint_that_fails_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)
    status, said = play("--policy", "http://127.0.0.1:1/v1", "--model", "x", "--task", TASK.id, typed="Hello\n")
    assert status != 0
    assert "is not scored" in said
