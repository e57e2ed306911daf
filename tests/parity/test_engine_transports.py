"""Weights from trainer layouts into real SGLang servers, by both transports, into one and several engines.

The trainer runs on gloo ranks, rank 0 of which owns the engines. An engine that loaded a folder itself says what
every parameter's hash must be after a sync of the same weights; a sync of other weights in between changes every hash.
Not covered: NCCL, CUDA IPC, engines on other machines (tests/e2e/test_two_nodes.py).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from test_reshard import loaded_source

from mua.config.schema import EngineConfig
from mua.engine import SamplingParams
from mua.engine.engine_handle import EnginePlace
from tests.distributed import run_on_workers
from tests.forked_engines import WithForkedEngines
from tests.megatron_support import write_model

pytestmark = pytest.mark.timeout(900)  # a busy machine

CONTEXT = 512
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=())
PROMPT = [3, 50, 7, 41, 9, 11, 80]
SIZES: dict[str, Any] = {
    "hidden": 64, "tied": False, "intermediate_size": 128, "head_dim": 16, "initializer_range": 0.15,
    "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
KINDS = {
    "dense": SIZES,
    # Its greedy answer holds token 1, at which an engine would stop and the answer of transformers does not.
    "moe": SIZES
    | {"experts": 4, "moe_intermediate_size": 128, "norm_topk_prob": False, "eos_token_id": 2}
    # As many heads as the largest engine has ranks: with fewer SGLang pads them on a CPU, and refuses slices.
    | {"num_attention_heads": 8, "num_key_value_heads": 4},
}
LAYOUTS = {
    "dense": ("TP2 DP2", "PP2 DP2", "TP2 PP2", "TP2 CP2"),
    "moe": ("DP4 EP2", "TP2 DP2 EP2"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two models of each kind, of two seeds: norms too must differ."""
    root = tmp_path_factory.mktemp("models")
    for kind, seed in itertools.product(KINDS, (1, 2)):
        write_model(root / f"{kind} {seed}", seed=seed, layers=4, **KINDS[kind])
    return {kind: (root / f"{kind} 1", root / f"{kind} 2") for kind in KINDS}


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param("dense", {"count": 2, "tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("dense", {"count": 2, "transport": "broadcast"}, marks=pytest.mark.slow),
        pytest.param("dense", {"load": "tensors"}, marks=pytest.mark.grid),
        pytest.param("moe", {"tensor_parallel": 4}, marks=pytest.mark.slow),
        pytest.param("moe", {"tensor_parallel": 2, "extra": {"ep_size": 2}}, marks=pytest.mark.grid),
        pytest.param("moe", {"tensor_parallel": 2, "load": "tensors"}, marks=pytest.mark.grid),
        pytest.param(
            "moe", {"tensor_parallel": 2, "transport": "broadcast", "broadcast_roots": 3}, marks=pytest.mark.grid
        ),
        pytest.param("moe", {}, marks=pytest.mark.grid),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{name} {of}" for name, of in value.items()),
)
def test_engines_hold_what_the_trainer_has(
    models: dict[str, tuple[Path, Path]], tmp_path: Path, kind: str, engine: dict[str, Any]
) -> None:
    folders, layouts = models[kind], LAYOUTS[kind]
    found = run_on_workers(4, WithForkedEngines(sync_layouts), folders, layouts, tmp_path, engine, seconds=800)[0]
    for layout, result in zip(layouts, found["layouts"], strict=True):
        assert result["unchanged_by_other"] == [], layout
        assert result["different"] == [], layout
        assert result["answer"] == found["answer"], layout
        assert result["other_answer"] != found["answer"], layout
        report = result["report"]
        assert report.buckets > 3
        assert report.version == result["version"]
        count, ranks = engine.get("count", 1), engine.get("tensor_parallel", 1)
        broadcast = engine.get("transport") == "broadcast"
        between_ranks = report.moved - broadcast * count * ranks * report.bytes
        assert 0 <= between_ranks < count * ranks * report.bytes
        assert report.needed == between_ranks + broadcast * count * report.bytes
        assert 0 <= report.overlap_seconds <= min(report.assemble_seconds, report.load_seconds)
    assert found["verified"] == []
    assert found["answer"] == _greedy_by_transformers(folders[0])


def _greedy_by_transformers(folder: Path) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=GREEDY.max_new_tokens, min_new_tokens=GREEDY.max_new_tokens,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return ids[0, len(PROMPT) :].tolist()


def sync_layouts(
    folders: tuple[Path, Path], layouts: Sequence[str], logs: Path, engine: dict[str, Any]
) -> dict[str, Any]:
    """On every rank: one layout after the other, each synced twice; rank 0 says what the engines then hold."""
    config = EngineConfig(
        **engine | {"extra": {"disable_custom_all_reduce": True} | engine.get("extra", {})},
        dtype="float32", memory_fraction=0.5, max_total_tokens=4096, start_seconds=500.0, stop_seconds=10.0,
        health_seconds=60.0, bucket_bytes=60_000,
    )  # fmt: skip
    if dist.get_rank() == 0:
        return asyncio.run(_lead(folders, layouts, logs, config))
    places = [EnginePlace(0, place) for place in range(config.count)]
    for number, layout in enumerate(layouts, start=1):
        follower = loaded_source(folders[0], layout, config)
        for folder in (folders[1], folders[0], *([folders[0]] if layout is layouts[-1] else [])):
            _load(follower, folder)
            follower.follow(places, number if config.transport == "broadcast" else 0)
    return {}


async def _lead(folders: tuple[Path, Path], layouts: Sequence[str], logs: Path, config: EngineConfig) -> dict[str, Any]:
    from mua.engine.pool import EnginePool

    async with EnginePool(config, dtype="float32", context_length=CONTEXT, seed=1, log_folder=logs) as pool:
        await pool.start(folders[0])
        own = await _hashes(pool)
        found: dict[str, Any] = {"answer": await _answer(pool), "layouts": []}
        for layout in layouts:
            source = loaded_source(folders[0], layout, config)
            if pool._weight_groups is not None:
                pool._weight_groups.forget()  # the groups of the source before
            _load(source, folders[1])
            await pool.update_weights(source, pool.version + 1)
            other = await _hashes(pool)
            result: dict[str, Any] = {
                "unchanged_by_other": [name for name, value in own.items() if other[name] == value],
                "other_answer": await _answer(pool),
            }
            _load(source, folders[0])
            result["report"] = await pool.update_weights(source, pool.version + 1)
            result["version"] = pool.version
            now = await _hashes(pool)
            result["different"] = [name for name, value in own.items() if now[name] != value]
            result["answer"] = await _answer(pool)
            found["layouts"].append(result)
        _load(source, folders[0])
        found["verified"] = await pool.verify_weights(source)
    return found


async def _hashes(pool: Any) -> dict[str, str]:
    """What every engine holds, which must be one."""
    from mua.engine.engine_handle import Targets
    from mua.engine.weight_transfer import checksums

    first, *others = (await checksums(Targets(pool._engines, 60.0))).values()
    assert all(other == first for other in others)
    return first


async def _answer(pool: Any) -> list[int]:
    """The greedy continuation by every engine, which must be one."""
    answers = {
        tuple((await pool.generate(PROMPT, GREEDY, session=str(number), deadline_s=120)).ids.tolist())
        for number in range(2 * len(pool._engines))
    }
    assert len(answers) == 1
    return list(answers.pop())


def _load(source: Any, folder: Path) -> None:
    from megatron_bridge.convert import load_hf

    load_hf(source.chunks, folder)
