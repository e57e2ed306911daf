"""The engines of a run from another process: turns and faults come through as they are, load decides who starts what.

Over real HTTP, in front of a pool that answers as it is told. The real pool behind it is in tests/e2e/test_samplers.py.
Not covered: a network that loses packets.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

import aiohttp
import numpy as np
import pytest

from mua.config.rollout import SamplersConfig
from mua.engine import SamplingParams, TurnCut, router_client
from mua.engine.engine_handle import EngineGone, EngineLoad
from mua.engine.router_client import CONTRACT, EngineRouter, RouterClient, RouterLost, fault_json, generation_json
from mua.types import Generation
from mua.utils.errors import DeadlineExceeded, EngineError

PARAMS = SamplingParams(0.7, 16, (3, 4), min_p=0.1, seed=9, order=5, experts_from=2)


def generation(experts: bool = True) -> Generation:
    ids = np.array([5, 7, 2], np.int32)
    logprobs = np.array([-0.1, -1e-30, -3.4e38], np.float32)
    chosen = np.arange(8, dtype=np.uint16).reshape(4, 2) if experts else None
    return Generation(ids, logprobs, "stop", 4, np.array([3, 3, 4], np.int32), 2, chosen, 0.25)


class TellablePool:
    """Does what it is told with every request."""

    version = 4

    def __init__(self) -> None:
        self.now = EngineLoad(8, 0, 0, paused=False)
        self.answer: Generation | Exception | None = generation()
        self.asked: list[tuple[list[int], SamplingParams, str, float]] = []
        self.given_up = asyncio.Event()

    def load(self) -> EngineLoad:
        return self.now

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str, deadline_s: float
    ) -> Generation:
        self.asked.append((list(prompt_ids), params, session, deadline_s))
        if self.answer is None:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        if isinstance(self.answer, Exception):
            raise self.answer
        assert self.answer is not None
        return self.answer


async def test_turns_and_faults_come_through_as_they_are() -> None:
    pool = TellablePool()
    router = EngineRouter(pool, SamplersConfig())
    await router.start()
    async with RouterClient(router.url, router.key, "a", 5.0) as engines:
        for given in (generation(), generation(experts=False)):
            pool.answer = given
            found = await engines.generate(np.array([1, 2, 3]), PARAMS, session="0/1/0", deadline_s=30)
            for name in ("ids", "logprobs", "versions", "experts"):
                ours, theirs = getattr(found, name), getattr(given, name)
                assert (ours is None) == (theirs is None)
                if theirs is not None:
                    assert (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
            assert (found.finish, found.version, found.cached_tokens, found.waited) == ("stop", 4, 2, 0.25)
        prompt, params, session, deadline = pool.asked[0]
        assert (prompt, params, session) == ([1, 2, 3], PARAMS, "0/1/0")
        assert 29 < deadline <= 30
        for fault in (EngineGone("x"), EngineError("y", passing=False), DeadlineExceeded("z")):
            pool.answer = fault
            with pytest.raises(type(fault), match=str(fault)) as met:
                await engines.generate([1], PARAMS, session="s", deadline_s=30)
            assert (type(met.value), met.value.passing) == (type(fault), fault.passing)
        pool.answer = TurnCut("late", generation())
        with pytest.raises(TurnCut, match="late") as cut:
            await engines.generate([1], PARAMS, session="s", deadline_s=30)
        assert cut.value.partial.ids.tolist() == [5, 7, 2]
        pool.answer = None
        asking = asyncio.create_task(engines.generate([1], PARAMS, session="s", deadline_s=30))
        while len(pool.asked) < 7:
            await asyncio.sleep(0.01)
        asking.cancel()  # the engine is to stop as well
        async with asyncio.timeout(10):
            await pool.given_up.wait()
    async with RouterClient(router.url, "another", "b", 5.0) as stranger:
        with pytest.raises(EngineError, match="401"):
            await stranger.generate([1], PARAMS, session="s", deadline_s=30)
        assert await stranger.room() == 0
    await router.close()


async def test_a_router_that_is_gone_is_told_and_one_that_comes_back_is_asked_again() -> None:
    pool = TellablePool()
    router = EngineRouter(pool, SamplersConfig())
    await router.start()
    config = SamplersConfig(port=int(router.url.rpartition(":")[2]))
    async with RouterClient(router.url, router.key, "a", 3.0) as engines:
        pool.answer = None
        asking = asyncio.create_task(engines.generate([1], PARAMS, session="s", deadline_s=60))
        await asyncio.sleep(0.1)
        await router.close()
        pool.answer = generation()
        again = EngineRouter(pool, config)
        again.key = router.key
        await again.start()
        assert (await asking).ids.tolist() == [5, 7, 2]
        await again.close()
        with pytest.raises(RouterLost, match="has not answered for 3 s"):
            await engines.generate([1], PARAMS, session="s", deadline_s=60)
        assert engines.lost


async def test_load_decides_who_starts_what_and_time_stands_still_with_the_engines() -> None:
    pool = TellablePool()
    router = EngineRouter(pool, SamplersConfig(load=1.5))
    await router.start()
    async with (
        RouterClient(router.url, router.key, "a", 5.0) as one,
        RouterClient(router.url, router.key, "b", 5.0) as other,
    ):
        assert await one.room() == 12  # one and a half times eight slots
        assert await other.room() == 6  # two are asking
        assert await one.room() == 6  # what nobody has started is still there
        await one.started(6)
        assert await other.room() == 3
        pool.now = EngineLoad(8, 8, 4, paused=False)
        assert await other.room() == 0
        pool.now = EngineLoad(8, 0, 0, paused=True)
        assert await one.room() == 0
        deadline = one.pauses.deadline(100.0)
        before = deadline.left
        await asyncio.sleep(0.1)
        assert deadline.left == pytest.approx(before, abs=0.01)
        pool.now = EngineLoad(8, 0, 0, paused=False)
        await one.room()
        await asyncio.sleep(0.05)
        assert deadline.left < before - 0.03
    await router.close()


async def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(EngineError, match=r"samplers\.address 192\.0\.2\.1.*name an address of this machine"):
        await EngineRouter(TellablePool(), SamplersConfig(address="192.0.2.1")).start()


async def test_a_process_that_stood_still_does_not_take_the_router_for_gone() -> None:
    router = EngineRouter(TellablePool(), SamplersConfig())
    async with RouterClient("http://127.0.0.1:1", "k", "a", 0.2) as nowhere:
        await router.start()
        async with RouterClient(router.url, router.key, "b", 0.2) as engines:
            for _ in range(3):
                time.sleep(0.5)  # imports, or a machine that is busy
                assert not engines.lost
                assert await engines.answers()
        while not nowhere.lost:
            assert not await nowhere.answers()
        await router.close()


async def test_a_sampler_of_another_contract_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    router = EngineRouter(TellablePool(), SamplersConfig())
    await router.start()
    engines = RouterClient(router.url, router.key, "a", 60.0)
    with monkeypatch.context() as newer:
        newer.setattr(router_client, "CONTRACT", CONTRACT + 1)
        await engines.__aenter__()
    told = rf"sampler contract {CONTRACT}, this sampler speaks {CONTRACT + 1}; install the trainer's mua here"
    with pytest.raises(EngineError, match=told) as met:
        await engines.room()
    with pytest.raises(EngineError, match=told) as fault:
        await engines.generate([1], PARAMS, session="s", deadline_s=30)
    await engines.__aexit__()
    assert not met.value.passing
    assert not fault.value.passing
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {router.key}"}) as session,
        session.get(f"{router.url}/state") as response,
    ):
        assert (response.status, "speaks none" in await response.text()) == (409, True)
    await router.close()


async def test_what_travels_is_that_of_its_contract() -> None:
    """Whoever changes what is below counts CONTRACT up, in the same change."""
    assert CONTRACT == 2
    assert list(asdict(PARAMS)) == [
        "temperature", "max_new_tokens", "stop_token_ids", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "seed", "order", "experts_from",
    ]  # fmt: skip
    found = generation_json(generation())
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == "1ddeeef1593fc1a1"
    assert set(fault_json(TurnCut("late", generation()))) == {"kind", "message", "passing", "partial"}
    router = EngineRouter(TellablePool(), SamplersConfig())
    await router.start()
    async with RouterClient(router.url, router.key, "a", 60.0) as engines:
        await engines.room()
        assert set(engines.state) == {"paused", "version", "capacity", "running", "waiting", "room"}
    await router.close()
