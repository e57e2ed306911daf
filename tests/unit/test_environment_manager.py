"""Instances: fresh, bounded, under deadlines, closed exactly once whatever happens, and nothing left behind.

Uses an in-test domain whose every method can be told to raise or hang. Does not cover real domains
(tests/contract/test_domain_contract.py).
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from mua.config.schema import EnvironmentConfig
from mua.environment import manager as manager_module
from mua.environment.executors import BlockingCall, BlockingPool
from mua.environment.manager import EnvironmentManager, TooManyHungCalls
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.types import ToolSchema
from mua.utils.errors import EnvironmentFault
from tests.instance_support import hurry

TASK = Task("t-1", "toy", "train", {})
TRANSCRIPT = Transcript([])


class Toy:
    """Counts what happens to it; ``domain.act`` decides what each method does."""

    def __init__(self, domain: ToyDomain) -> None:
        self.domain = domain
        self.calls: list[str] = []
        self.running = 0
        self.ballast = bytearray(10_000)

    def _do(self, what: str) -> None:
        self.domain.seen[what] += 1
        self.running += 1
        if self.running > 1:
            self.domain.overlaps += 1
        try:
            self.domain.act.get(what, lambda: None)()
        finally:
            self.running -= 1

    def reset(self, task: Task, seed: int) -> None:
        self.domain.threads.add(threading.current_thread())
        self._do("reset")

    def tools(self) -> list[ToolSchema]:
        return [ToolSchema("look", "Look.", {"type": "object", "properties": {}})]

    def call(self, name: str, arguments: dict) -> ToolResult:
        self._do(name)
        self.calls.append(name)
        return self.domain.result if self.domain.result is not None else ToolResult(f"{name} {len(self.calls)}")

    def evaluate(self, transcript: Transcript) -> Evaluation:
        self._do("evaluate")
        return Evaluation(float(len(self.calls)), True)

    def close(self) -> None:
        self.domain.seen["close"] += 1
        self.domain.act.get("close", lambda: None)()


class ToyDomain:
    name = "toy"

    def __init__(self) -> None:
        self.act: dict[str, Callable[[], object]] = {}
        self.seen: Counter[str] = Counter()
        self.overlaps = 0
        self.result: object = None
        self.threads: set[threading.Thread] = set()
        self.made: weakref.WeakSet[Toy] = weakref.WeakSet()
        self.release = threading.Event()

    def hang(self) -> None:
        self.release.wait()

    def environment(self) -> Toy:
        self.seen["environment"] += 1
        self.act.get("environment", lambda: None)()
        toy = Toy(self)
        self.made.add(toy)
        return toy


@pytest.fixture
def domain() -> Iterator[ToyDomain]:
    domain = ToyDomain()
    yield domain
    domain.release.set()


def manager_of(domain: ToyDomain, **settings) -> EnvironmentManager:
    return EnvironmentManager(domain, EnvironmentConfig(name="toy", **settings))


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


async def one_episode(manager: EnvironmentManager) -> None:
    async with manager.instance(TASK, 0) as environment:
        await environment.call("look", {})
        await environment.evaluate(TRANSCRIPT)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def turns(count: int = 50) -> None:
    """Let the event loop do all that it can do now: what then still waits, waits for a thread or a deadline."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever work is handed to a thread."""
    handed: list[str] = []
    start = BlockingPool.start

    async def noted(pool: BlockingPool, seconds: float, function: Callable[[], object]) -> BlockingCall:
        handed.append(function.__qualname__)
        return await start(pool, seconds, function)

    monkeypatch.setattr(BlockingPool, "start", noted)
    return handed


async def test_a_instance_is_fresh_and_closed_after_use(domain: ToyDomain):
    manager = manager_of(domain)
    for _ in range(2):
        async with manager.instance(TASK, seed=3) as environment:
            assert environment.task is TASK
            assert [tool.name for tool in environment.tools()] == ["look"]
            assert (await environment.call("look", {})).text == "look 1"
            assert (await environment.evaluate(TRANSCRIPT)).reward == 1.0
            assert manager.instances == 1
    assert domain.seen == {"environment": 2, "reset": 2, "look": 2, "evaluate": 2, "close": 2}
    assert manager.instances == manager.leaked_threads == 0
    await manager.close()


@pytest.mark.parametrize("where", ["environment", "reset", "look", "evaluate"])
@pytest.mark.parametrize("error", [KeyError("order"), StopIteration(), asyncio.CancelledError()], ids=repr)
async def test_an_exception_names_domain_task_and_place_and_closes_once(
    domain: ToyDomain, where: str, error: BaseException
):
    domain.act[where] = raises(error)
    manager = manager_of(domain)
    place = {"environment": r"reset\(\)", "reset": r"reset\(\)", "look": "tool 'look'", "evaluate": r"evaluate\(\)"}
    with pytest.raises(EnvironmentFault, match=f"'toy', task 't-1': {place[where]} raised {type(error).__name__}"):
        await one_episode(manager)
    assert domain.seen["close"] == (0 if where == "environment" else 1)
    assert manager.instances == manager.leaked_threads == 0


@pytest.mark.parametrize("error", [RuntimeError("episode"), asyncio.CancelledError()], ids=repr)
async def test_an_episode_that_ends_badly_closes_once_and_keeps_its_own_error(domain: ToyDomain, error: BaseException):
    manager = manager_of(domain)
    with pytest.raises(type(error)) as caught:
        async with manager.instance(TASK, 0):
            raise error
    assert caught.value is error
    assert domain.seen["close"] == 1
    assert manager.instances == 0


async def test_a_hung_tool_is_named_counted_and_the_environment_still_closed(domain: ToyDomain):
    domain.act["look"] = domain.hang
    manager = manager_of(domain)

    async def episode() -> None:
        async with manager.instance(TASK, 0) as environment:
            hurry(environment, call_seconds=0.1)
            await environment.call("look", {})

    with pytest.raises(
        EnvironmentFault, match=r"tool 'look' did not return within 0\.1 s \(environment\.call_seconds\)"
    ):
        await episode()
    assert domain.seen["close"] == 1
    assert (manager.instances, manager.leaked_threads) == (0, 1)
    domain.release.set()
    await until(lambda: manager.leaked_threads == 0)
    async with manager.instance(TASK, 0) as environment:
        assert (await environment.call("look", {})).text == "look 1"


async def test_after_a_hang_the_environment_refuses_further_calls(domain: ToyDomain):
    domain.act["look"] = domain.hang
    manager = manager_of(domain, call_seconds=0.1)
    async with manager.instance(TASK, 0) as environment:
        with pytest.raises(EnvironmentFault, match="did not return"):
            await environment.call("look", {})
        with pytest.raises(EnvironmentFault, match="'other' cannot run: tool 'look' hangs"):
            await environment.call("other", {})
        with pytest.raises(EnvironmentFault, match="cannot run"):
            await environment.evaluate(TRANSCRIPT)
    assert domain.seen["other"] == 0


@pytest.mark.parametrize("where", ["environment", "reset"])
async def test_a_hung_build_is_a_fault_and_what_it_builds_late_is_closed(domain: ToyDomain, where: str):
    domain.act[where] = domain.hang
    manager = manager_of(domain, reset_seconds=0.1)
    with pytest.raises(
        EnvironmentFault, match=r"reset\(\) did not return within 0\.1 s \(environment\.reset_seconds\)"
    ):
        async with manager.instance(TASK, 0):
            pytest.fail("nothing to instance")
    assert manager.instances == 0
    domain.release.set()
    await until(lambda: manager.leaked_threads == 0)
    assert domain.seen["environment"] == domain.seen["close"] == 1


async def test_a_hung_close_is_bounded_and_frees_the_slot(domain: ToyDomain):
    domain.act["close"] = domain.hang
    manager = manager_of(domain, max_instances=1)
    with pytest.raises(EnvironmentFault, match=r"close\(\) did not return within 0\.1 s"):
        async with manager.instance(TASK, 0) as environment:
            hurry(environment, reset_seconds=0.1)
    assert (manager.instances, manager.leaked_threads, domain.seen["close"]) == (0, 1, 1)
    domain.act.clear()
    async with manager.instance(TASK, 0):
        assert manager.instances == 1


async def test_canceling_during_a_call_waits_for_it_and_closes_once(domain: ToyDomain, jobs: list[str]):
    order: list[str] = []
    domain.act["look"] = lambda: (domain.hang(), order.append("call returns"))
    domain.act["close"] = lambda: order.append("close")
    manager = manager_of(domain)

    async def episode() -> None:
        async with manager.instance(TASK, 0) as environment:
            await environment.call("look", {})

    task = asyncio.create_task(episode())
    await until(lambda: domain.seen["look"] == 1)
    task.cancel()
    await turns()
    assert len(jobs) == 2  # the reset and the call: no thread was asked to close
    domain.release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert order == ["call returns", "close"]
    assert len(jobs) == 3
    assert domain.overlaps == 0
    assert manager.instances == manager.leaked_threads == 0


async def test_canceling_twice_does_not_lose_the_close(domain: ToyDomain):
    domain.act["close"] = domain.hang
    manager, inside = manager_of(domain), asyncio.Event()

    async def episode() -> None:
        async with manager.instance(TASK, 0):
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(episode())
    await inside.wait()
    task.cancel()
    await until(lambda: domain.seen["close"] == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert manager.instances == 1
    domain.release.set()
    await manager.close()
    assert (manager.instances, domain.seen["close"]) == (0, 1)


async def test_calls_of_one_environment_never_overlap(domain: ToyDomain):
    manager = manager_of(domain)
    async with manager.instance(TASK, 0) as environment:
        results = await asyncio.gather(*(environment.call("look", {}) for _ in range(50)))
    assert [r.text for r in results] == [f"look {i}" for i in range(1, 51)]
    assert domain.overlaps == 0


async def test_a_instance_that_ended_refuses_calls(domain: ToyDomain):
    async with manager_of(domain).instance(TASK, 0) as environment:
        pass
    with pytest.raises(EnvironmentFault, match="its instance has ended"):
        await environment.call("look", {})
    assert domain.seen["look"] == 0


async def test_at_most_max_instance_are_alive(domain: ToyDomain):
    manager = manager_of(domain, max_instances=3)
    most = 0

    async def episode() -> None:
        nonlocal most
        async with manager.instance(TASK, 0) as environment:
            most = max(most, manager.instances)
            await environment.call("look", {})

    await asyncio.gather(*(episode() for _ in range(40)))
    assert most == 3
    assert domain.seen["close"] == domain.seen["environment"] == 40


async def test_canceling_a_waiting_instance_loses_no_slot(domain: ToyDomain):
    manager = manager_of(domain, max_instances=1)

    async def episode() -> None:
        async with manager.instance(TASK, 0):
            pass

    async with manager.instance(TASK, 0):
        waiting = asyncio.create_task(episode())
        await turns()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await asyncio.wait_for(episode(), timeout=30)
    assert domain.seen["environment"] == 2


async def test_hung_threads_are_replaced_up_to_a_clear_end(domain: ToyDomain, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(manager_module, "MAX_LEAKED_THREADS", 5)
    monkeypatch.setattr(manager_module, "THREADS", 2)
    domain.act["look"] = domain.hang
    manager = manager_of(domain, call_seconds=0.05)
    for _ in range(5):
        with pytest.raises(EnvironmentFault, match="did not return"):
            async with manager.instance(TASK, 0) as environment:
                await environment.call("look", {})
    assert manager.leaked_threads == domain.seen["close"] == 5
    with pytest.raises(TooManyHungCalls, match=r"5 calls hang .*environment\.call_seconds"):
        async with manager.instance(TASK, 0):
            pytest.fail("too many hang")
    assert manager.instances == 0
    domain.release.set()
    await until(lambda: manager.leaked_threads == 0)
    async with manager.instance(TASK, 0):
        pass


def nothing_is_left(domain: ToyDomain) -> bool:
    gc.collect()
    return not domain.made


async def test_thousands_of_instance_leave_nothing_behind(domain: ToyDomain):
    manager = manager_of(domain, max_instances=64)
    domain.act["bad"] = lambda: {}["missing"]

    async def episode(index: int) -> None:
        try:
            async with manager.instance(TASK, index) as environment:
                await environment.call("bad" if index % 3 == 0 else "look", {})
                await environment.evaluate(TRANSCRIPT)
        except EnvironmentFault:
            pass

    async def many(count: int) -> None:
        for start in range(0, count, 100):
            await asyncio.gather(*(episode(start + i) for i in range(100)))

    await many(200)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    await many(600)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert domain.seen["close"] == domain.seen["environment"] == 800
    await until(lambda: nothing_is_left(domain))  # a thread lets go a little after it has answered
    # One environment kept alive per instance would be 6 MB.
    assert after - before < 300_000
    assert len({t for t in domain.threads if t.is_alive()}) <= manager_module.THREADS
    await manager.close()


def test_a_hung_tool_does_not_keep_the_process_alive():
    script = """
        import asyncio, time
        from mua.config.schema import EnvironmentConfig
        from mua.environment.manager import EnvironmentManager
        from mua.environment.protocol import Task
        from mua.utils.errors import EnvironmentFault

        class Hanging:
            def reset(self, task, seed): pass
            def tools(self): return []
            def call(self, name, arguments): time.sleep(3600)
            def close(self): pass

        class Domain:
            name = "hanging"
            environment = Hanging

        async def main():
            manager = EnvironmentManager(Domain(), EnvironmentConfig(name="hanging", call_seconds=0.1))
            try:
                async with manager.instance(Task("t", "hanging", "train", {}), 0) as environment:
                    await environment.call("x", {})
            except EnvironmentFault as fault:
                print(fault)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "tool 'x' did not return within 0.1 s" in done.stdout
    assert done.stderr == ""
