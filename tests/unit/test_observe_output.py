"""One run an output folder: real processes, killed, forked from and waited for.

Not covered: folders shared over a network, whose locks are their server's.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mua.cli import app
from mua.config.schema import ExperimentConfig
from mua.observe.output import LOCK_FILE, only_run, output_of
from mua.utils.errors import ConfigError
from tools.pretrain import BASE

HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from mua.observe.output import only_run
with only_run(Path(sys.argv[1])):
    {then}
    print("held", child, flush=True)
    sys.stdin.readline()
"""
ALONE = "child = 0"
FORKED = """r, w = os.pipe()
    child = os.fork() or (os.write(w, b".") and time.sleep(600) or os._exit(0))
    os.read(r, 1)"""
"""The child has run by the time that the folder is said to be held."""
STARTED = "child = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid"


@contextmanager
def holder(folder: Path, then: str = ALONE) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the lock until its standard input ends, and a child of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.format(then=then), str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    child = 0
    try:
        assert process.stdout is not None
        word, number = process.stdout.readline().split()
        assert word == "held"
        child = int(number)
        yield process, child
    finally:
        process.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_second_run_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _), pytest.raises(ConfigError) as error, only_run(tmp_path):
        pass
    said = str(error.value)
    assert f"process {process.pid} on {socket.gethostname()}, since 2" in said
    assert f"writes into {tmp_path}; wait for it, end it, or choose another output" in said


def test_kill_9_frees_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, _):
        process.kill()
        process.wait()
        with only_run(tmp_path):
            pass


@pytest.mark.parametrize("then", [FORKED, STARTED])
def test_a_child_that_outlives_the_run_does_not_hold_it(tmp_path: Path, then: str) -> None:
    with holder(tmp_path, then) as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)  # it is still there
        with only_run(tmp_path):
            pass


def test_an_attempt_that_slurm_started_again_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with holder(tmp_path) as (process, _):
        monkeypatch.setattr("mua.observe.output.time.sleep", lambda _: process.kill())  # it ends while this one waits
        with only_run(tmp_path):
            assert process.wait() == -signal.SIGKILL


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), only_run(tmp_path):
        assert "this file system has no locks" in caplog.text


def test_no_command_writes_into_a_folder_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = BASE.resolve()
    monkeypatch.chdir(tmp_path)
    said = '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}'
    Path("d.jsonl").write_text(said)
    Path("x.yaml").write_text(
        f"name: x\noutput: out\nmodel: {{path: {base}, max_length: 1024}}\nenvironment: {{name: help_desk}}\n"
        "rollout: {max_tokens: 1000}\ntrainer: {steps: 1}\nsft: {data: d.jsonl}\n"
    )
    Path("out").mkdir()
    with holder(Path("out").resolve()) as (process, _):
        for verb in (["train"], ["sft"], ["eval"], ["rollout"], ["doctor", "sync"]):
            result = CliRunner().invoke(app, [*verb, "x.yaml"])
            assert (result.exit_code, f"(process {process.pid} on " in result.stderr) == (2, True)
    assert [path.name for path in Path("out").iterdir()] == [LOCK_FILE]  # its configuration is still the other's


def test_other_ranks_do_not_ask_for_the_lock_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExperimentConfig(
        name="x", output=tmp_path, model={"path": "m"}, environment={"name": "help_desk"}, trainer={"steps": 1}
    )
    with holder(tmp_path):
        monkeypatch.setenv("RANK", "1")
        with output_of(config):
            pass
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(ConfigError), output_of(config):
            pass
