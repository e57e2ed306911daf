"""What each rank of an engine is handed: the slices by tables and blocks, against slices written out here.

From real trainer layouts into real engines: tests/parity/test_engine_transports.py. Not covered: engines on a GPU.
"""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pybase64
import pytest
import torch
from torch import Tensor

from megatron_bridge.engine_shards import EngineRanks, engine_parameters
from megatron_bridge.families import FAMILIES
from megatron_bridge.plan import TensorSpec, as_matrix
from megatron_bridge.reshard import BucketLayout, engine_slices, lay_out
from mua.compat.sglang_shards import RECEIPT_BYTES, load, refusal, table
from mua.compat.shared_weights import shared_buffer, slices_handle
from mua.utils.errors import BridgeError

HIDDEN, HEADS, KV, DIM, WIDTH, EXPERTS, VOCABULARY = 8, 8, 2, 4, 12, 4, 101
CONFIG = {"model_type": "qwen3_moe", "num_key_value_heads": KV}
LAYER, ATTENTION, EXPERT = "model.layers.3.", "model.layers.3.self_attn.", "model.layers.3.mlp.experts."


def tensors() -> dict[str, Tensor]:
    """Hugging Face tensors of one layer with experts, no two elements alike."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        ATTENTION + "q_proj.weight": (HEADS * DIM, HIDDEN),
        ATTENTION + "k_proj.weight": (KV * DIM, HIDDEN),
        ATTENTION + "v_proj.weight": (KV * DIM, HIDDEN),
        ATTENTION + "o_proj.weight": (HIDDEN, HEADS * DIM),
        ATTENTION + "q_norm.weight": (DIM,),
        LAYER + "mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        shapes |= {f"{EXPERT}{expert}.{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes[f"{EXPERT}{expert}.down_proj.weight"] = HIDDEN, WIDTH
    count = iter(range(1, 10**9))
    return {
        name: torch.tensor([next(count) for _ in range(torch.Size(shape).numel())], dtype=torch.float32).view(shape)
        for name, shape in shapes.items()
    }


def expected(rank: int, ranks: EngineRanks) -> dict[str, Tensor]:
    """What SGLang's loaders put on a rank, by hand."""
    t, tp = tensors(), ranks.tensor
    query, key, value = (t[f"{ATTENTION}{name}_proj.weight"] for name in "qkv")
    head = rank * KV // tp if tp > KV else None
    keys = [s[head * DIM : head * DIM + DIM] if head is not None else s.chunk(tp)[rank] for s in (key, value)]
    padded = torch.zeros(128, HIDDEN)
    padded[:VOCABULARY] = t["model.embed_tokens.weight"]
    over = tp // ranks.expert
    own = range(rank // over * (EXPERTS // ranks.expert), (rank // over + 1) * (EXPERTS // ranks.expert))
    part = lambda name, dim: t[name].chunk(over, dim)[rank % over]  # noqa: E731
    up = [part(f"{EXPERT}{e}.{name}_proj.weight", 0) for e in own for name in ("gate", "up")]
    return {
        "model.embed_tokens.weight": padded.chunk(tp)[rank],
        ATTENTION + "qkv_proj.weight": torch.cat([query.chunk(tp)[rank], *keys]),
        ATTENTION + "o_proj.weight": t[ATTENTION + "o_proj.weight"].chunk(tp, 1)[rank],
        ATTENTION + "q_norm.weight": t[ATTENTION + "q_norm.weight"][:, None],
        LAYER + "mlp.gate.weight": t[LAYER + "mlp.gate.weight"],
        EXPERT + "w13_weight": torch.cat(up),
        EXPERT + "w2_weight": torch.cat([part(f"{EXPERT}{e}.down_proj.weight", 1) for e in own]),
    }


def parameters(ranks: EngineRanks) -> Any:
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors().items()]
    table = FAMILIES["qwen3_moe"].engine
    assert table is not None
    return engine_parameters(table, specs, CONFIG, ranks)


@pytest.mark.parametrize("limit", [1 << 20, 100])
@pytest.mark.parametrize(
    "ranks", [EngineRanks(1), EngineRanks(2), EngineRanks(4), EngineRanks(4, 2), EngineRanks(4, 4)], ids=str
)
def test_every_rank_is_handed_what_sglang_would_keep(ranks: EngineRanks, limit: int) -> None:
    target, source = engine_slices(parameters(ranks), limit), tensors()
    for rank in range(ranks.tensor):
        wanted = expected(rank, ranks)
        assert {name: tuple(matrix.shape) for name, matrix in wanted.items()} == target.matrices
        found = {name: torch.zeros(shape) for name, shape in target.matrices.items()}
        for name, placed in target.variants[rank].items():
            for spec, b in placed:
                values = as_matrix(source[name])[b.source_row : b.source_row + b.rows]
                row = spec.row + b.shard_row
                found[spec.name][row : row + b.rows, b.shard_col : b.shard_col + b.cols] = values[
                    :, b.source_col : b.source_col + b.cols
                ]
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
        assert sum(target.filled(rank).values()) == 4 * sum(int(matrix.count_nonzero()) for matrix in wanted.values())
    assert all(spec.nbytes <= max(limit, 4 * target.matrices[spec.name][1]) for spec in target.specs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: parameters(EngineRanks(3)), r"32 rows do not divide by 3; change engine\.tensor_parallel|divide by 3"),
        (lambda: EngineRanks(4, 3), r"engine\.extra\.ep_size 3 does not divide engine\.tensor_parallel 4"),
        (
            lambda: engine_parameters({}, [TensorSpec("model.new.weight", (2,), torch.bool)], CONFIG, EngineRanks(1)),
            r"model\.new\.weight is not in the table .*set engine\.load: tensors",
        ),
    ],
)  # fmt: skip
def test_what_has_no_slices_is_one_error(change: Any, message: str) -> None:
    with pytest.raises(BridgeError, match=message):
        change()


class Engine(torch.nn.Module):
    """A parameter of a layer, as SGLang has it; ``quant_method`` says how it keeps its weights."""

    def __init__(self, shape: tuple[int, ...], method: str = "UnquantizedLinearMethod", **flags: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        self.layer.weight = torch.nn.Parameter(torch.zeros(shape))
        self.layer.quant_method = type(method, (), flags)()


def bucket(row: int = 0) -> tuple[BucketLayout, Tensor]:
    """Rows 1 to 5 of ``layer.weight``, and room for a receipt."""
    (layout,) = lay_out([TensorSpec("layer.weight", (2, 3), torch.float32, row)], 4096)
    flat = torch.zeros(layout.nbytes + RECEIPT_BYTES, dtype=torch.uint8)
    layout.tensors[0].view(flat).copy_(torch.arange(6.0).view(2, 3))
    return layout, flat


def loaded(engine: Engine, rows: int = 5) -> str:
    layout, flat = bucket(row=2)
    text = table([("layer.weight", 2, 2, 3, "float32", 0)], {"layer.weight": [rows, 3]}, layout.nbytes)
    load(engine, [(text, flat)])
    assert flat[layout.nbytes] != 0, "no receipt"
    return refusal(flat[layout.nbytes :])


def test_a_band_of_rows_goes_where_it_belongs_and_is_receipted() -> None:
    engine = Engine((5, 3))
    assert loaded(engine) == ""
    assert torch.equal(engine.layer.weight[2:4], torch.arange(6.0).view(2, 3))
    assert not engine.layer.weight[:2].any()
    assert not engine.layer.weight[4:].any()


@pytest.mark.parametrize(
    ("engine", "rows", "message"),
    [
        (Engine((6, 3)), 5, r"layer\.weight is \[6, 3\] here, and the plan has \[5, 3\]"),
        (Engine((5, 3), "Fp8LinearMethod"), 5, "belongs to Fp8LinearMethod, which packs its weights"),
        (Engine((5, 3), use_triton_kernels=True), 5, "in another order by the engine's experts backend"),
        (Engine((5, 3), load_up_proj_weight_first=True), 5, "in another order"),
    ],
)
def test_an_engine_that_keeps_a_parameter_otherwise_refuses_and_writes_nothing(
    engine: Engine, rows: int, message: str
) -> None:
    assert re.search(message, loaded(engine, rows))
    assert not engine.layer.weight.any()


def test_a_handle_says_what_lies_where() -> None:
    layout, _ = bucket()
    flat = shared_buffer(layout.nbytes + RECEIPT_BYTES, torch.device("cpu"))
    handle = slices_handle(layout, {"layer.weight": (5, 3)}, flat, layout.nbytes)
    ((text, same),) = pickle.loads(pybase64.b64decode(handle))
    said = json.loads(text)
    assert said["slots"] == [["layer.weight", 0, 2, 3, "float32", 0]]
    assert (said["matrices"], said["receipt"]) == ({"layer.weight": [5, 3]}, layout.nbytes)
    same[0] = 7
    assert flat[0] == 7, "it is the same memory"
