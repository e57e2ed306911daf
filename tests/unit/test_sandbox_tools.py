"""The tools ``python`` and ``shell`` in episodes: offered beside the domain's, called by a canned policy through the
runner, over MCP by an agent of its own, and with environments in worker processes; whose fault a lost sandbox is; what
the configuration refuses; the command lines of all backends.

Not covered: Docker and Apptainer themselves, whose commands are only read here; attacks (``test_sandbox_attacks.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from mcp_support import listing, managed, play, server, some_task
from pydantic import ValidationError
from sandbox_support import below, need_sandboxes

from environments.help_desk.tasks import generate
from mua.config.schema import EnvironmentConfig
from mua.config.tools import SandboxConfig, ToolsConfig
from mua.environment.endpoint.services import Services
from mua.environment.extras import ExtraToolsNotStarted
from mua.environment.manager import EnvironmentInstance
from mua.environment.sandbox_tools import FRESH, SandboxFault
from mua.launch import checks
from mua.rollout.runner import EpisodeRunner
from mua.sandbox import backends
from mua.sandbox.box import INSIDE
from mua.trainer.rl import train
from mua.types import Json, Outcome, Trajectory
from mua.utils.errors import ConfigError, EnvironmentFault
from tests import odd_agents
from tests.rollout_fixtures import Script, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAMILY = chat_family("qwen3", False)
TASK = generate("train", 77, "cancel")
BOTH: Json = {"python": {}, "shell": {}, "sandbox": {"ready": 0}}


@pytest.fixture
def boxes() -> None:
    need_sandboxes()


def tools(**sandbox: Any) -> EnvironmentConfig:
    given = {"python": {}, "shell": {}, "sandbox": {"ready": 0, **sandbox}}
    return EnvironmentConfig.model_validate({"name": "help_desk", "tools": given})


async def episode(script: Script, agent: str = "", ordinal: int = 4, **environment: Any) -> Trajectory:
    """What one episode at the help desk gives, nothing left of its sandbox."""
    sections: dict[str, Any] = {"environment": {"tools": BOTH, **environment}, "rollout": {"max_retries": 0}}
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
def test_beside_worker_processes_and_tool_servers() -> None:
    async def both(instance: EnvironmentInstance) -> list[str]:
        assert [tool.name for tool in instance.tools()][-3:] == ["a", "run", "shell"]
        assert "without network" in next(tool.description for tool in instance.tools() if tool.name == "shell")
        results = [await instance.call("run", {"code": "print(1)"}), await instance.call("get_order", {"order": "x"})]
        return [result.text for result in results]

    given = {"python": {"name": "run", "description": "Runs it."}, "shell": {}, "sandbox": {"ready": 1}}
    config = {"name": "help_desk", "isolation": "process", "workers": 1, "tools": given, "mcp": [server(*listing("a"))]}
    assert play(EnvironmentConfig.model_validate(config), both) == ["1\n", '{"error": "no such order"}']


@pytest.mark.usefixtures("boxes")
def test_a_sandbox_that_a_program_ends_is_told_and_replaced() -> None:
    async def ends(instance: EnvironmentInstance) -> None:
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

    play(tools(files=500), ends)


@pytest.mark.usefixtures("boxes")
def test_a_sandbox_that_ends_between_calls_is_our_fault() -> None:
    async def ends(instance: EnvironmentInstance) -> None:
        await instance.call("shell", {"command": "true"})
        bwrap = next(process for process in below() if process.name() == "bwrap")
        bwrap.kill()
        await asyncio.sleep(0.2)
        with pytest.raises(SandboxFault, match="ended between two calls: killed by SIGKILL") as met:
            await instance.call("shell", {"command": "true"})
        assert isinstance(met.value, EnvironmentFault)
        assert met.value.passing

    play(tools(), ends)


@pytest.mark.usefixtures("boxes")
def test_cancelled_and_crowded_rollouts_leave_nothing() -> None:
    async def run() -> None:
        async with managed(tools(ready=2)) as manager:
            await manager.start()
            started = asyncio.Event()

            async def rollout(number: int) -> str:
                async with manager.instance(some_task(), number) as instance:
                    if number == 5:
                        started.set()
                        await instance.call("shell", {"command": "setsid nohup sleep 987 & sleep 987"})
                    await instance.call("shell", {"command": f"echo {number} > file"})
                    return (await instance.call("python", {"code": "print(open('file').read(), end='')"})).text

            rollouts = [asyncio.create_task(rollout(number)) for number in range(6)]
            await started.wait()
            assert await asyncio.gather(*rollouts[:5]) == [f"{number}\n" for number in range(5)]
            while not any(process.name() == "sleep" for process in below()):
                await asyncio.sleep(0.02)
            rollouts[5].cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollouts[5]
            await manager.close()
            assert not {process.name() for process in below()} & {"bwrap", "sleep"}
            await manager.start()

    asyncio.run(run())
    assert not {process.name() for process in below()} & {"bwrap", "sleep"}


REFUSED: dict[str, tuple[Json, str]] = {
    "one name": ({"python": {"name": "run"}, "shell": {"name": "run"}}, "both called 'run'"),
    "a bad name": ({"python": {"name": "run it"}}, "at most 64 letters"),
    "no tool": ({"sandbox": {"memory_mib": 9}}, "no tool that runs in it; add python"),
    "image": ({"shell": {}, "sandbox": {"image": "debian"}}, "image belongs to the backends docker and apptainer"),
    "no image": ({"shell": {}, "sandbox": {"backend": "docker"}}, "backend docker needs image"),
    "an option": ({"shell": {}, "sandbox": {"backend": "docker", "image": "--privileged"}}, "is no name of an image"),
    "network": ({"shell": {}, "sandbox": {"network": True}}, "the ports of its engines"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_configuration_refuses(case: str) -> None:
    section, why = REFUSED[case]
    with pytest.raises(ValidationError, match=why):
        ToolsConfig.model_validate(section)


def test_domains_of_the_tools() -> None:
    with pytest.raises(ValidationError, match=r"environment.tools.domains: 'retail' is no domain of this run"):
        experiment(environment={"tools": {"shell": {}, "domains": ["retail"]}})


@pytest.mark.usefixtures("boxes")
def test_a_name_of_the_domains_or_of_a_server_is_refused() -> None:
    given = {"python": {"name": "get_order"}}
    domains = EnvironmentConfig.model_validate({"name": "help_desk", "tools": given})
    with pytest.raises(ConfigError, match=r"the domain and environment.tools.python both have a tool 'get_order'; set"):
        play(domains, lambda instance: asyncio.sleep(0))
    config = {"name": "help_desk", "tools": {"shell": {}}, "mcp": [server(*listing("shell"))]}
    with pytest.raises(ConfigError, match=r"server 'desk' and environment.tools.shell both have a tool 'shell'; set"):
        play(EnvironmentConfig.model_validate(config), lambda instance: asyncio.sleep(0))
    check = checks.sandbox(experiment(environment={"tools": given}))
    assert (check.state, "both have a tool" in check.text) == ("failure", True)
    check = checks.sandbox(experiment(environment={"tools": {"python": {}}}))
    assert (check.state, check.text.startswith("bubblewrap, started in ")) == ("ok", True)


def test_a_missing_backend_is_found_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    why = "backend bubblewrap needs the program bwrap, which is not on PATH; install the package bubblewrap"
    config = experiment(environment={"tools": {"python": {}}})
    with pytest.raises(ConfigError, match=why):
        train(config)
    with pytest.raises(ConfigError, match=why):
        EpisodeRunner(config, only(TestDesk()), FAMILY, ScriptedSampler(FAMILY, lines()), Services())
    check = checks.sandbox(config)
    assert (check.state, why in check.text) == ("failure", True)


@pytest.mark.usefixtures("boxes")
def test_a_machine_that_does_not_limit_processes_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    real = backends._limits
    monkeypatch.setattr(backends, "_limits", lambda config, **given: real(config, counted=False))
    with pytest.raises(ExtraToolsNotStarted, match="does not keep it to 20 processes"):
        play(tools(processes=20), lambda instance: asyncio.sleep(0))
    assert not {process.name() for process in below()} & {"bwrap", "sleep"}


@pytest.mark.parametrize(
    ("ids", "low", "high"),
    [("0 0 4294967295", 1 << 20, 1 << 30), ("0 1000 1\n1 100000 65536", 1, 65537), ("0 100000 65536", 1, 65536)],
)
def test_a_sandbox_gets_an_id_that_there_is(tmp_path: Path, ids: str, low: int, high: int) -> None:
    (tmp_path / "map").write_text(f"   {ids}\n")
    found = {backends._unused(tmp_path / "map") for _ in range(50)}
    assert all(one is not None and low <= one < high for one in found)
    assert len(found) > 40
    (tmp_path / "map").write_text("0 1000 1\n")
    assert backends._unused(tmp_path / "map") is None


def test_a_backend_that_does_not_work_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def program(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program("docker", "echo 'Unable to find image local' >&2; exit 125")
    docker = tools(backend="docker", image="some:image")
    with pytest.raises(
        ExtraToolsNotStarted, match=r"sandbox \(docker\) does not start: Unable to find image local"
    ) as met:
        play(docker, lambda instance: asyncio.sleep(0))
    assert not isinstance(met.value, EnvironmentFault)
    program("docker", '[ "$1" = kill ] || exec sleep 60')
    with pytest.raises(ExtraToolsNotStarted, match=r"not ready within 0\.3 s"):
        play(tools(backend="docker", image="some:image", start_seconds=0.3), lambda instance: asyncio.sleep(0))
    assert not [process for process in below() if process.name() == "sleep"]


def after(command: list[str], *words: str) -> list[str]:
    """What follows each of ``words``, where it first occurs."""
    return [command[command.index(word) + 1] for word in words]


def test_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("APPTAINERENV_SECRET", "xyzzy")
    monkeypatch.setenv("SECRET", "xyzzy")
    limits = {"memory_mib": 100, "disk_mib": 10, "processes": 5}
    bubble = backends.launch(SandboxConfig(**limits), 3)
    assert {"--unshare-all", "--die-with-parent", "--as-pid-1", "--clearenv"} <= set(bubble.command)
    assert "--share-net" not in bubble.command
    assert (bubble.variables, bubble.inherits) == ({}, (3,))
    config = SandboxConfig(backend="docker", image="some:image", **limits)
    docker = backends.launch(config, 3)
    line = docker.command
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
    assert docker.end == ["/bin/docker", "kill", *after(line, "--name")]
    assert not docker.inherits
    assert after(backends.launch(config.model_copy(update={"network": True}), 3).command, "--network") == ["bridge"]
    names = {backends.launch(config, 3).end[-1] for _ in range(9) if docker.end}  # type: ignore[index]
    assert len(names) == 9
    apptainer = backends.launch(SandboxConfig(backend="apptainer", image="/images/some.sif", **limits), 3)
    line = apptainer.command
    assert line[:2] == ["/bin/apptainer", "exec"]
    assert {"--userns", "--containall", "--cleanenv", "--no-init", "--no-home"} <= set(line)
    assert after(line, "--network", "--drop-caps", "--scratch", "/images/some.sif") == [
        "none",
        "all",
        "/work",
        "python3",
    ]
    for one in (docker, apptainer):
        assert "PATH" in one.variables
        assert "xyzzy" not in str(one)


def test_all_backends_take_the_same_program() -> None:
    """What a container runs, without one: it refuses to serve where it is not process 1."""
    line = [backends.PYTHON, "-I", "-c", backends.BOOT, "{}"]
    text = json.dumps(INSIDE.read_text(encoding="utf-8")) + "\n"
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip().endswith("its first process is not process 1")
    done = subprocess.run(line, input="", capture_output=True, text=True, timeout=60, check=False)
    assert "no program came" in done.stderr
