"""Weights from trainer layouts into real SGLang servers, by both transports, into one and several engines.

The trainer runs on gloo ranks, rank 0 of which owns the engines. An engine that loaded a folder itself says what
every parameter's hash must be after a sync of the same weights; a sync of other weights in between changes every hash.
Not covered: NCCL, CUDA IPC, engines on other machines (tests/e2e/test_two_nodes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from test_reshard import Layout, build

from mua.config.schema import EngineConfig
from mua.engine.sampler import SamplingParams
from tests.distributed import run_on_workers
from tests.forked_engines import WithForkedEngines

pytestmark = pytest.mark.timeout(900)  # a busy machine

CONTEXT = 512
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24, stop_token_ids=())
PROMPT = [3, 50, 7, 41, 9, 11, 80]
SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT, "initializer_range": 0.15,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

DENSE = (Layout(tp=2, dp=2), Layout(pp=2, dp=2), Layout(tp=2, pp=2))
MOE = (Layout(dp=4, ep=2), Layout(tp=2, dp=2, ep=2))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dense")
    return _write(folder / "a", 1, experts=False), _write(folder / "b", 2, experts=False)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("moe")
    return _write(folder / "a", 1, experts=True), _write(folder / "b", 2, experts=True)


def _write(folder: Path, seed: int, *, experts: bool) -> Path:
    torch.manual_seed(seed)
    model: Any
    if experts:
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **EXPERTS))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms too must differ between two seeds
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.float().save_pretrained(folder)
    return folder


@pytest.mark.grid
def test_broadcast_into_one_engine(dense: tuple[Path, Path], tmp_path: Path) -> None:
    _check(dense, DENSE, tmp_path, transport="broadcast", count=1, tensor_parallel=1)


@pytest.mark.parametrize(
    ("count", "tensor_parallel"),
    [pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.grid)],
)
def test_shared_memory(dense: tuple[Path, Path], tmp_path: Path, count: int, tensor_parallel: int) -> None:
    _check(dense, DENSE, tmp_path, transport="colocated", count=count, tensor_parallel=tensor_parallel)


@pytest.mark.slow
def test_broadcast_into_two_engines_of_two_ranks(dense: tuple[Path, Path], tmp_path: Path) -> None:
    _check(dense, DENSE, tmp_path, transport="broadcast", count=2, tensor_parallel=2)


@pytest.mark.parametrize(
    ("transport", "tensor_parallel"),
    [pytest.param("colocated", 1, marks=pytest.mark.grid), pytest.param("broadcast", 2, marks=pytest.mark.slow)],
)
def test_experts(moe: tuple[Path, Path], tmp_path: Path, transport: str, tensor_parallel: int) -> None:
    _check(moe, MOE, tmp_path, transport=transport, count=1, tensor_parallel=tensor_parallel)


def _check(folders: tuple[Path, Path], layouts: Sequence[Layout], logs: Path, **engine: Any) -> None:
    found = run_on_workers(4, WithForkedEngines(sync_layouts), folders, layouts, logs, engine, seconds=800)[0]
    for layout, result in zip(layouts, found["layouts"], strict=True):
        assert result["unchanged_by_other"] == [], layout
        assert result["different"] == [], layout
        assert result["answer"] == found["answer"], layout
        assert result["other_answer"] != found["answer"], layout
        report = result["report"]
        assert report.buckets > 3
        assert report.version == result["version"]
        copies = engine["count"] * engine["tensor_parallel"] if engine["transport"] == "broadcast" else 0
        between_ranks = report.moved - copies * report.bytes
        assert 0 < between_ranks < report.bytes
        assert report.needed == between_ranks + (engine["count"] * report.bytes if copies else 0)
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
    folders: tuple[Path, Path], layouts: Sequence[Layout], logs: Path, engine: dict[str, Any]
) -> dict[str, Any]:
    """On every rank: one layout after the other, each synced twice; rank 0 says what the engines then hold."""
    config = EngineConfig(
        **engine, dtype="float32", memory_fraction=0.5, max_total_tokens=4096, start_seconds=500.0, stop_seconds=10.0,
        health_seconds=60.0, bucket_bytes=60_000, extra={"disable_custom_all_reduce": True},
    )  # fmt: skip
    if dist.get_rank() == 0:
        return asyncio.run(_lead(folders, layouts, logs, config))
    for layout in layouts:
        follower = _source(folders[0], layout, config)
        for folder in (folders[1], folders[0], *([folders[0]] if layout is layouts[-1] else [])):
            _load(follower, folder)
            follower.follow([0] * config.count)
    return {}


async def _lead(
    folders: tuple[Path, Path], layouts: Sequence[Layout], logs: Path, config: EngineConfig
) -> dict[str, Any]:
    from mua.engine.pool import EnginePool

    async with EnginePool(config, dtype="float32", context_length=CONTEXT, seed=1, log_folder=logs) as pool:
        await pool.start(folders[0])
        own = await _hashes(pool)
        found: dict[str, Any] = {"answer": await _answer(pool), "layouts": []}
        for layout in layouts:
            source = _source(folders[0], layout, config)
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
    from mua.engine.member import Targets
    from mua.engine.sync import checksums

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


def _source(folder: Path, layout: Layout, config: EngineConfig) -> Any:
    from megatron_bridge.plan import plan_model
    from mua.engine.host import Nodes
    from mua.engine.source import TrainerSource

    chunks = build(folder, layout)
    source = TrainerSource(
        lambda: nullcontext(plan_model(chunks)), config, Nodes(0, (0,)), dist.group.WORLD, announce=lambda _: None
    )
    source.chunks = chunks  # type: ignore[attr-defined]
    return source


def _load(source: Any, folder: Path) -> None:
    from megatron_bridge.convert import load_hf

    load_hf(source.chunks, folder)
