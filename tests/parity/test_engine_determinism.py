"""Deterministic mode on CPU: one request gives the same bits whatever it shares a batch or a cache with.

The reference is every request sampled alone with an empty prefix cache; requests with and without top_p are mixed,
because that too leaked from one to the other. Not covered: GPU, MoE, several threads; the engine on other CPUs than
this one.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from engine_fixtures import VOCAB, make_pool

from mua.compat.sglang_cpu import SHIM
from mua.engine import SamplingParams
from mua.engine.pool import EnginePool
from mua.types import Generation
from mua.utils.errors import EngineError


def conversations(n: int) -> list[tuple[list[int], list[int]]]:
    """First prompt and the user's next message of ``n`` dialogues; the prompts share prefixes of several lengths."""
    generator = np.random.default_rng(0)
    common = generator.integers(5, VOCAB, size=48)
    return [
        (
            [*common[: generator.integers(4, 48)].tolist(), *generator.integers(5, VOCAB, size=9).tolist()],
            generator.integers(5, VOCAB, size=12).tolist(),
        )
        for _ in range(n)
    ]


async def two_turns(pool: EnginePool, index: int, delay: float = 0.0) -> list[Generation]:
    await asyncio.sleep(delay)
    prompt, reply = conversations(16)[index]
    found = []
    for turn in range(2):
        params = SamplingParams(1.0, 40, (2,), top_p=0.95 if index % 2 else 1.0, seed=1000 * index + turn)
        found.append(await pool.generate(prompt, params, session=str(index), deadline_s=120))
        prompt = [*prompt, *found[-1].ids.tolist(), *reply]
    return found


def assert_same_bits(left: list[list[Generation]], right: list[list[Generation]]) -> None:
    for a, b in zip(chain.from_iterable(left), chain.from_iterable(right), strict=True):
        assert a.ids.tolist() == b.ids.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()


async def empty_cache(pool: EnginePool) -> None:
    await pool._engines[0].client.flush(20)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_engines")
async def test_batch_order_and_cache_do_not_change_a_bit(tmp_path: Path, tiny_qwen3_folder: Path) -> None:
    async with make_pool(tmp_path, deterministic=True, extra={"chunked_prefill_size": 64}) as pool:
        await pool.start(tiny_qwen3_folder)
        with pytest.raises(EngineError, match="seed"):
            await pool.generate([5], SamplingParams(1.0, 4, ()), session="s", deadline_s=60)
        alone = []
        for index in range(16):
            await empty_cache(pool)
            alone.append(await two_turns(pool, index))
        await empty_cache(pool)
        together = await asyncio.gather(*(two_turns(pool, index) for index in range(16)))
        staggered = await asyncio.gather(*(two_turns(pool, index, 0.02 * (15 - index)) for index in range(16)))
        assert_same_bits(alone, together)
        assert_same_bits(alone, staggered)
        assert sum(turns[1].cached_tokens for turns in staggered) > 0


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SHIM))
    import mua_cpu_invariant

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield mua_cpu_invariant
    torch.set_num_threads(threads)
    sys.modules.pop("mua_cpu_invariant")


@pytest.mark.parametrize(("k", "n"), [(64, 512), (192, 600), (512, 192), (192, 448)])
def test_a_row_of_a_product_does_not_depend_on_the_others(invariant: ModuleType, k: int, n: int) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(150, k), torch.randn(n, k).T
    alone = torch.cat([invariant.tiled_mm(row[None], weight) for row in rows])
    for m in (2, 23, 24, 25, 33, 64, 150):
        assert torch.equal(invariant.tiled_mm(rows[:m], weight), alone[:m])
    torch.testing.assert_close(alone, rows @ weight, atol=1e-3, rtol=1e-5)
    bias = torch.randn(n)
    added = invariant.tiled_addmm(bias, rows, weight)
    torch.testing.assert_close(added, torch.addmm(bias, rows, weight), atol=1e-3, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["SSE4_2", "AVX2"])
def test_nor_does_it_with_the_kernels_of_other_cpus(instructions: str, tmp_path: Path) -> None:
    own = test_a_row_of_a_product_does_not_depend_on_the_others.__name__
    pytest_again = [sys.executable, "-m", "pytest", "-q", f"--basetemp={tmp_path}/again", f"{__file__}::{own}"]
    environment = os.environ | {"MKL_ENABLE_INSTRUCTIONS": instructions}
    done = subprocess.run(pytest_again, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("forked_engines")
async def test_a_turn_that_goes_on_elsewhere_is_the_unbroken_one(tmp_path: Path, tiny_qwen3_folder: Path) -> None:
    """The engine is told to give up what it runs, at more and more tokens, beside other requests."""
    prompts = [list(range(5, 30)), list(range(40, 45)), list(range(60, 160))]

    async def ask(pool: EnginePool, index: int) -> Generation:
        params = SamplingParams(1.0, 300, (), top_p=0.9 if index == 1 else 1.0, seed=77 + index)
        return await pool.generate(prompts[index], params, session=str(index), deadline_s=300)

    async with make_pool(tmp_path, deterministic=True, count=2) as pool:
        await pool.start(tiny_qwen3_folder)
        whole = [await ask(pool, index) for index in range(3)]
        pool.metrics()
        broken = 0
        for attempt in range(40):
            running = [asyncio.create_task(ask(pool, index)) for index in range(3)]
            while sum(engine.in_flight for engine in pool._engines) < 3:
                await asyncio.sleep(0)
            await asyncio.sleep(0.02 * (attempt + 1))
            for engine in pool._engines:
                await engine.abort()
            assert_same_bits([whole], [await asyncio.gather(*running)])
            found = pool.metrics()
            broken += found["engine/partial/continued"] > 0 and found["engine/partial/kept_tokens"] > 0
            if broken == 4:
                return
        raise AssertionError(f"only {broken} times had an engine sampled something and not everything")
