"""The tool server ``sandbox`` in episodes: its tools beside the domain's, called by a canned policy through the runner
and over MCP by an agent of its own; whose fault a lost sandbox is; what its settings refuse; the command lines of all
backends.

Not covered: Docker and Apptainer themselves, whose commands are only read here; attacks (``test_sandbox_attacks.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp_support import environment, own_server, play
from pydantic import ValidationError
from sandbox_support import below, need_sandboxes

from environments.help_desk.tasks import generate
from environments.servers import sandbox as sandbox_server
from environments.servers.sandbox import FRESH, SandboxSettings, apptainer, docker
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentInstance
from mua.environment.mcp.health import ServerNotStarted
from mua.rollout.runner import EpisodeRunner
from mua.types import Json, Outcome, Trajectory
from mua.users.scoring import sandbox as sandbox_module
from mua.users.scoring.sandbox import BOOT, INSIDE, PYTHON, SandboxLimits, bubblewrap
from mua.utils.errors import EnvironmentFault
from tests import odd_agents
from tests.rollout_fixtures import Script, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK = generate("train", 77, "cancel")


@pytest.fixture
def boxes() -> None:
    need_sandboxes()


def desk(path: str = "", **settings: Any) -> EnvironmentConfig:
    """A help desk with the sandbox; ``path``: where the server looks for programs."""
    section = own_server("sandbox", settings)
    section["env"] |= {"PATH": path} if path else {}
    return environment(section)


async def episode(script: Script, agent: str = "", ordinal: int = 4) -> Trajectory:
    """What one episode at the help desk gives, nothing left of its sandbox."""
    sections: dict[str, Any] = {"environment": {"mcp": [own_server("sandbox")]}, "rollout": {"max_retries": 0}}
    if agent:
        sections["agent"] = {"function": f"tests.odd_agents:{agent}", "stop_seconds": 0.5}
    domain, config = TestDesk(), experiment(**sections)
    runner = EpisodeRunner(config, only(domain), FAMILY, ScriptedSampler(FAMILY, script), Services())
    try:
        (trajectory,) = (await runner.group(TASK, ordinal, 1, temperature=1.0)).trajectories
    finally:
        await runner.close()
    assert not [process for process in below() if process.name() == "bwrap"]
    return trajectory


def told(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


@pytest.mark.usefixtures("boxes")
async def test_a_policy_runs_programs_in_an_episode() -> None:
    order = TASK.data["known"]["order"]
    trajectory = await episode(
        lines(
            call("shell", command="echo 6 7 > numbers; pwd"),
            call("python", code="a, b = map(int, open('numbers').read().split())\nprint(a * b)"),
            call("python", code="raise ValueError('no')"),
            call("python", kode="print(1)"),
            call("python", code="print(1, end='')") + call("shell", command="kill -9 $$") + call("shell", command=":"),
            call("shell", command="printf 'a\\0b\\377'"),
            call("cancel_order", order=order),
            "Done.",
        )
    )
    assert trajectory.outcome is Outcome.USER_STOP, trajectory.error
    assert trajectory.reward == 1.0
    texts = told(trajectory)
    assert texts[:2] == ["/work\n", "42\n"]
    assert texts[2].endswith("ValueError: no\n[exit status 1]")
    assert texts[3].startswith("error: ")
    assert texts[4:7] == ["1", "[killed by SIGKILL]", "(no output)"]
    assert texts[7] == "a\0b\ufffd"
    assert trajectory.metrics["tool_errors/python"] == 1
    assert trajectory.metrics["tool_calls/shell"] == 4
    assert trajectory.metrics["malformed"] == 1


@pytest.mark.usefixtures("boxes")
async def test_an_agent_of_its_own_has_them_over_mcp() -> None:
    odd_agents.SEEN.clear()
    trajectory = await episode(lambda session, turn: "Well.", "runs_programs")
    assert trajectory.outcome is Outcome.AGENT_END, trajectory.error
    assert odd_agents.SEEN == ["(no output)", ["python", "shell"], "kept\n\n"]


@pytest.mark.usefixtures("boxes")
def test_a_sandbox_that_a_program_ends_is_told_and_replaced() -> None:
    async def ends(instance: EnvironmentInstance) -> None:
        assert [tool.name for tool in instance.tools()][-2:] == ["python", "shell"]
        await instance.call("shell", {"command": "echo kept > file"})
        lost = await instance.call("python", {"code": "for i in range(9999): open(str(i), 'w')"})
        assert lost.text == (
            "[the sandbox has ended: there were more than 500 files] [its files are gone; the next call gets a fresh "
            "one]"
        )
        assert lost.error
        fresh = await instance.call("shell", {"command": "cat file"})
        assert fresh.text.startswith(f"{FRESH}\ncat: file: No such file")
        assert (await instance.call("shell", {"command": "echo again"})).text == "again\n"
        for wrong in ({}, {"command": 7}, {"command": "true", "x": 1}):
            assert (await instance.call("shell", wrong)).text.startswith("error: ")

    play(desk(files=500), ends)


@pytest.mark.usefixtures("boxes")
def test_a_sandbox_that_ends_between_calls_is_replaced() -> None:
    async def ends(instance: EnvironmentInstance) -> None:
        await instance.call("shell", {"command": "true"})
        bwrap = next(process for process in below() if process.name() == "bwrap")
        bwrap.kill()
        await asyncio.sleep(0.2)
        assert (await instance.call("shell", {"command": "echo again"})).text == f"{FRESH}\nagain\n"

    play(desk(), ends)


REFUSED: dict[str, Json] = {
    "image": {"image": "debian"},
    "no image": {"backend": "docker"},
    "an option": {"backend": "docker", "image": "--privileged"},
    "network": {"network": True},
    "a key": {"enabled": True},
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_settings_refuse(case: str) -> None:
    with pytest.raises(ValidationError):
        SandboxSettings.model_validate(REFUSED[case])


def test_what_keeps_a_server_from_starting_is_told_in_one_error(tmp_path: Path) -> None:
    def not_started(told: str, path: str = "", **settings: Any) -> None:
        with pytest.raises(ServerNotStarted, match=told):
            play(desk(path, **settings), lambda instance: asyncio.sleep(0))

    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    not_started("the program bwrap, which is not on PATH", "/nowhere")
    not_started("sandbox.*backend docker needs image", backend="docker")
    path = f"{tmp_path}:{os.environ['PATH']}"
    docker = {"backend": "docker", "image": "some:image"}
    program("docker", "echo 'Unable to find image local' >&2; exit 125")
    not_started(r"sandbox \(docker\) does not start: Unable to find image local", path, **docker)
    program("docker", '[ "$1" = kill ] || exec sleep 60')
    not_started(r"not ready within 0\.3 s", path, start_seconds=0.3, **docker)
    assert not [process for process in below() if process.name() == "sleep"]


@pytest.mark.usefixtures("boxes")
async def test_a_machine_that_does_not_limit_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sandbox_module.limits_text
    monkeypatch.setattr(sandbox_module, "limits_text", lambda limits, **given: real(limits, counted=False))
    with pytest.raises(EnvironmentFault, match="does not keep it to 20 processes"):
        async with sandbox_server.sandbox_tools(SandboxSettings(processes=20)):
            pass
    assert not {process.name() for process in below()} & {"bwrap", "sleep"}


@pytest.mark.parametrize(
    ("ids", "low", "high"),
    [("0 0 4294967295", 1 << 20, 1 << 30), ("0 1000 1\n1 100000 65536", 1, 65537), ("0 100000 65536", 1, 65536)],
)
def test_a_sandbox_gets_an_id_that_there_is(tmp_path: Path, ids: str, low: int, high: int) -> None:
    (tmp_path / "map").write_text(f"   {ids}\n")
    found = {sandbox_module._unused(tmp_path / "map") for _ in range(50)}
    assert all(one is not None and low <= one < high for one in found)
    assert len(found) > 40
    (tmp_path / "map").write_text("0 1000 1\n")
    assert sandbox_module._unused(tmp_path / "map") is None


def after(command: list[str], *words: str) -> list[str]:
    """What follows each of ``words``, where it first occurs."""
    return [command[command.index(word) + 1] for word in words]


def test_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(sandbox_module, "GROUPS", Path("/nowhere"))
    monkeypatch.setenv("APPTAINERENV_SECRET", "xyzzy")
    monkeypatch.setenv("SECRET", "xyzzy")
    limits = {"memory_mib": 100, "disk_mib": 10, "processes": 5}
    bubble = bubblewrap(SandboxLimits(**limits), 3)
    assert {"--unshare-all", "--die-with-parent", "--as-pid-1", "--clearenv"} <= set(bubble.command)
    assert "--share-net" not in bubble.command
    assert (bubble.variables, bubble.inherits) == ({}, (3,))
    config = SandboxSettings(backend="docker", image="some:image", **limits)
    started = docker(config, 3)
    line = started.command
    assert line[:3] == ["/bin/docker", "run", "--rm"]
    assert {"--interactive", "--read-only"} <= set(line)
    flags = (
        "--network",
        "--cap-drop",
        "--security-opt",
        "--pull",
        "--user",
        "--memory",
        "--memory-swap",
        "--pids-limit",
    )
    assert after(line, *flags) == ["none", "ALL", "no-new-privileges", "never", "65534:65534", "184m", "184m", "6"]
    assert after(line, "--", "--entrypoint") == ["some:image", "python3"]
    assert started.end == ["/bin/docker", "kill", *after(line, "--name")]
    assert not started.inherits
    assert after(docker(config.model_copy(update={"network": True}), 3).command, "--network") == ["bridge"]
    names = {docker(config, 3).end[-1] for _ in range(9)}  # type: ignore[index]
    assert len(names) == 9
    contained = apptainer(SandboxSettings(backend="apptainer", image="/images/some.sif", **limits), 3)
    line = contained.command
    assert line[:2] == ["/bin/apptainer", "exec"]
    assert {"--userns", "--containall", "--cleanenv", "--no-init", "--no-home"} <= set(line)
    assert after(line, "--network", "--drop-caps", "--scratch", "/images/some.sif") == [
        "none",
        "all",
        "/work",
        "python3",
    ]
    for one in (started, contained):
        assert "PATH" in one.variables
        assert "xyzzy" not in str(one)


def test_all_backends_take_the_same_program() -> None:
    """What a container runs, without one: it refuses to serve where it is not process 1."""
    line = [PYTHON, "-I", "-c", BOOT, "{}"]
    text = json.dumps(INSIDE.read_text(encoding="utf-8")) + "\n"
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().endswith("its first process is not process 1")
    done = subprocess.run(line, input="", capture_output=True, text=True, timeout=60, check=False)
    assert "no program came" in done.stderr
