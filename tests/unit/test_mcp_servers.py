"""Tool servers over standard input and output, against one that misbehaves on order: each fault is typed and costs the
episode that met it and no other; nothing of a server outlives its rollout or the run; isolation, limits, retries.

Not here: servers behind a URL (``test_mcp_http.py``), the servers that others wrote and a training step with them
(``e2e/test_tool_servers.py``), and what it costs (``tools/bench/tool_servers.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from mcp_support import environment, gone, listing, managed, play, server, some_task

from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentInstance
from mua.environment.mcp.health import BURST, Flood, ServerFaultKind, ServerNotStarted, SpeechBudget, ToolServerFault
from mua.environment.mcp.servers import ToolServers
from mua.environment.protocol import ToolResult
from mua.rollout import runner as runner_module
from mua.rollout.runner import EpisodeRunner
from mua.types import Json, Outcome, Trajectory
from mua.utils.errors import ConfigError, EnvironmentFault, MuaError
from tests.rollout_fixtures import ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

FAULTS: dict[str, tuple[dict[str, Any], ServerFaultKind, str]] = {
    "crash": ({}, ServerFaultKind.CRASHED, "exit status 7.*out of luck"),
    "hang": ({}, ServerFaultKind.HUNG, "call_seconds"),
    "flood_errors": ({}, ServerFaultKind.HUNG, "call_seconds"),
    "big": ({"size": 50_000_000}, ServerFaultKind.FLOODED, "message_bytes"),
    "flood_output": ({}, ServerFaultKind.FLOODED, "message_bytes"),
    "flood_lines": ({}, ServerFaultKind.FLOODED, "without end"),
    "flood_notifications": ({}, ServerFaultKind.FLOODED, "without end"),
    "garbage": ({}, ServerFaultKind.GARBAGE, "no message of JSON-RPC"),
    "garbage_bytes": ({}, ServerFaultKind.GARBAGE, "no message of JSON-RPC"),
    "surrogate": ({}, ServerFaultKind.GARBAGE, "no message of JSON-RPC"),
    "shapeless": ({}, ServerFaultKind.GARBAGE, "none that the protocol knows"),
}


@pytest.mark.parametrize("tool", FAULTS)
def test_a_fault_is_typed_and_no_other_session_meets_it(tool: str) -> None:
    arguments, kind, told = FAULTS[tool]
    seconds = 0.3 if kind is ServerFaultKind.HUNG else 30.0

    async def run() -> None:
        async with managed(environment(server(call_seconds=seconds))) as manager:
            async with manager.instance(some_task(), 1) as other:
                with pytest.raises(ToolServerFault, match=told) as met:
                    async with manager.instance(some_task(), 1) as instance:
                        await instance.call(tool, arguments)
                assert met.value.kind is kind
                assert met.value.passing
                assert isinstance(met.value, EnvironmentFault), "the episode is tried again"
                assert (await other.call("echo", {"text_": "still here"})).text == "still here"
            async with manager.instance(some_task(), 1) as again:
                assert (await again.call("echo", {"text_": "again"})).text == "again"

    asyncio.run(run())


@pytest.mark.parametrize("tool", ["change_tools", "change_silently"])
def test_tools_that_change_in_mid_episode_are_a_fault(tool: str) -> None:
    async def episode(instance: EnvironmentInstance) -> None:
        assert (await instance.call(tool, {})).text == "changed"
        with pytest.raises(ToolServerFault, match=r"tools changed .*echo") as met:
            await instance.call("echo", {"text_": "x"})
        assert met.value.kind is ServerFaultKind.TOOLS_CHANGED

    play(environment(server()), episode)


def test_what_a_server_answers_is_a_result() -> None:
    async def episode(instance: EnvironmentInstance) -> list[ToolResult]:
        found = [await instance.call(name, {}) for name in ("wrong", "stray", "ask", "kinds", "structured")]
        return [*found, await instance.call("echo", {"text_": "\ud800"}), await instance.call("big", {"size": 5000})]

    wrong, stray, ask, kinds, structured, broken, big = play(environment(server("--banner", result_chars=300)), episode)
    assert (wrong.text, wrong.error) == ("this did not work", True)
    assert stray.text == "answered all the same"
    assert "Sampling not supported" in ask.text
    assert kinds.text.splitlines() == [
        "a text", "[image: image/png, 3 bytes, not shown]", "[audio: audio/wav, 2 bytes, not shown]",
        "[resource file:///a.txt (text/plain)]", "inside", "[resource file:///b.bin: 3 bytes, not shown]",
        "[link to report: file:///c.pdf (application/pdf)]",
    ]  # fmt: skip
    assert "unpaired surrogate" in broken.text
    assert structured.text == '{"answer": 42}'
    assert big.text == "x" * 300 + "\n[cut: the first 300 of 5000 characters are shown]"


def test_nothing_stays_open_where_another_server_cannot_be_had() -> None:
    async def run() -> None:
        async with managed(environment(server(), server(name="other", prefix="other_"))) as manager:
            async with manager.instance(some_task(), 1):
                pass
            one, other = manager._servers.pools.values()  # type: ignore[union-attr]

            async def fail() -> None:
                raise ToolServerFault("not today", ServerFaultKind.CRASHED)

            for take in (fail, lambda: asyncio.sleep(60)):
                other.take = take  # type: ignore[method-assign, assignment]
                with pytest.raises((ToolServerFault, TimeoutError)):
                    async with asyncio.timeout(3), manager.instance(some_task(), 1):
                        pass
                while one.alive > len(one._ready):
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_the_domain_keeps_its_tools_and_its_verdict() -> None:
    async def episode(instance: EnvironmentInstance) -> None:
        names = [schema.name for schema in instance.tools()]
        assert names.index("get_order") < names.index("echo")
        assert not (await instance.call("get_order", {"order": "none"})).text.startswith("none")
        assert (await instance.call("echo", {"text_": "2"})).text == "2"

    for isolation in ("inline", "thread", "process"):
        play(environment(server(), isolation=isolation, workers=1), episode)


def test_rollouts_are_kept_apart_as_configured() -> None:
    async def run(**settings: Any) -> tuple[str, bool]:
        """What a second rollout, and one after both, find of the first's state; whether that is the same process."""
        async with managed(environment(server(**settings))) as manager:
            async with manager.instance(some_task(), 1) as first, manager.instance(some_task(), 2) as second:
                await first.call("put", {"key": "a", "value": "1"})
                there = (await second.call("get", {"key": "a"})).text
                pids = {(await one.call("pid", {})).text for one in (first, second)}
            async with manager.instance(some_task(), 3) as third:
                return there, (await third.call("pid", {})).text in pids

    assert asyncio.run(run()) == ("nothing", False)
    assert asyncio.run(run(isolation="process", ready=2)) == ("nothing", False)
    assert asyncio.run(run(reuse=True)) == ("nothing", True)
    assert asyncio.run(run(isolation="shared")) == ("1", True)


def test_sessions_are_opened_before_they_are_needed_and_never_beyond_their_number() -> None:
    async def run() -> None:
        async with managed(environment(server(ready=3, max_sessions=4))) as manager:
            servers = manager._servers
            assert isinstance(servers, ToolServers)
            pool = servers.pools["desk"]

            async def rollout(number: int) -> None:
                async with manager.instance(some_task(), number) as instance:
                    assert pool.alive <= 4
                    assert (await instance.call("echo", {"text_": str(number)})).text == str(number)

            await asyncio.gather(*map(rollout, range(8)))
            while len(pool._ready) < 3 and pool._tasks:
                await asyncio.wait(pool._tasks)
            assert 1 <= len(pool._ready) <= 3
            opening, missing = pool._opening, 3 - len(pool._ready)
            async with manager.instance(some_task(), 9):
                assert pool._opening <= opening + 1 + missing
        assert pool.alive == 0

    asyncio.run(run())


@pytest.mark.parametrize("shared", [{"reuse": True}, {"isolation": "shared"}])
def test_a_safe_call_is_tried_again_where_no_state_is_lost(tmp_path: Path, shared: dict[str, Any]) -> None:
    async def episode(instance: EnvironmentInstance) -> str:
        return (await instance.call("fragile", {})).text

    twice = ("--twice", str(tmp_path / "count"))
    assert play(environment(server(*twice, retries=1, **shared)), episode) == "the second time it works"
    (tmp_path / "count").unlink()
    with pytest.raises(ToolServerFault, match="exit status 7"):
        play(environment(server(*twice, retries=1)), episode)
    with pytest.raises(ToolServerFault, match="exit status 7"):  # no tool that says it may be called twice
        play(environment(server(retries=1, **shared)), lambda instance: instance.call("crash", {}))


@pytest.mark.parametrize("tool", ["crash", "hang", "flood_lines", "garbage", "change_silently"])
def test_a_policy_that_ends_its_server_is_scored(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)
    seconds = 0.3 if tool == "hang" else 30.0

    async def run() -> Trajectory:
        family, domain = chat_family("qwen3", False), TestDesk()
        settings: Json = {"mcp": [server(call_seconds=seconds)], "name": "help_desk"}
        config = experiment(rollout={"max_retries": 1}, environment=settings)
        sampler = ScriptedSampler(family, lines(call(tool), call("echo", text_="x"), "Done."))
        runner = EpisodeRunner(config, only(domain), family, sampler, Services())
        try:
            return await runner.trajectory(some_task(), 4, 0, temperature=1.0)
        finally:
            await runner.close()

    found = asyncio.run(run())
    assert (found.outcome, found.scored, found.attempts) == (Outcome.MALFORMED, True, 2), found.error
    assert found.sampled_tokens > 0


# ---- nothing stays


def test_nothing_of_a_server_outlives_its_rollout() -> None:
    async def run() -> None:
        async with managed(environment(server("--stubborn"))) as manager:
            async with manager.instance(some_task(), 1) as instance:
                pids = [int((await instance.call(name, {})).text) for name in ("pid", "detach", "detach")]
            assert all([await gone(pid) for pid in pids])
            started = asyncio.Event()

            async def episode() -> None:
                async with manager.instance(some_task(), 1) as instance:
                    pids[:] = [int((await instance.call(name, {})).text) for name in ("pid", "detach")]
                    started.set()
                    await instance.call("hang", {})

            cancelled = asyncio.create_task(episode())
            await started.wait()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert all([await gone(pid) for pid in pids])

    asyncio.run(run())


KILLED = """
    import asyncio, sys
    from mcp_support import environment, managed, server, some_task

    async def main():
        async with managed(environment(server("--stubborn", ready=1))) as manager:
            async with manager.instance(some_task(), 1) as instance:
                print(*[(await instance.call(name, {})).text for name in ("pid", "detach")], flush=True)
                await instance.call("flood_errors", {})

    asyncio.run(main())
"""


def test_nothing_of_a_server_outlives_a_run_that_is_killed() -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    line = [sys.executable, "-c", textwrap.dedent(KILLED)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True) as run:
        assert run.stdout is not None
        pids = [int(pid) for pid in run.stdout.readline().split()]
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        keepers = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        run.send_signal(signal.SIGKILL)
    assert len(pids) == 2
    assert all(asyncio.run(gone(pid)) for pid in pids + keepers)


def test_a_server_sees_few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_OF_THE_RUN", "x")

    async def episode(instance: EnvironmentInstance) -> Any:
        return json.loads((await instance.call("variables", {})).text)

    seen = play(environment(server(env={"TOKEN": "t"})), episode)
    assert seen["TOKEN"] == "t"
    assert not {name for name in seen if "SECRET" in name or name.startswith("PYTHON")}


# ---- what is refused before an episode


def opened(*servers: Any) -> list[str]:
    async def episode(instance: EnvironmentInstance) -> list[str]:
        return [schema.name for schema in instance.tools()]

    return play(environment(*servers), episode)


def test_tools_are_chosen_and_named() -> None:
    chosen = server(allow=["echo", "put", "get"], block=[], rename={"put": "store"}, prefix="kv_")
    names = opened(
        chosen, server("--tools", json.dumps([{"name": "echo", "inputSchema": {"type": "object"}}]), name="b")
    )
    assert names[-4:] == ["kv_echo", "store", "kv_get", "echo"]


MISTAKES: dict[str, tuple[list[Any], str]] = {
    "no program": ([server(command="no-such-program")], r"command: no program 'no-such-program' is on PATH"),
    "no folder": ([server(cwd="/no/such")], "cwd: there is no folder /no/such"),
    "not there": ([server(allow=["ecko"])], "allow names 'ecko', a tool that it does not have; did you mean 'echo'"),
    "two servers": (
        [server(*listing("a")), server(*listing("a"), name="other")],
        r"server 'desk' and the server 'other' both have a tool 'a'; in environment.mcp set prefix or rename",
    ),
    "the domain": ([server(*listing("get_order"))], "the domain and the server 'desk' both have a tool 'get_order'"),
    "a name": ([server(*listing("files/read"))], "'files/read' has a name that policies cannot call"),
    "no schema": (
        [server(*listing("a", schema={"type": "object", "properties": {"x": {"type": "x"}}}))],
        "tool 'a' is no JSON Schema",
    ),
    "elsewhere": (
        [server(*listing("a", schema={"type": "object", "properties": {"x": {"$ref": "http://x.test/y"}}}))],
        "is no JSON Schema.*no path to a part of it",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_found_before_the_first_episode(case: str) -> None:
    servers, told = MISTAKES[case]
    with pytest.raises(ConfigError, match=told):
        opened(*servers)


def test_a_server_that_does_not_start_ends_the_run() -> None:
    with pytest.raises(ServerNotStarted, match=r"'desk': cannot be opened: .*exit status 3.*no licence") as met:
        opened(server("--exit", "no licence"))
    assert not isinstance(met.value, EnvironmentFault), "it is not tried again"
    assert isinstance(met.value, MuaError)
    with pytest.raises(ServerNotStarted, match="start_seconds"):
        opened(server("--mute", start_seconds=0.3))
    with pytest.raises(ServerNotStarted, match="process ended"):
        opened(server("--leaves"))
    with pytest.raises(ServerNotStarted, match=r"none that the protocol knows.*ListToolsResult"):
        opened(server(*listing("a", schema={"type": "string"})))


def test_answers_are_never_a_flood() -> None:
    budget = SpeechBudget(1000)
    for _ in range(10 * BURST):
        budget.asked()
        budget.spend(1, 1000)
    with pytest.raises(Flood):
        budget.spend(2 * BURST, 0)
