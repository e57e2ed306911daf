"""``mua doctor preflight``: each check's verdict and fix, the table, two ranks together, and what is recorded.

The two ranks are real, on gloo, started by torchrun as in a job. Not covered: CUDA and NCCL, clocks that differ,
nodes that do not reach each other.
"""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
from pydantic import SecretStr
from safetensors.numpy import save_file

from mua.config.load import load_config
from mua.config.schema import DistillationConfig, ExperimentConfig, LlmConfig
from mua.launch.checks import Check, run_check
from mua.launch.checks.node import RunNode, check_endpoint, check_teacher, check_versions
from mua.launch.preflight import check_table
from mua.launch.serve import Service, publish_address, withdraw_address
from mua.observe.provenance import capture_environment
from mua.types import Json
from mua.utils.masking import HIDDEN

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
name: preflight
output: {folder}/out
model: {{path: {folder}/model, dtype: float32}}
environment: {{name: help_desk}}
trainer: {{steps: 1}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save_file({"a": np.zeros((10, 30), np.float32), "b": np.zeros(7, np.float32)}, tmp_path / "model/m.safetensors")
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


@pytest.fixture
def config(recipe: Path) -> ExperimentConfig:
    return load_config(recipe)


class _Models(http.server.BaseHTTPRequestHandler):
    answer: ClassVar[Json] = {}

    def do_GET(self) -> None:
        allowed = self.headers["Authorization"] == "Bearer good"
        self.send_response(200 if allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def _user(base: str, key: str = "none", model: str = "m") -> Check:
    return check_endpoint(LlmConfig(base_url=base, model=model, api_key=SecretStr(key)))


def _teacher(base: str, key: str = "none") -> Check:
    teacher = DistillationConfig(base_url=base.removesuffix("/v1"), api_key=SecretStr(key))
    return check_teacher(Mock(**{"config.algorithm.distillation": teacher}))


MODELS, SGLANG = {"data": [{"id": "qwen"}, {"id": "judge"}]}, {"model_path": "/models/large"}


@pytest.mark.parametrize(
    ("check", "answer", "state", "text"),
    [
        (partial(_user, key="good", model="qwen"), MODELS, "ok", "serves qwen"),
        (partial(_user, key="good", model="gpt"), MODELS, "failure", "set user.llm.model to: qwen, judge"),
        (partial(_user, key="bad", model="qwen"), MODELS, "failure", "answers 401; check user.llm.api_key"),
        (partial(_teacher, key="good"), SGLANG, "ok", "serves /models/large"),
        (partial(_teacher, key="bad"), SGLANG, "failure", "answers 401; check algorithm.distillation.api_key"),
        (partial(_teacher, key="good"), {"data": []}, "failure", "must be SGLang's own address, without /v1"),
    ],
)
def test_a_server_that_answers(
    address: str, monkeypatch: pytest.MonkeyPatch, check: Callable[[str], Check], answer: Json, state: str, text: str
) -> None:
    monkeypatch.setattr(_Models, "answer", answer)
    found = check(address)
    assert found.state == state
    assert text in found.line()


@pytest.mark.parametrize(
    ("check", "login", "section"), [(_user, "me:secret@", "user.llm"), (_teacher, "", "algorithm.distillation")]
)
def test_a_server_that_is_not_there(check: Callable[[str], Check], login: str, section: str) -> None:
    found = check(f"http://{login}127.0.0.1:9/v1")
    assert (found.state, f"{section}.base_url" in found.fix) == ("failure", True)
    assert "secret" not in found.line()


def test_versions_are_those_of_the_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_versions(RunNode(usable=False)).state == "ok"
    monkeypatch.setattr("mua.launch.checks.node.installed_version", lambda name: "0.1" if name == "torch" else "1")
    assert check_versions(RunNode(usable=False)).state == "warning"
    monkeypatch.setattr("mua.launch.checks.node.installed_version", lambda name: None if name == "sglang" else "1")
    broken = check_versions(RunNode(usable=False))
    assert broken.state == "failure"
    assert "install sglang" in broken.fix


def test_a_check_that_breaks_hides_no_other() -> None:
    (found,) = run_check("it", Mock(side_effect=ZeroDivisionError("oh")))
    assert (found.name, found.state, "ZeroDivisionError: oh" in found.text) == ("it", "failure", True)


def test_the_table_begins_with_what_is_wrong_and_names_nodes_that_differ() -> None:
    good, bad = Check("GPUs", "ok", "8"), Check("GPUs", "failure", "7", "fix it")
    disk = Check("disk", "ok", "much")
    lines = check_table([("n1", good), ("n1", disk), ("n2", bad), ("n3", good)])
    assert lines[0] == "failure  GPUs            7; fix it  [n2]"
    assert lines[1].endswith("8  [n1, n3]")
    assert lines[2].endswith("much")


def _two_ranks(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "mua.cli",
            "doctor", "preflight", str(recipe), *arguments,
        ],
        env=clean | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_check_each_other(recipe: Path, tmp_path: Path) -> None:
    model = [f"model.path={ROOT / 'tools/base'}", "model.max_length=2048", "rollout.max_tokens=1024"]
    done = _two_ranks(recipe, "megatron.data_parallel=2", *model, "--capture", str(tmp_path / "record"))
    assert done.returncode == 0, done.stderr
    for name in ("versions", "all-reduce", "clocks", "ports", "shared folder", "disk", "environment"):
        assert f"ok       {name}" in done.stdout
    assert "2 ranks, gloo" in done.stdout
    assert len(list((tmp_path / "record").glob("environment-*.json"))) == 1
    assert not list((tmp_path / "out").iterdir())


def test_the_record_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HARMLESS", "sk-0123456789abcdef")
    monkeypatch.setattr(sys, "argv", ["mua", "user.llm.api_key=top", "trainer.steps=1"])
    text = capture_environment(tmp_path).read_text()
    record = json.loads(text)
    assert "0123456789abcdef" not in text
    assert record["variables"]["WANDB_API_KEY"] == HIDDEN
    assert record["command"] == ["mua", f"user.llm.api_key={HIDDEN}", "trainer.steps=1"]
    assert record["packages"]["torch"]
    assert record["commit"] is None or len(record["commit"]) == 40


def test_the_address_file_comes_whole_and_goes_with_its_own_server(tmp_path: Path) -> None:
    file = tmp_path / "shared" / "user"
    ours = Service(tmp_path, file, "n1", 1234, "customer")
    publish_address(ours)
    lines = file.read_text().splitlines()
    assert lines[:2] == ["MUA_USER_BASE_URL=http://n1:1234/v1", "MUA_USER_MODEL=customer"]
    assert re.fullmatch(r"MUA_USER_API_KEY=[0-9a-f]{64}", lines[2])
    assert file.stat().st_mode & 0o077 == 0
    assert [path.name for path in file.parent.iterdir()] == ["user"]
    withdraw_address(Service(tmp_path, file, "n2", 1234, "customer"))  # another server took over; its address stays
    assert file.exists()
    withdraw_address(ours)
    assert not file.exists()
