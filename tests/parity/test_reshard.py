"""Passes over the buckets by all ranks: given up, begun again, and the bytes that ``mua plan`` foresees.

That every byte of every layout arrives, within the bounds on memory, is part of test_megatron_layouts.py. Not covered:
NCCL, and the engines that take the buckets (test_engine_transports.py).
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from bridge_support import build, layout, start_parallel

from megatron_bridge.convert import load_hf
from megatron_bridge.plan import plan_model
from mua.config.schema import EngineConfig, ExperimentConfig
from mua.engine.cluster import Nodes
from mua.engine.engine_handle import EnginePlace
from mua.engine.weight_sync import TrainerSource
from mua.launch.plan.links import planned_links
from mua.megatron import layouts
from mua.megatron.architecture import architecture_of
from tests.distributed import run_on_workers
from tests.layout_support import BUCKET_BYTES
from tests.megatron_support import write_model


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(path := tmp_path_factory.mktemp("reshard") / "dense", layers=4, tied=False)
    return path


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(path := tmp_path_factory.mktemp("reshard") / "moe", experts=4, tie_word_embeddings=True)
    return path


def test_a_pass_that_is_given_up_leaves_no_rank_waiting(dense: Path) -> None:
    first, second = run_on_workers(2, give_up_then_finish, dense)
    assert first["given_up_after"] == 2
    assert first["finished"] > 2
    assert second["passes"] == 2
    assert first["moved"] == first["needed"] == second["moved"] > 0


def give_up_then_finish(folder: Path) -> dict[str, Any]:
    """Rank 0 leaves the first pass after two buckets and goes through the second; the other rank follows both."""
    announced: list[Any] = []
    config = EngineConfig(bucket_bytes=BUCKET_BYTES)
    source = loaded_source(folder, "PP2", config, lambda engines, groups: announced.append(engines))
    if dist.get_rank() > 0:
        source.follow([(0, 0)])
        source.follow([(0, 0)])
        return {"passes": 2, "moved": source.moved}
    buckets = source.buckets([(0, 0)])
    given_up = [next(buckets), next(buckets)]
    buckets.close()
    finished = sum(1 for bucket in source.buckets([(0, 0)]) if bucket is not None)
    assert announced == [[(0, 0)], [(0, 0)]]
    return {"given_up_after": len(given_up), "finished": finished, "moved": source.moved, "needed": source.needed}


@pytest.mark.parametrize("fault", ["die", "hang"])
def test_ranks_follow_every_attempt_of_an_update(dense: Path, fault: str) -> None:
    """The only engine fails at the second bucket and comes back: the ranks put all buckets together once more."""
    first, second = run_on_workers(2, send_until_an_engine_has_all, dense, fault)
    assert first["lives"] == 2
    assert first["loaded"] == first["buckets"] > 2
    assert second["followed"] == 2


def send_until_an_engine_has_all(folder: Path, fault: str) -> dict[str, Any]:
    """Rank 0 updates a stand-in engine; the other rank follows whatever is announced, as the policy's ranks do."""

    def announce(engines: Any, groups: int = 0) -> None:
        dist.broadcast_object_list([engines], src=0)

    source = loaded_source(folder, "PP2", EngineConfig(bucket_bytes=BUCKET_BYTES), announce)
    if dist.get_rank() == 0:
        found = asyncio.run(_update_a_stand_in(source, fault))
        announce(None)
        return found
    followed, heard = 0, [None]
    while dist.broadcast_object_list(heard, src=0) or heard[0] is not None:
        source.follow(heard[0])
        followed += 1
    return {"followed": followed}


async def _update_a_stand_in(source: Any, fault: str) -> dict[str, Any]:
    from engine_stand_in import StandInServer, stand_in_pool

    server, path, seen = StandInServer(), "/update_weights_from_tensor", list[int]()

    def at_the_second_bucket(asked: str, life: int) -> str | None:
        seen.extend([life] if asked == path else [])
        return fault if asked == path and seen == [1, 1] else None

    server.on_request = at_the_second_bucket
    async with stand_in_pool([server], control_seconds=3.0) as pool:
        await pool.start(Path("m"))
        report = await pool.update_weights(source, 1)
    return {"lives": server.lives, "loaded": seen.count(2), "buckets": report.buckets}


@pytest.mark.parametrize(
    ("kind", "name", "engine"),
    [
        ("dense", "TP2 PP2", {"tensor_parallel": 2}),
        ("moe", "TP2 DP2 EP2", {"count": 2}),
        ("dense", "TP2 PP2", {"transport": "broadcast", "broadcast_roots": 3}),
    ],
)
def test_mua_plan_foresees_the_bytes_that_every_rank_receives(
    dense: Path, moe: Path, kind: str, name: str, engine: dict[str, Any]
) -> None:
    """Two machines of two ranks, planned without any of them and then run."""
    folder = {"dense": dense, "moe": moe}[kind]
    config = ExperimentConfig.model_validate({
        "name": "links", "output": "out", "environment": {"name": "help_desk"}, "trainer": {"steps": 1},
        "model": {"path": folder, "dtype": "float32", "max_length": 512},
        "megatron": layouts.sizes(name), "cluster": {"nodes": 2, "gpus_per_node": 2},
        "engine": {"bucket_bytes": BUCKET_BYTES} | engine, "rollout": {"max_tokens": 256},
    })  # fmt: skip
    links = planned_links(architecture_of(config.model), config)
    results = run_on_workers(4, one_pass, folder, name, config.engine)
    whole = links.bytes.sum(axis=0)
    engines = links.handed if config.engine.transport == "broadcast" else 0
    assert [result["received"] for result in results] == (whole[1] + whole[3])[:-1].tolist()
    assert sum(result["sent"] for result in results) == whole[0].sum() + whole[2].sum() - engines
    assert results[0]["buckets"] == len(links.bytes) > 2
    assert whole[2:, :-1].any(), "nothing crosses to the other machine"


def one_pass(folder: Path, name: str, config: Any) -> dict[str, Any]:
    """A pass over all buckets for every engine of two machines; what each rank sent and received."""
    places = [EnginePlace(node, place) for node in range(2) for place in range(config.count)]
    source = loaded_source(folder, name, config)
    source._nodes = Nodes(dist.get_rank() // 2, (0, 2), ((0, 1), (2, 3)))
    steps = source.buckets(places) if dist.get_rank() == 0 else source.follow(places)
    for _ in steps or ():
        pass
    traffic = source._way.resharder.traffic
    return {"sent": traffic.sent, "received": traffic.received, "buckets": len(source._way.resharder.buckets)}


def loaded_source(folder: Path, name: str, config: EngineConfig, announce: Any = lambda *_: None) -> Any:
    """The source of engines of one machine, with the weights in ``folder``; its ``chunks`` may be loaded again."""
    megatron = layout(name)
    start_parallel(megatron)
    chunks = build(folder, megatron)
    load_hf(chunks, folder)
    nodes = Nodes(0, (0,), (tuple(range(megatron.world_size)),))
    source: Any = TrainerSource(lambda: nullcontext(plan_model(chunks)), config, nodes, dist.group.WORLD, announce)
    source.chunks = chunks
    return source
