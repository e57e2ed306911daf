"""Buckets of whole tensors from the shards of two gloo ranks, over a plan made by hand: every byte, whoever feeds.

Layouts of real models, and the bounds on memory, are in tests/parity/test_megatron_layouts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_on_workers
from torch import Tensor

from megatron_bridge.blocks import Packing, Split
from megatron_bridge.plan import ModelPlan, PlannedParameter
from megatron_bridge.reshard import Resharder

TP = 2


def whole() -> dict[str, Tensor]:
    """The Hugging Face tensors, of several widths; no two elements of one are alike."""
    sizes = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "gate": (6, 5), "up": (6, 5), "down": (5, 6), "norm": (7,)}
    dtypes = {"gate": torch.bfloat16, "up": torch.bfloat16, "down": torch.float64, "norm": torch.float64}
    return {
        name: (torch.arange(torch.Size(size).numel()) + 100 * place).reshape(size).to(dtypes.get(name, torch.float32))
        for place, (name, size) in enumerate(sizes.items())
    }


def shards(rank: int) -> dict[str, Tensor]:
    """What a tensor-parallel rank holds, written out without the code under test."""
    t = whole()
    # Two key-value heads, one a rank: its queries, its keys, its values.
    qkv = torch.cat([t["q"][4 * rank : 4 * rank + 4], t["k"][2 * rank : 2 * rank + 2], t["v"][2 * rank : 2 * rank + 2]])
    fc1 = torch.cat([t["gate"][3 * rank : 3 * rank + 3], t["up"][3 * rank : 3 * rank + 3]])
    return {"qkv": qkv, "fc1": fc1, "fc2": t["down"][:, 3 * rank : 3 * rank + 3].contiguous(), "norm": t["norm"]}


PACKINGS = {
    "qkv": Packing(("q", "k", "v"), (4, 2, 2), groups=2, rows=16, cols=6, split=Split.ROWS),
    "fc1": Packing(("gate", "up"), (3, 3), groups=TP, rows=12, cols=5, split=Split.ROWS),
    "fc2": Packing(("down",), (5,), groups=1, rows=5, cols=6, split=Split.COLUMNS),
    "norm": Packing(("norm",), (7,), groups=1, rows=7, cols=1, split=Split.REPLICATED),
}


def plan() -> ModelPlan:
    local = shards(dist.get_rank())
    parameters = [
        PlannedParameter(name, tuple(held.shape), held.dtype, (0,) if name == "norm" else (0, 1), PACKINGS[name], False)
        for name, held in local.items()
    ]
    shard = {name: 0 if name == "norm" else dist.get_rank() for name in local}
    assert dist.group.WORLD is not None
    return ModelPlan(parameters, local, shard, dist.group.WORLD, tied=False, hf_config={})


def resharded(roots: tuple[int, ...], limit: int, alignment: int) -> dict[str, Any]:
    """On each rank the names of tensors that arrived as they are, and bytes received."""
    resharder = Resharder(plan(), dict.fromkeys(roots, (0,)), limit, alignment=alignment)
    expected, right = whole(), []
    for index, layout in enumerate(resharder.buckets):
        flat = resharder.assemble(index).get(0)
        assert (flat is not None) == (dist.get_rank() in roots)
        right += [
            s.spec.name for s in layout.tensors if flat is not None and torch.equal(s.view(flat), expected[s.spec.name])
        ]
    traffic = resharder.traffic
    return {"right": sorted(right), "received": traffic.received, "needed": traffic.needed, "sent": traffic.sent}


@pytest.mark.parametrize(("limit", "alignment"), [(1 << 20, 256), (1 << 20, 1), (200, 256)])
@pytest.mark.parametrize("roots", [(0,), (1,), (0, 1)])
def test_roots_get_every_tensor_and_only_what_they_lack(roots: tuple[int, ...], limit: int, alignment: int) -> None:
    results = run_on_workers(TP, resharded, roots, limit, alignment)
    split = sum(tensor.nbytes for name, tensor in whole().items() if name != "norm")
    for rank, result in enumerate(results):
        assert result["right"] == (sorted(whole()) if rank in roots else [])
        assert result["received"] == result["needed"] == (split // 2 if rank in roots else 0)
    assert sum(result["sent"] for result in results) == len(roots) * split // 2
