"""Engines that come to a pool, leave it and are lost to it, while requests run and weights are loaded.

Servers are stand-ins that answer, hang or die when told to; their machines are this process. Real machines and real
engines: tests/e2e/test_separate.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mua.engine import SamplingParams
from mua.engine.cluster import Cluster, Joining
from mua.engine.engine_handle import EngineHandle, EngineState, Machine
from mua.engine.pool import EnginePool
from mua.rollout.scheduler import GroupScheduler, StepDemand
from mua.utils.errors import EngineError
from tests.engine_stand_in import Source, StandInServer, stand_in_pool

ONCE = SamplingParams(temperature=1.0, max_new_tokens=2, stop_token_ids=())
ANSWER = {
    "output_ids": [7, 8],
    "meta_info": {
        "output_token_logprobs": [[-0.5, 7], [-0.25, 8]], "weight_version": "0", "finish_reason": {"type": "length"},
        "cached_tokens": 0,
    },
}  # fmt: skip


def open_pool(tmp_path: Path, servers: list[StandInServer], **changes: Any) -> EnginePool:
    """A pool that machines may join; its own engines are ``servers``."""
    pool = stand_in_pool(servers, memory_saver=False, **({"leave_seconds": 5.0} | changes))
    pool._cluster = Cluster(pool, Joining("127.0.0.1", tmp_path, {}), "key", 1, len(servers))
    return pool


def machine(number: int = 1) -> Machine:
    return Machine(f"m{number}", number, number, 1)


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


def engine_of(pool: EnginePool, index: int) -> EngineHandle:
    return pool._engines[index]


async def test_one_that_joins_is_filled_before_it_is_asked(tmp_path: Path) -> None:
    own, late = StandInServer(0), StandInServer(1)
    async with open_pool(tmp_path, [own]) as pool:
        await pool.start(Path())
        await pool.update_weights(Source(), 3)
        pool.admit(machine(), [late])
        await until(lambda: engine_of(pool, 1).state is EngineState.AWAITING)
        assert pool.awaiting_weights.is_set()
        before = len(own.controls)
        await pool.update_weights(Source(), 3, only_awaiting=True)
        assert engine_of(pool, 1).state is EngineState.SERVING
        assert engine_of(pool, 1).version == 3
        assert len(own.controls) == before, "the others went on serving"
        assert pool.metrics()["engine/restarts"] == 0


async def test_requests_of_one_that_leaves_end_there_and_new_ones_go_elsewhere(tmp_path: Path) -> None:
    own, guest = StandInServer(0), StandInServer(1)
    own.generated = guest.generated = ANSWER
    async with open_pool(tmp_path, [own]) as pool:
        await pool.start(Path())
        visitor = machine()
        pool.admit(visitor, [guest])
        await until(lambda: engine_of(pool, 1).state is EngineState.SERVING)
        pool._sessions["s"] = visitor.engines[0]
        guest.hold.clear()
        running = asyncio.create_task(pool.generate([1], ONCE, session="s", deadline_s=30))
        await until(lambda: visitor.engines[0].in_flight == 1)
        leaving = asyncio.create_task(pool.drain(visitor.engines))
        await until(lambda: visitor.engines[0].state is EngineState.LEAVING)
        await pool.generate([1], ONCE, session="s", deadline_s=30)
        assert not leaving.done()
        guest.hold.set()
        assert (await running).ids.tolist() == [7, 8]
        await leaving
        await pool.remove(visitor.engines)
        assert [path for path in guest.asked if path == "/generate"] == ["/generate"]
        assert [path for path in own.asked if path == "/generate"] == ["/generate"]
        assert [engine.label for engine in pool._engines] == ["engine 0"]
        assert pool.metrics()["engine/retries"] == 0


async def test_what_still_runs_when_its_time_is_over_is_asked_of_another(tmp_path: Path) -> None:
    own, guest = StandInServer(0), StandInServer(1)
    own.generated = guest.generated = ANSWER
    async with open_pool(tmp_path, [own], leave_seconds=0.1) as pool:
        await pool.start(Path())
        visitor = machine()
        pool.admit(visitor, [guest])
        await until(lambda: engine_of(pool, 1).state is EngineState.SERVING)
        pool._sessions["s"] = visitor.engines[0]
        guest.hold.clear()
        running = asyncio.create_task(pool.generate([1], ONCE, session="s", deadline_s=30))
        await until(lambda: visitor.engines[0].in_flight == 1)
        await pool.drain(visitor.engines)
        await pool.remove(visitor.engines)
        assert (await running).ids.tolist() == [7, 8]
        assert pool.metrics()["engine/retries"] == 1
        assert pool.metrics()["engine/failures"] == 0


async def test_a_request_that_kills_engines_is_not_asked_for_ever(tmp_path: Path) -> None:
    servers = [StandInServer(index) for index in range(2)]
    for server in servers:
        server.on_request = lambda path, life: "die" if path == "/generate" else None
    async with open_pool(tmp_path, servers, max_restarts=9) as pool:
        await pool.start(Path())
        with pytest.raises(EngineError, match="is gone"):
            await pool.generate([1], ONCE, session="s", deadline_s=60)
        assert sum(server.asked.count("/generate") for server in servers) == 4


async def test_a_machine_whose_engine_does_not_start_again_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    own, guest = StandInServer(0), StandInServer(1)
    async with open_pool(tmp_path, [own], max_restarts=2) as pool:
        await pool.start(Path())
        visitor = machine()
        assert pool._cluster is not None
        pool._cluster._machines[visitor.name] = visitor
        pool.admit(visitor, [guest])
        await until(lambda: engine_of(pool, 1).state is EngineState.SERVING)
        guest.starts = False
        await guest.stop()
        await until(lambda: pool.count_engines() == 1)
        assert pool._cluster.counts["lost"] == 1
        assert pool.failure is None
        assert (await pool.update_weights(Source(), 1)).tensors == 4
        assert own.running


@pytest.mark.parametrize("request_path", ["/update_weights_from_tensor", "/begin_weight_update", "/pause_generation"])
async def test_one_that_is_lost_during_an_update_does_not_keep_the_others_from_it(
    tmp_path: Path, request_path: str
) -> None:
    own, guest = StandInServer(0), StandInServer(1)
    async with open_pool(tmp_path, [own]) as pool:
        await pool.start(Path())
        visitor = machine()
        pool.admit(visitor, [guest])
        await until(lambda: engine_of(pool, 1).state is EngineState.SERVING)
        leaving: list[asyncio.Task[None]] = []

        def gone(path: str, life: int) -> str | None:
            if path.startswith(request_path) and not leaving:
                leaving.append(asyncio.create_task(pool.remove(visitor.engines)))
                return "die"
            return None

        guest.on_request = gone
        report = await pool.update_weights(Source(), 1)
        assert report.version == pool.version == 1
        await leaving[0]
        assert [(engine.label, engine.version) for engine in pool._engines] == [("engine 0", 1)]


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_no_token_is_older_than_the_bound_while_engines_come_go_and_dawdle(
    tmp_path: Path, staleness: int
) -> None:
    """Groups of two requests, one after the other, as the turns of an episode; one engine is forty times slower.

    A request that runs during an update keeps the version that it began with, as if none of it were sampled again.
    """
    own, slow, third = (StandInServer(index) for index in range(3))
    own.generated = slow.generated = third.generated = ANSWER
    slow.seconds = 0.04
    groups, steps, seen = 4, 12, list[tuple[int, int]]()
    async with open_pool(tmp_path, [own], leave_seconds=0.05) as pool:
        await pool.start(Path())

        async def roll_out(ordinal: int) -> Any:
            turns = [await pool.generate([1], ONCE, session=f"g{ordinal}", deadline_s=30) for _ in range(2)]
            return SimpleNamespace(ordinal=ordinal, versions=[int(v) for turn in turns for v in turn.versions])

        scheduler = GroupScheduler(roll_out, StepDemand(groups, steps, staleness))
        guests = {3: (machine(1), slow), 5: (machine(2), third)}
        scheduler.start()
        for step in range(steps):
            taken = await scheduler.take()
            seen += [(step, version) for group in taken.groups for version in group.versions]
            if step in guests:
                visitor, server = guests[step]
                pool.admit(visitor, [server])
                await until(lambda: visitor.engines[0].up)  # noqa: B023
            if step == 8:
                visitor = guests[5][0]
                await pool.drain(visitor.engines)
                await pool.remove(visitor.engines)
            await pool.update_weights(Source(), step + 1)
            scheduler.release()
        await scheduler.stop()
    assert len(seen) == steps * groups * 4
    assert all(step - staleness <= version <= step for step, version in seen)
    assert max(step - version for step, version in seen) == staleness
    assert slow.asked.count("/generate") > 0
    assert third.asked.count("/generate") > 0
