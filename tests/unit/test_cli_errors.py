"""The command line: what each verb calls, exit statuses, one line for what a person can fix.

The parts the verbs call are replaced here by recorders (their own tests are elsewhere); everything before the call,
configuration and output folder included, is real.
"""

from __future__ import annotations

import errno
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mua.cli import app
from mua.config.schema import ExperimentConfig
from mua.observe.output import LOCK_FILE
from mua.utils.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    Preempted,
    RankLost,
    UserFault,
    exit_status,
)

BASE = """\
name: base
output: out
model: {path: models/tiny, max_length: 512}
environment: {name: help_desk}
rollout: {max_tokens: 500}
trainer: {steps: 3}
"""

VERBS = [
    (["train"], "mua.trainer.rl", "train", "config.yaml"),
    (["sft"], "mua.trainer.sft", "fine_tune", "config.yaml"),
    (["eval"], "mua.trainer.evaluation.evaluator", "evaluate", "config-eval.yaml"),
    (["rollout"], "workbench.rollout", "show_rollout", "config-rollout.yaml"),
    (["doctor", "sync"], "mua.trainer.rl", "check_sync", "config-doctor.yaml"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MUA_TRACEBACK", raising=False)
    (tmp_path / "x.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "models").mkdir()
    (tmp_path / "models/tiny").symlink_to(Path(__file__).parents[2] / "tools/base")
    (tmp_path / "d.jsonl").write_text("{}", encoding="utf-8")
    return tmp_path


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, Callable[..., None]], None]:
    """Put a function in the place of the one a verb calls, without importing what surrounds it."""

    def put(module: str, name: str, function: Callable[..., None]) -> None:
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, function)
        setattr(stand_in, "require_complete", lambda *_: None)  # noqa: B010
        monkeypatch.setitem(sys.modules, module, stand_in)
        parent, _, child = module.rpartition(".")
        __import__(parent)
        monkeypatch.setattr(sys.modules[parent], child, stand_in, raising=False)

    return put


def mua(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(("words", "module", "name", "record"), VERBS)
def test_a_verb_loads_the_configuration_and_calls_its_part(
    folder: Path, replace: Callable[..., None], words: list[str], module: str, name: str, record: str
) -> None:
    calls: list[ExperimentConfig] = []
    replace(module, name, lambda config, *_: calls.append(config))  # those that train are told of signals, too
    result = mua(*words, "x.yaml", "trainer.steps=7", "sft.data=d.jsonl")
    assert result.exit_code == 0, result.output
    assert [config.trainer.steps for config in calls] == [7]
    assert {path.name for path in Path("out").iterdir()} == {record, LOCK_FILE, "logs"}


def raising(error: BaseException) -> Callable[..., None]:
    def function(*_: Any) -> None:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (ConfigError("a: wrong"), "mua: a: wrong", 2),
        (EngineError("engine 0 died"), "mua: engine 0 died", 75),
        (EngineError("engine.extra.port", passing=False), "mua: engine.extra.port", 2),
        (DeadlineExceeded("too late"), "mua: too late", 75),
        (RankLost("rank 1 is gone"), "mua: rank 1 is gone", 75),
        (UserFault("HTTP 401"), "mua: HTTP 401", 2),
        (Preempted("asked to leave"), "mua: asked to leave; the run is not finished", 75),
        (UserFault("no answer", passing=True), "mua: no answer", 75),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "mua: No space left on device (MUA_TRACEBACK=1 shows where)",
            2,
        ),
        (PermissionError(errno.EACCES, "Permission denied", "out/a"), "mua: out/a: Permission denied", 2),
        (ExceptionGroup("tasks", [ConfigError("a: wrong"), ConfigError("a: wrong")]), "mua: a: wrong", 2),
        (ExceptionGroup("tasks", [EngineError("died"), EngineError("died")]), "mua: died", 75),
    ],
)
def test_what_a_person_is_meant_to_read_is_one_line(
    folder: Path, replace: Callable[..., None], error: Exception, line: str, status: int
) -> None:
    replace("mua.trainer.rl", "train", raising(error))
    result = mua("train", "x.yaml")
    assert result.exit_code == status
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "error", [ValueError("bug"), OSError(errno.EIO, "bug"), ExceptionGroup("t", [ValueError("b")])]
)
def test_a_fault_of_the_program_keeps_its_traceback(
    folder: Path, replace: Callable[..., None], error: Exception
) -> None:
    replace("mua.trainer.rl", "train", raising(error))
    assert mua("train", "x.yaml").exception is error


def test_a_group_passes_only_as_a_whole() -> None:
    assert exit_status(ExceptionGroup("tasks", [EngineError("died"), ConfigError("wrong")])) == 2


def test_an_error_keeps_what_it_says_between_processes() -> None:
    again = pickle.loads(pickle.dumps(UserFault("no answer", passing=True)))
    assert (str(again), again.passing) == ("no answer", True)


def test_ctrl_c_is_one_line_and_130(folder: Path, replace: Callable[..., None]) -> None:
    replace("mua.trainer.rl", "train", raising(KeyboardInterrupt()))
    result = mua("train", "x.yaml")
    assert (result.exit_code, result.stderr) == (130, "mua: interrupted\n")
