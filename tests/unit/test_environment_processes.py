"""Environments in worker processes: what a crash or a hang costs, what reaches a worker, and that nothing stays.

The domain (fragile_domain.py) is found through an entry point, as a third-party package's would be; the last test runs
whole episodes through the runner. Does not cover instances as such (test_environment_manager.py) or real domains
(tests/contract/test_domain_contract.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Self

import fragile_domain
import pytest

from mua.config.schema import EnvironmentConfig
from mua.environment import processes
from mua.environment.endpoint.services import Services
from mua.environment.manager import EnvironmentInstance, EnvironmentManager
from mua.environment.processes import ProcessExecutor, WorkersBroken
from mua.environment.protocol import Transcript
from mua.rollout import runner as runner_module
from mua.rollout.runner import EpisodeRunner
from mua.types import Outcome
from mua.utils.errors import ConfigError, EnvironmentFault, JudgeFault, MuaError, UserFault
from tests.instance_support import hurry
from tests.process_support import alive
from tests.rollout_fixtures import ScriptedSampler, call, experiment, only
from tests.tokens_fixtures import chat_family

TASK, OTHER, *_ = fragile_domain.DOMAIN.tasks("train")
TRANSCRIPT = Transcript([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é"}])


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    modules = {
        "fragile": "fragile_domain",
        "waiting": "waiting_domain",
        "broken": "broken_domain",
        "slow": "slow_domain",
    }
    fragile_domain.register(tmp_path, **modules)
    (tmp_path / "waiting_domain.py").write_text("import fragile_domain\nDOMAIN = fragile_domain.WaitingDomain()\n")
    (tmp_path / "broken_domain.py").write_text("import os\nos._exit(7)\n")
    (tmp_path / "slow_domain.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def manager_of(domain: object = fragile_domain.DOMAIN, **settings) -> EnvironmentManager:
    return EnvironmentManager(domain, EnvironmentConfig(name="fragile", **{"workers": 1, **settings}))  # type: ignore[arg-type]


def workers_of(manager: EnvironmentManager) -> list[int]:
    executor = manager._executor
    assert isinstance(executor, ProcessExecutor)
    return [slot.worker.pid for slot in executor._slots if slot.worker is not None and slot.worker.lost is None]


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "still not so"
        time.sleep(0.01)


async def value(instance: EnvironmentInstance, tool: str, **arguments) -> object:
    return json.loads((await instance.call(tool, arguments)).text)


async def test_a_instance_is_served_as_in_the_run_itself(monkeypatch: pytest.MonkeyPatch):
    """Nothing is pickled on either side: fragile_domain.py forbids it in the worker."""
    for name in ("dumps", "loads", "dump", "load", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, fragile_domain._refuse)
    manager = manager_of()
    async with manager.instance(TASK, 7) as one, manager.instance(OTHER, 8) as other:
        assert one.tools() == tuple(fragile_domain.Fragile().tools())
        assert one.tools() is other.tools()
        assert [tool.name for tool in one.user_tools.schemas()] == ["press"]
        assert (await one.call("add", {"n": 2})).text == "fragile-0 7 2"
        assert (await other.call("add", {})) == fragile_domain.ToolResult("fragile-1 8 1", reward=0.5)
        assert (await one.user_call("press", {})).text == "12"
        assert (await one.call("say", {"more": "\ud800\U0001f600\n"})).text == "süß \ud800\ud800\U0001f600\n"
        assert (await one.evaluate(TRANSCRIPT)) == fragile_domain.Evaluation(12.0, True, {"heard": [2, {"é": None}]})
        assert await value(one, "pid") == await value(other, "pid") == workers_of(manager)[0] != os.getpid()
        assert await value(one, "shout") is None
        assert len(await value(one, "huge")) == 3_000_000  # type: ignore[arg-type]
    async with manager.instance(TASK, 9) as third:
        assert await value(third, "closed") == [8, 7]
        assert (await third.call("add", {})).text == "fragile-0 9 1"
    await manager.close()
    assert manager.instances == manager.leaked_threads == 0


FAULTS: dict[str, tuple[type[MuaError], str]] = {
    "fail": (EnvironmentFault, "'fragile', task 'fragile-0': tool 'fail' raised KeyError: 'x'"),
    "leave": (EnvironmentFault, "tool 'leave' raised SystemExit: 4"),
    "user": (UserFault, "no user"),
    "judge": (JudgeFault, "no judge"),
    "wrong": (EnvironmentFault, "tool 'wrong' gave int instead of ToolResult"),
    "unheard": (EnvironmentFault, "tool 'unheard' gave a result whose text is object, not text"),
}


async def test_what_an_environment_raises_is_the_same_fault_as_in_the_run():
    manager = manager_of()
    async with manager.instance(TASK, 0) as instance:
        for tool, (kind, words) in FAULTS.items():
            with pytest.raises(kind) as caught:
                await instance.call(tool, {})
            assert words in str(caught.value)
        assert (await instance.call("add", {})).text == "fragile-0 0 1"
    await manager.close()


@pytest.mark.parametrize(("tool", "how"), [("crash", "exit status 3"), ("kill", "SIGKILL")])
async def test_a_crash_costs_its_worker_alone_which_is_replaced(tool: str, how: str):
    manager = manager_of(workers=2)
    async with (
        manager.instance(TASK, 0) as crashing,
        manager.instance(OTHER, 1) as elsewhere,
        manager.instance(OTHER, 2) as beside,
    ):
        before = await value(crashing, "pid")
        assert await value(beside, "pid") == before != await value(elsewhere, "pid")
        with pytest.raises(EnvironmentFault, match=rf"tool '{tool}': its worker process ended .* \({how}\)"):
            await crashing.call(tool, {})
        with pytest.raises(EnvironmentFault, match=f"ended during tool '{tool}' of task 'fragile-0'"):
            await beside.call("add", {})
        with pytest.raises(EnvironmentFault, match="'add' cannot run"):
            await beside.call("add", {})
        assert (await elsewhere.call("add", {})).text == "fragile-1 1 1"
    async with manager.instance(TASK, 3) as third, manager.instance(TASK, 4) as fourth:
        assert (await third.call("add", {})).text == "fragile-0 3 1"
        assert (await fourth.call("add", {})).text == "fragile-0 4 1"
        assert len(workers_of(manager)) == 2
    assert not alive(before)  # type: ignore[arg-type]
    await manager.close()
    assert manager.instances == 0


async def test_a_hang_is_killed_at_its_deadline_with_all_it_started():
    manager = manager_of()
    async with manager.instance(TASK, 0) as hanging, manager.instance(OTHER, 1) as beside:
        pid, child = await value(hanging, "pid"), await value(hanging, "child")
        hurry(hanging, call_seconds=0.5)
        call = asyncio.create_task(hanging.call("hang", {}))
        await asyncio.sleep(0)  # it is asked first
        waiting = asyncio.create_task(beside.call("add", {}))
        with pytest.raises(
            EnvironmentFault, match=r"within 0\.5 s \(environment\.call_seconds\); its worker process is k"
        ):
            await call
        with pytest.raises(EnvironmentFault, match="killed, because tool 'hang' of task 'fragile-0' hung there"):
            await waiting
    assert not alive(pid)  # type: ignore[arg-type]
    until(lambda: not alive(child))  # type: ignore[arg-type]  # killed with it, but nobody here reaps it
    async with manager.instance(TASK, 0) as instance:
        assert (await instance.call("add", {})).text == "fragile-0 0 1"
    assert manager.instances == manager.leaked_threads == 0
    await manager.close()


async def test_instance_are_spread_over_workers_and_work_there_does_not_hold_up_the_event_loop(tmp_path: Path):
    manager = manager_of(workers=2)
    async with (
        manager.instance(TASK, 0) as busy,
        manager.instance(TASK, 1) as other,
        manager.instance(TASK, 2) as third,
    ):
        pids = [await value(instance, "pid") for instance in (busy, other, third)]
        assert sorted(workers_of(manager)) == sorted(set(pids))
        assert len(set(pids)) == 2
        marker = tmp_path / "done"
        working = asyncio.create_task(busy.call("work_until", {"marker": str(marker)}))
        for _ in range(10):
            assert (await other.call("add", {})).error is False
        marker.touch()  # only now can the other worker's call end: had it held anything up, nobody would be here
        assert json.loads((await working).text) == "seen"
    await manager.close()


async def test_a_cancelled_call_ends_before_its_environment_is_closed(tmp_path: Path):
    manager, marker = manager_of(), tmp_path / "done"
    async with manager.instance(TASK, 4) as instance:
        call = asyncio.create_task(instance.call("work_until", {"marker": str(marker)}))
        while not instance._handle._worker._exchanges:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        with pytest.raises(EnvironmentFault, match="'work_until' was cancelled"):
            await instance.call("add", {})
        marker.touch()
    async with manager.instance(TASK, 5) as instance:
        assert await value(instance, "closed") == ["worked", 4]
    await manager.close()


async def test_a_worker_inherits_neither_variables_nor_open_files(monkeypatch: pytest.MonkeyPatch):
    for name in ("MASTER_PORT", "OPENAI_API_KEY", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "29500")
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.set_inheritable(server.fileno(), True)
        manager = manager_of()
        async with manager.instance(TASK, 0) as instance:
            variables = await value(instance, "variables")
            assert isinstance(variables, dict)
            assert variables["CUDA_VISIBLE_DEVICES"] == ""
            assert not {"MASTER_PORT", "OPENAI_API_KEY"} & set(variables)
            # Its own, and this run's standard error where that is one.
            assert await value(instance, "sockets") == 1 + 2 * Path("/proc/self/fd/2").is_socket()
        await manager.close()


def test_oracles_that_ask_endpoints_are_refused():
    with pytest.raises(ConfigError, match="oracle: llm"):
        manager_of(oracle="llm")


async def test_a_domain_that_no_worker_can_import_ends_the_run():
    class Unregistered(fragile_domain.FragileDomain):
        name = "nowhere"

    manager = manager_of(Unregistered())
    with pytest.raises(ConfigError, match="unknown environment 'nowhere'"):
        async with manager.instance(TASK, 0):
            pytest.fail("there is nothing to instance")
    await manager.close()


@pytest.mark.parametrize(
    ("name", "seconds", "words"), [("broken", 60, r"exit status 7"), ("slow", 0.2, r"not ready after 0\.2 s")]
)
async def test_workers_that_do_not_start_are_faults_and_in_the_end_the_runs(
    name: str, seconds: float, words: str, monkeypatch: pytest.MonkeyPatch
):
    class Named(fragile_domain.FragileDomain):
        pass

    Named.name = name
    monkeypatch.setattr(processes, "START_SECONDS", seconds)
    monkeypatch.setattr(processes, "MAX_FAILED_STARTS", 1)
    manager = manager_of(Named())
    for kind, said in ((EnvironmentFault, words), (WorkersBroken, "1 failed in a row")):
        with pytest.raises(kind, match=said):
            async with manager.instance(TASK, 0):
                pytest.fail("there is nothing to instance")
    assert manager.instances == 0
    await manager.close()


RUN = """
    import asyncio, sys
    import fragile_domain
    from instance_support import hurry
    from mua.config.schema import EnvironmentConfig
    from mua.environment.manager import EnvironmentManager

    async def main():
        config = EnvironmentConfig(name="fragile", workers=1)
        manager = EnvironmentManager(fragile_domain.DOMAIN, config)
        async with manager.instance(fragile_domain.DOMAIN.tasks("train")[0], 0) as instance:
            print((await instance.call("pid", {})).text, (await instance.call("child", {})).text, flush=True)
            hurry(instance, call_seconds=float(sys.argv[1]))
            await instance.call(sys.argv[2], {"marker": path} if (path := "".join(sys.argv[3:])) else {})
            await asyncio.Event().wait()

    asyncio.run(main())
"""


class Started:
    """A run whose environment does ``tool`` under a deadline of ``seconds``, and the processes it started."""

    def __init__(self, seconds: int, tool: str, *marker: Path) -> None:
        self.run = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RUN), str(seconds), tool, *map(str, marker)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )

    @cached_property
    def pids(self) -> list[int]:
        """The worker's, and that of a process which the worker started; waits for them."""
        assert self.run.stdout is not None
        return [int(pid) for pid in self.run.stdout.readline().split()]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.run.kill()
        self.run.communicate(timeout=30)


@pytest.mark.slow
def test_no_process_outlives_a_run_that_is_killed():
    """Nor does one whose call holds the interpreter lock; what that had started could no longer be told."""
    with Started(3000, "hang") as one, Started(3000, "hang") as other, Started(1, "hold") as deaf:
        for started, how in ((one, signal.SIGKILL), (other, signal.SIGTERM), (deaf, signal.SIGKILL)):
            assert len(started.pids) == 2
            if started is not deaf:  # whose own deadline may have come
                assert all(map(alive, started.pids))
            started.run.send_signal(how)
        until(lambda: not any(map(alive, [*one.pids, *other.pids, deaf.pids[0]])))
        with contextlib.suppress(ProcessLookupError):
            os.kill(deaf.pids[1], signal.SIGKILL)


def ignored(pid: int) -> set[int]:
    """Numbers of the signals that a process ignores."""
    (mask,) = re.findall(r"^SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return {number for number in range(1, 65) if int(mask, 16) >> (number - 1) & 1}


def test_an_interrupt_is_the_runs_and_prints_no_traceback_of_a_worker(tmp_path: Path):
    with Started(3000, "work_until", tmp_path / "done") as started:
        run, pids = started.run, started.pids
        # A cluster may signal every process of a job.
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2} <= ignored(pids[0])
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does
        (tmp_path / "done").touch()  # closing waits for the call under way
        _, printed = run.communicate(timeout=30)
        assert run.returncode != 0
        assert "KeyboardInterrupt" in printed
        assert "environment/worker.py" not in printed
        until(lambda: not any(map(alive, pids)))


async def test_episodes_whose_environment_crashes_or_hangs_succeed_on_retry_while_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)
    first = {
        "0": call("crash_once", marker=str(tmp_path / "crashed")),
        "1": call("hang_once", marker=str(tmp_path / "hung")),
    }

    def script(session: str, turn: int) -> str:
        _, sample, _ = session.split("/")
        return [first.get(sample, call("add")), call("add"), "Done."][turn]

    family = chat_family("qwen3", False)
    settings = {"name": "fragile", "isolation": "process", "workers": 3, "call_seconds": 1.5}
    config = experiment(environment=settings, rollout={"max_retries": 3})
    sampler = ScriptedSampler(family, script)
    runner = EpisodeRunner(config, only(fragile_domain.DOMAIN), family, sampler, Services())
    group = await runner.group(TASK, 0, 12, temperature=1.0)
    manager = runner._environments["fragile"]
    pids = workers_of(manager)
    assert manager.instances == manager.leaked_threads == 0
    await runner.close()
    assert not any(map(alive, pids))
    assert [one.outcome for one in group.trajectories] == [Outcome.USER_STOP] * 12
    assert all(one.success for one in group.trajectories)
    # A retried environment is fresh: it has counted its own calls alone.
    assert [one.reward for one in group.trajectories] == [1.5, 1.5] + [3.0] * 10
    attempts = [one.attempts for one in group.trajectories]
    assert min(attempts[:2]) > 1
    assert attempts.count(1) >= 4, "a third of the episodes have a worker of their own"
