"""Whether all engines hold the same weights, and those that the trainer says: what differs is found and named.

Engines are stand-ins that hold what they are told and hash it; the pool is the real one. Hashes of real engines are in
tests/parity/test_engine_parity.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.plan import TensorSpec
from megatron_bridge.reshard import lay_out
from mua.config.schema import EngineConfig
from mua.engine.engine_handle import EngineHandle, EnginePlace, EngineState, Targets
from mua.engine.pool import EnginePool
from mua.engine.weight_transfer import WeightBucket, WeightGenerator, checksums, engine_name

NAMES = ["model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"]
VALUES = {name: f"value {number}" for number, name in enumerate(NAMES)}
RANKS = 2
_NOISE = itertools.count()


class Holding:
    """The client of an engine of two ranks that holds a text for every tensor."""

    def __init__(self) -> None:
        self.ranks: list[dict[str, str]] = [{} for _ in range(RANKS)]

    async def control(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        if path == "/update_weights_from_tensor":
            for rank, handle in zip(self.ranks, body["serialized_named_tensors"], strict=True):
                rank |= json.loads(handle)
        elif body.get("action") == "reset_tensors":
            self.ranks = [{name: f"noise {next(_NOISE)}" for name in rank} for rank in self.ranks]
        return {"success": True, "ranks": [{"checksums": dict(rank)} for rank in self.ranks]}

    async def call(self, path: str, body: dict[str, Any], *, timeout: float) -> None:
        pass

    async def close(self) -> None:
        pass


class Told:
    """One bucket a tensor; of each tensor every rank gets a text of its own."""

    moved = needed = 0

    def buckets(self, engines: Sequence[EnginePlace], groups: int = 0) -> WeightGenerator:
        for name, value in VALUES.items():
            (layout,) = lay_out([TensorSpec(name, (8,), torch.float32)], 4096)
            handles = [json.dumps({engine_name(name): f"{value} of rank {rank}"}) for rank in range(RANKS)]
            yield WeightBucket(layout, [handles for _ in engines])


@pytest.fixture
async def pool(tmp_path: Path) -> EnginePool:
    """Three engines that serve the weights of :class:`Told`."""
    config = EngineConfig(count=3, tensor_parallel=RANKS)
    made = EnginePool(config, dtype="float32", context_length=64, seed=1, log_folder=tmp_path)
    for engine in made._engines:
        engine.state, engine._client = EngineState.SERVING, Holding()  # type: ignore[assignment]
    made._failure = None  # as after a start
    await made.update_weights(Told(), 1)
    return made


def holding(pool: EnginePool, number: int) -> Holding:
    engine: EngineHandle = pool._engines[number]
    client = engine.client
    assert isinstance(client, Holding)
    return client


async def hashes(pool: EnginePool) -> list[dict[str, str]]:
    return [*(await checksums(Targets(pool._engines, 60.0))).values()]


async def test_engines_that_hold_the_same_agree(pool: EnginePool) -> None:
    expected = {name: f"{VALUES[name]} of rank 0-{VALUES[name]} of rank 1" for name in NAMES}
    assert await hashes(pool) == [expected] * 3
    assert await pool.verify_weights(Told()) == []
    assert await hashes(pool) == [expected] * 3


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("number", range(3))
async def test_a_single_rank_of_any_engine_that_differs_is_found(pool: EnginePool, number: int, rank: int) -> None:
    holding(pool, number).ranks[rank][NAMES[1]] = "something else"
    assert await pool.verify_weights(Told()) == [NAMES[1]]
    assert await pool.verify_weights(Told()) == [], "what was found differing has been loaded again"


async def test_weights_that_all_engines_lack_are_found_too(pool: EnginePool) -> None:
    for number, rank in itertools.product(range(3), range(RANKS)):
        holding(pool, number).ranks[rank][NAMES[2]] = "stale"
    assert await pool.verify_weights(Told()) == [NAMES[2]]
