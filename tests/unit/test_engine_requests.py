"""Requests through a running engine: stop tokens, deadlines, cancellation, back-pressure, metrics, bad input.

Real SGLang on CPU, the session's shared server. Not covered: several engines at once.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace

import pytest
from engine_fixtures import CONTEXT

from mua.engine import SamplingParams, TurnCut
from mua.engine.pool import EnginePool
from mua.utils.errors import DeadlineExceeded, EngineError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(900)]  # a busy machine

ENDLESS = SamplingParams(temperature=1.0, max_new_tokens=CONTEXT - 64, stop_token_ids=())
PROMPT = [11, 22, 33, 44]


async def until_engine_is_idle(pool: EnginePool) -> None:
    """Flushing succeeds only when the server itself has nothing left to run."""
    await pool._engines[0].client.flush(20)


async def test_stop_token_ends_the_turn_and_is_part_of_it(engine_pool: EnginePool) -> None:
    first = await engine_pool.generate(
        PROMPT, SamplingParams(0.0, max_new_tokens=8, stop_token_ids=()), session="a", deadline_s=60
    )
    stop = int(first.ids[3])
    found = await engine_pool.generate(
        PROMPT, SamplingParams(0.0, max_new_tokens=8, stop_token_ids=(stop,)), session="a", deadline_s=60
    )
    n = first.ids.tolist().index(stop) + 1
    assert found.finish == "stop"
    assert found.ids.tolist() == first.ids[:n].tolist()
    assert len(found.logprobs) == len(found.versions) == n


async def test_deadline_raises_and_aborts_on_the_engine(engine_pool: EnginePool) -> None:
    greedy, started = replace(ENDLESS, temperature=0.0, max_new_tokens=256), time.perf_counter()
    whole = await engine_pool.generate(PROMPT, greedy, session="whole", deadline_s=300)
    deadline, cut = (time.perf_counter() - started) / 2, None
    while cut is None:  # until it falls into the turn, however fast the machine is just now
        try:
            await engine_pool.generate(PROMPT, greedy, session="slow", deadline_s=deadline)
            deadline /= 2
        except TurnCut as fault:
            cut = fault
        except DeadlineExceeded:
            deadline *= 1.5
    assert re.search(r"session 'slow' exceeded its [\d.]+ s after \d+ tokens", str(cut))
    partial = cut.partial  # what the engine had sampled until then, as it stands in the whole turn
    n = len(partial.ids)
    assert 0 < n < len(whole.ids)
    assert (partial.finish, partial.ids.tolist()) == ("abort", whole.ids[:n].tolist())
    assert len(partial.logprobs) == len(partial.versions) == n
    await until_engine_is_idle(engine_pool)
    assert engine_pool.metrics()["engine/running"] == 0


async def test_canceling_the_task_aborts_on_the_engine(engine_pool: EnginePool) -> None:
    task = asyncio.create_task(engine_pool.generate(PROMPT, ENDLESS, session="c", deadline_s=60))
    while engine_pool.metrics()["engine/running"] == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_engine_is_idle(engine_pool)


async def test_waiting_for_a_slot_counts_against_the_deadline(engine_pool: EnginePool) -> None:
    limit = engine_pool.config.max_running_requests
    running = [
        asyncio.create_task(engine_pool.generate(PROMPT, ENDLESS, session=str(i), deadline_s=60)) for i in range(limit)
    ]
    while engine_pool.metrics()["engine/running"] < limit:
        await asyncio.sleep(0.01)
    with pytest.raises(DeadlineExceeded):
        await engine_pool.generate(PROMPT, ENDLESS, session="late", deadline_s=0.3)
    assert engine_pool.metrics()["engine/queued"] == 0
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await until_engine_is_idle(engine_pool)


async def test_a_prompt_longer_than_the_context_is_an_error(engine_pool: EnginePool) -> None:
    with pytest.raises(EngineError, match="400"):
        await engine_pool.generate([7] * (CONTEXT + 1), ENDLESS, session="long", deadline_s=60)


async def test_second_turn_hits_the_prefix_cache(engine_pool: EnginePool) -> None:
    engine_pool.metrics()
    prompt = list(range(100, 160))
    first = await engine_pool.generate(prompt, SamplingParams(1.0, 20, ()), session="m", deadline_s=60)
    second = await engine_pool.generate(
        [*prompt, *first.ids.tolist(), 9], SamplingParams(1.0, 4, ()), session="m", deadline_s=60
    )
    assert second.cached_tokens >= len(prompt) + len(first.ids) - 1
    metrics = engine_pool.metrics()
    assert metrics["engine/requests"] == 2
    assert metrics["engine/sampled_tokens"] == len(first.ids) + len(second.ids)
    prompts = len(prompt) + len(prompt) + len(first.ids) + 1
    assert metrics["engine/prefix_cache_hit_rate"] == pytest.approx(
        (first.cached_tokens + second.cached_tokens) / prompts
    )
