"""Resharding from every kind of layout onto root ranks: every byte right, every bound kept. Real Megatron on gloo.

Not covered: NCCL, and the engines that take the buckets (test_engine_transports.py).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from mua.compat import megatron_cpu
from tests.distributed import run_on_workers
from tests.megatron_support import write_model

LIMIT = 20_000
"""Bytes of a bucket: less than the embedding alone, more than most other tensors."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions, and the ranks that feed engines."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    dp: int = 1
    roots: tuple[int, ...] = (0,)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = [f"{name}{value}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
                 if (value := getattr(self, name)) not in (None, 1)]  # fmt: skip
        return "-".join([*sizes, "to", *map(str, self.roots)])


DENSE = [
    Layout(),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2, roots=(0, 1)),
    Layout(pp=2, vpp=2, roots=(1,)),
    Layout(tp=2, pp=2, roots=(0, 2)),
    Layout(tp=2, cp=2, roots=(0, 3)),
    Layout(tp=4, roots=(0, 1)),
    Layout(tp=2, pp=2, dp=2, roots=(0, 4)),
    Layout(tp=4, pp=2, roots=(0, 4, 7)),
]
MOE = [
    Layout(dp=2, ep=2, roots=(0, 1)),
    Layout(tp=2, ep=2, etp=1),
    Layout(tp=2, dp=2, ep=2, roots=(0, 2)),
    Layout(tp=2, pp=2, dp=2, ep=2, roots=(0, 4)),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(path := tmp_path_factory.mktemp("reshard") / "dense", layers=4, tied=False)
    return path


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_model(path := tmp_path_factory.mktemp("reshard") / "moe", experts=4, tie_word_embeddings=True)
    return path


@pytest.mark.parametrize("layout", DENSE, ids=str)
def test_roots_get_every_byte_of_a_dense_model(layout: Layout, dense: Path) -> None:
    _check(layout, dense)


@pytest.mark.parametrize("layout", MOE, ids=str)
def test_roots_get_every_byte_of_every_expert(layout: Layout, moe: Path) -> None:
    _check(layout, moe)


def _check(layout: Layout, folder: Path) -> None:
    results = run_on_workers(layout.world, reshard, folder, layout)
    total = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    for rank, result in enumerate(results):
        assert result["wrong"] == []
        assert result["feeds"] == (rank in layout.roots)
        assert result["needed"] <= total
        # One bucket, what is received for it, and one message to every other root: never the whole model.
        assert result["largest"] <= max(result["largest_bucket"], LIMIT)
        assert result["live"] <= (1 + len(layout.roots)) * result["largest_bucket"]
    assert sum(result["received"] for result in results) == sum(result["needed"] for result in results)
    assert sum(result["sent"] for result in results) == sum(result["received"] for result in results)


def test_a_root_gets_only_what_it_lacks(dense: Path) -> None:
    results = run_on_workers(2, reshard, dense, Layout(tp=2))
    weights = load_file(dense / "model.safetensors")
    split = [tensor.nbytes for name, tensor in weights.items() if tensor.ndim == 2 and "layers" in name]
    # Norms are on both ranks; of the vocabulary, padded to 128 rows, the first rank has 64.
    vocabulary = sum(weights[name][64:].nbytes for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert results[0]["received"] == results[1]["sent"] == sum(split) // 2 + vocabulary
    assert results[1]["received"] == results[0]["sent"] == 0


def test_a_pass_that_is_given_up_leaves_no_rank_waiting(dense: Path) -> None:
    first, second = run_on_workers(2, give_up_then_finish, dense)
    assert first["given_up_after"] == 2
    assert first["finished"] > 2
    assert second["passes"] == 2
    assert first["moved"] == first["needed"] == second["moved"] > 0


def give_up_then_finish(folder: Path) -> dict[str, Any]:
    """Rank 0 leaves the first pass after two buckets and goes through the second; the other rank follows both."""
    from mua.config.schema import EngineConfig

    announced: list[Any] = []
    config = EngineConfig(bucket_bytes=LIMIT)
    source = loaded_source(folder, Layout(pp=2), config, lambda engines, groups: announced.append(engines))
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
    from mua.config.schema import EngineConfig

    def announce(engines: Any, groups: int = 0) -> None:
        dist.broadcast_object_list([engines], src=0)

    source = loaded_source(folder, Layout(pp=2), EngineConfig(bucket_bytes=LIMIT), announce)
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
    ("kind", "layout", "engine"),
    [
        ("dense", Layout(tp=2, pp=2), {"tensor_parallel": 2}),
        ("moe", Layout(tp=2, dp=2, ep=2), {"count": 2}),
        ("dense", Layout(tp=2, pp=2), {"transport": "broadcast", "broadcast_roots": 3}),
    ],
    ids=str,
)
def test_mua_plan_foresees_the_bytes_that_every_rank_receives(
    dense: Path, moe: Path, kind: str, layout: Layout, engine: dict[str, Any]
) -> None:
    """Two machines of two ranks, planned without any of them and then run."""
    from mua.config.schema import ExperimentConfig
    from mua.launch.plan.links import planned_links
    from mua.megatron.architecture import architecture_of

    folder = {"dense": dense, "moe": moe}[kind]
    sizes = {"tensor_parallel": layout.tp, "pipeline_parallel": layout.pp, "data_parallel": layout.dp}
    config = ExperimentConfig.model_validate({
        "name": "links", "output": "out", "environment": {"name": "help_desk"}, "trainer": {"steps": 1},
        "model": {"path": folder, "dtype": "float32", "max_length": 512},
        "megatron": sizes | {"expert_parallel": layout.ep}, "cluster": {"nodes": 2, "gpus_per_node": 2},
        "engine": {"bucket_bytes": LIMIT} | engine, "rollout": {"max_tokens": 256},
    })  # fmt: skip
    links = planned_links(architecture_of(config.model), config)
    results = run_on_workers(layout.world, one_pass, folder, layout, config.engine)
    whole = links.bytes.sum(axis=0)
    engines = links.handed if config.engine.transport == "broadcast" else 0
    assert [result["received"] for result in results] == (whole[1] + whole[3])[:-1].tolist()
    assert sum(result["sent"] for result in results) == whole[0].sum() + whole[2].sum() - engines
    assert results[0]["buckets"] == len(links.bytes) > 2
    assert whole[2:, :-1].any(), "nothing crosses to the other machine"


def one_pass(folder: Path, layout: Layout, config: Any) -> dict[str, Any]:
    """A pass over all buckets for every engine of two machines; what each rank sent and received."""
    from mua.engine.cluster import Nodes
    from mua.engine.engine_handle import EnginePlace

    places = [EnginePlace(node, place) for node in range(2) for place in range(config.count)]
    source = loaded_source(folder, layout, config)
    source._nodes = Nodes(dist.get_rank() // 2, (0, 2), ((0, 1), (2, 3)))
    steps = source.buckets(places) if dist.get_rank() == 0 else source.follow(places)
    for _ in steps or ():
        pass
    traffic = source._way.resharder.traffic
    return {"sent": traffic.sent, "received": traffic.received, "buckets": len(source._way.resharder.buckets)}


class Allocations(TorchDispatchMode):
    """The largest buffer that torch made inside, and the largest sum of those alive at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.largest = 0
        self.live = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, Sequence) else [result]:
            if isinstance(tensor, torch.Tensor) and function._schema.name == "aten::empty":
                self._add(tensor)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.alive[key] = storage.nbytes()
        weakref.finalize(tensor, self.alive.pop, key, None)
        self.largest = max(self.largest, storage.nbytes())
        self.live = max(self.live, sum(self.alive.values()))


def reshard(folder: Path, layout: Layout) -> dict[str, Any]:
    """Build the layout, reshard twice with changed weights in between, compare every byte on the roots."""
    from megatron_bridge.convert import load_hf
    from megatron_bridge.plan import plan_model
    from megatron_bridge.reshard import Resharder

    chunks = build(folder, layout)
    load_hf(chunks, folder)
    resharder = Resharder(plan_model(chunks), dict.fromkeys(layout.roots, (0,)), LIMIT, node=dist.get_rank() // 2)
    expected = load_file(folder / "model.safetensors")
    wrong = []
    for factor in (1.0, 2.0):
        resharder.reset()
        seen = set()
        allocations = Allocations()
        for index, bucket in enumerate(resharder.buckets):
            with allocations:
                flat = resharder.assemble(index).get(0)
            assert bucket.nbytes <= LIMIT or len(bucket.tensors) == 1
            assert (flat is not None) == (dist.get_rank() in layout.roots)
            for slot in bucket.tensors:
                seen.add(slot.spec.name)
                assert slot.start % 256 == 0
                if flat is not None and not torch.equal(slot.view(flat), expected[slot.spec.name] * factor):
                    wrong.append(slot.spec.name)
            del flat
        assert seen == set(expected)
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.mul_(2)
    traffic, largest = resharder.traffic, max(bucket.nbytes for bucket in resharder.buckets)
    found = {name: getattr(traffic, name) for name in ("sent", "received", "needed")}
    found |= {"wrong": wrong, "feeds": dist.get_rank() in layout.roots, "largest_bucket": largest}
    return found | {"largest": allocations.largest, "live": allocations.live}


def build(folder: Path, layout: Layout) -> list[Any]:
    """Random Megatron chunks of the model in ``folder`` under ``layout``."""
    megatron_cpu.install()
    from megatron_bridge.hf_config import read_hf_config
    from mua.config.schema import MegatronConfig, ModelConfig
    from mua.megatron.model import build_chunks
    from mua.megatron.parallel import start_groups

    megatron = MegatronConfig(
        tensor_parallel=layout.tp, pipeline_parallel=layout.pp, virtual_pipeline=layout.vpp,
        context_parallel=layout.cp, expert_parallel=layout.ep, expert_tensor_parallel=layout.etp,
        data_parallel=layout.dp,
    )  # fmt: skip
    start_groups(megatron, 5)
    config = read_hf_config(folder)
    model = ModelConfig(path=folder, dtype="float32", max_length=512)
    return build_chunks(config, model, megatron)


def loaded_source(folder: Path, layout: Layout, config: Any, announce: Any = lambda *_: None) -> Any:
    """The source of engines of one machine, with the weights in ``folder``; its ``chunks`` may be loaded again."""
    from contextlib import nullcontext

    from megatron_bridge.convert import load_hf
    from megatron_bridge.plan import plan_model
    from mua.engine.cluster import Nodes
    from mua.engine.weight_sync import TrainerSource

    chunks = build(folder, layout)
    load_hf(chunks, folder)
    model = lambda: nullcontext(plan_model(chunks))  # noqa: E731
    source: Any = TrainerSource(
        model, config, Nodes(0, (0,), (tuple(range(layout.world)),)), dist.group.WORLD, announce
    )
    source.chunks = chunks
    return source
