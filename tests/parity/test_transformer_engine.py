"""Transformer Engine's layers, rehearsed on the CPU: Megatron's own specification is built, trained, saved, resumed.

The modules are those of ``tests/te``, which has their names, arguments and arithmetic; what they are held to is a
single process of local layers, itself held to transformers in test_megatron_layouts.py. Covers, over real gloo ranks:
log-probabilities, loss, gradients, weights under the distributed optimizer with Transformer Engine's Adam, experts'
load, export of whole tensors by the plan that engines are fed from, checkpoints carried between the implementations and
layouts, every family's names, prefix trees, replayed routing, refusals. That faults are found is shown in
test_planted_faults.py; a step with a real engine is in tests/e2e/test_transformer_engine_step.py.

Not covered: Transformer Engine's kernels, CUDA, NCCL, bfloat16 parity, communication overlap, CUDA graphs.
"""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridge_support import (
    EXAMPLES,
    IDS,
    OF_FUSED,
    build,
    documented_family,
    hf_log_probabilities,
    log_probabilities,
    start_parallel,
    write_hf_model,
)
from exported_tensors import export_hf
from safetensors.torch import load_file, save_file

from megatron_bridge.convert import load_hf
from megatron_bridge.families import FAMILIES
from megatron_bridge.plan import plan_model
from mua.config.schema import MegatronConfig
from mua.megatron import layouts, offline
from mua.utils.errors import ModelError
from tests import layout_support, te_support
from tests.distributed import RanksFailed
from tests.megatron_support import backend, make_batch
from tests.te import signatures
from tests.te_ranks import STAND_IN, run_with_transformer_engine
from tests.te_support import FUSED, LOCAL, REHEARSED, carried, rehearse

ALWAYS: dict[str, tuple[str, ...]] = {"dense": ("TP2",), "moe": ()}
BEYOND_CI = ("TP2 PP2 DP2", "TP2 PP2 DP2 EP4 ETP1")
"""Of eight processes; :mod:`tools.rehearsal` runs them for the page."""
GRID = [
    pytest.param(
        kind,
        name,
        marks=[] if name in ALWAYS[kind] else pytest.mark.grid if name in BEYOND_CI else pytest.mark.slow,
        id=f"{kind} {name}",
    )
    for kind, names in REHEARSED.items()
    for name in names
]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(("kind", "name"), GRID)
def test_a_layout_on_transformer_engine_is_a_single_process_of_local_layers(kind: str, name: str, models: Path) -> None:
    found = rehearse(models, kind, name)
    assert not found.refused(), found


def test_the_page_lists_what_is_rehearsed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformer_engine.md").read_text()
    for kind, heading in (("dense", "Dense models"), ("moe", "Mixtures of experts")):
        section = page.split(f"## {heading}")[1].split("\n## ")[0]
        assert tuple(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE)) == REHEARSED[kind]
    for kind, names in REHEARSED.items():
        assert set(names) - {"single"} <= set({"dense": layouts.DENSE, "moe": layouts.MOE}[kind])


def modules_of(folder: str) -> list[str]:
    """Class names of the modules of a layer with experts, and of the optimizer."""
    with backend(Path(folder)) as built:
        chunk = built.policy.chunks[0]
        layer = chunk.decoder.layers[0]
        inner = built.policy.optimizer.megatron.chained_optimizers[0].optimizer
        parts = (
            layer.self_attention.linear_qkv, layer.self_attention.core_attention, layer.self_attention.linear_proj,
            layer.self_attention.q_layernorm, layer.pre_mlp_layernorm, layer.mlp.router, layer.mlp.experts,
            layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2, chunk.decoder.final_layernorm, inner,
        )  # fmt: skip
        config = chunk.config
        assert all((config.apply_rope_fusion, config.moe_permute_fusion, config.moe_router_fusion))
        return [type(part).__name__ for part in parts]


def test_the_layers_are_megatrons_own_of_transformer_engine(models: Path) -> None:
    path = layout_support.model_for(models, "moe", "single")
    assert run_with_transformer_engine(1, modules_of, str(path)) == [[
        "TELayerNormColumnParallelLinear", "FusedAttention", "TERowParallelLinear", "RMSNorm", "RMSNorm",
        "PackedRouter", "TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "RMSNorm",
        "FusedAdam",
    ]]  # fmt: skip


@slow
@pytest.mark.parametrize(
    ("kind", "before", "after"), [("dense", "TP2 PP2", "TP2 CP2"), ("moe", "TP2 EP2 ETP1", "DP2 EP2")]
)
def test_a_checkpoint_changes_implementation_and_layout_at_once(
    kind: str, before: str, after: str, models: Path, tmp_path: Path
) -> None:
    path = layout_support.model_for(models, kind, before)
    for first, second in ((LOCAL, FUSED), (FUSED, LOCAL)):
        sizes = (layouts.sizes(name) | {"implementation": one} for name, one in ((before, first), (after, second)))
        where = str(tmp_path / first / "step_00000001")
        world = layout_support.world_of(before)
        assert max(run_with_transformer_engine(world, carried, str(path), *sizes, where)) < 1e-3


def saved(folder: str, where: str) -> dict[str, Any]:
    """A step on Transformer Engine's layers, its checkpoint, and the weights."""
    from tests.megatron_support import exported

    with backend(Path(folder)) as built:
        built.train_step(make_batch(), layout_support.LOSS)
        built.save(Path(where), {"next": 1})
        return exported(built)


@slow
def test_a_machine_without_transformer_engine_converts_its_checkpoints(models: Path, tmp_path: Path) -> None:
    path, checkpoint = layout_support.model_for(models, "moe", "single"), tmp_path / "step_00000001"
    (weights,) = run_with_transformer_engine(1, saved, str(path), str(checkpoint))
    offline.megatron_to_hf(checkpoint, tmp_path / "hf", source=path)
    found = {
        name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], torch.from_numpy(values)) for name, values in weights.items())


DOCUMENTED = documented_family()
CASES = EXAMPLES | {f"{DOCUMENTED.model_type} {name}": config for name, config in DOCUMENTED.examples.items()}


def families_round_trip(root: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Every family's example through Transformer Engine's names: what went wrong with it, and the names it has."""
    start_parallel(MegatronConfig())
    FAMILIES[DOCUMENTED.model_type] = DOCUMENTED
    faults: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}
    for folder in sorted(Path(root).iterdir()):
        chunks = build(folder, MegatronConfig())
        load_hf(chunks, folder)
        weights, found = load_file(folder / "model.safetensors"), dict(export_hf(chunks))
        alike = found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
        expected = load_file(folder / "expected" / "values.safetensors")["values"]
        difference = float((log_probabilities(chunks, IDS) - expected).abs().max())
        faults[folder.name] = [] if alike and difference < 2e-5 else [f"alike: {alike}", f"difference: {difference}"]
        names[folder.name] = sorted({parameter.name for parameter in plan_model(chunks).parameters})
    del FAMILIES[DOCUMENTED.model_type]
    return faults, names


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    root = tmp_path_factory.mktemp("families")
    for example, config in CASES.items():
        hf = write_hf_model(config, root / example)
        (root / example / "expected").mkdir()
        save_file({"values": hf_log_probabilities(hf)}, root / example / "expected" / "values.safetensors")
    (found,) = run_with_transformer_engine(1, families_round_trip, str(root))
    return found


def test_every_family_goes_through_transformer_engines_names(families: Any) -> None:
    assert families[0] == {example: [] for example in CASES}


def test_every_line_of_a_familys_table_for_fused_layers_is_used(families: Any) -> None:
    for model_type, family in (FAMILIES | {DOCUMENTED.model_type: DOCUMENTED}).items():
        of_family = [found for example, found in families[1].items() if CASES[example]["model_type"] == model_type]
        rules = [rule for found in of_family for name in found if (rule := family.rule(name)) is not None]
        used = {line for line, rule in family.parameters.items() if any(found is rule for found, *_ in rules)}
        assert {line for line in family.parameters if OF_FUSED.search(line)} <= used, model_type


def with_trees(folder: str) -> tuple[list[Any], list[Any]]:
    """Log-probabilities of sequences that begin alike: as trees, and side by side."""
    from dataclasses import replace

    batch = make_batch((30, 30, 24))
    shared = batch.sequences[0].ids[:16]
    sequences = [replace(one, ids=np.concatenate([shared, one.ids[16:]])) for one in batch.sequences]
    found = []
    for merge in (True, False):
        with backend(Path(folder), merge_prefixes=merge) as built:
            found.append(built.log_probabilities(sequences, 1.0))
    return found[0], found[1]


def test_prefix_trees_go_to_block_masks_and_give_the_same(models: Path) -> None:
    path = layout_support.model_for(models, "dense", "single")
    ((trees, apart),) = run_with_transformer_engine(1, with_trees, str(path))
    for one, other in zip(trees, apart, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=0)


AWARE = {"precision_aware": True}
PRECISE = {"precision_aware": True, "exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "bfloat16"}


def resumed(
    folder: str, where: str, settings: dict[str, Any], state: dict[str, Any], after: dict[str, Any]
) -> list[list[float]]:
    """Losses of three steps in bfloat16, without a break and with a checkpoint between the first and the second.

    Adam keeps its state as ``state`` says, where the checkpoint is loaded as ``after`` says.
    """
    adam, other = (layout_support.ADAM.model_copy(update={"learning_rate": 1e-3, **kept}) for kept in (state, after))
    found: list[list[float]] = [[], []]

    def steps(built: Any, which: int, *numbers: int) -> None:
        found[which] += [
            built.train_step(layout_support.batch(step), layout_support.LOSS)["policy/loss"] for step in numbers
        ]

    with backend(Path(folder), dtype="bfloat16", optimizer=adam, **settings) as built:
        steps(built, 0, 0, 1, 2)
    with backend(Path(folder), dtype="bfloat16", optimizer=adam, **settings) as built:
        steps(built, 1, 0)
        built.save(Path(where), {"next": 1})
    with backend(Path(folder), dtype="bfloat16", optimizer=other, **settings) as built:
        built.load(Path(where))
        steps(built, 1, 1, 2)
    return found


@slow
@pytest.mark.parametrize(
    ("settings", "state", "after"),
    [
        pytest.param({}, {}, {}, id="bfloat16"),
        pytest.param({"fp8": "e4m3"}, {}, {}, id="fp8 by blocks"),
        pytest.param({}, PRECISE, PRECISE, id="precision-aware"),
        pytest.param({"fp8": "e4m3"}, PRECISE, PRECISE, id="precision-aware, fp8 by blocks"),
        pytest.param({}, AWARE, {}, id="from precision-aware"),
        pytest.param({}, {}, AWARE, id="to precision-aware"),
    ],
)
def test_low_precision_trains_and_resumes(
    settings: dict[str, Any], state: dict[str, Any], after: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    path, where = layout_support.model_for(models, "dense", "DP2"), tmp_path / "step_00000001"
    ranks = run_with_transformer_engine(
        2, resumed, str(path), str(where), {"data_parallel": 2} | settings, state, after
    )
    expected = pickle.loads((path / "reference.pickle").read_bytes())["plain"]["policy/loss"]
    for straight, again in ranks:
        assert straight == again  # every bit of the state is in the checkpoint
        assert straight[0] == pytest.approx(float(expected[0]), abs=0.05)
        assert straight[0] != float(expected[0])


def upstreams_own(folder: str, where: str) -> tuple[str, str]:
    """What goes wrong in Megatron with a precise Adam: its state made anew, and its checkpoint loaded."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    said = ["", ""]
    adam = layout_support.ADAM.model_copy(update=PRECISE)
    with backend(Path(folder), dtype="bfloat16", optimizer=adam) as built, pytest.MonkeyPatch.context() as patch:
        part = built.policy.optimizer.megatron.chained_optimizers[0]
        try:
            part.init_state_fn(part.optimizer, part.config)
        except TypeError as error:
            said[0] = str(error)
        for name in ("_get_main_param_and_optimizer_states", "_set_main_param_and_optimizer_states"):
            patch.setattr(DistributedOptimizer, name, getattr(DistributedOptimizer, name).__wrapped__)
        built.train_step(make_batch(), layout_support.LOSS)
        built.save(Path(where), {"next": 1})
        try:
            built.load(Path(where))
        except ModelError as error:
            said[1] = str(error)
    return said[0], said[1]


@slow
def test_upstream_still_resumes_no_precise_adam(models: Path, tmp_path: Path) -> None:
    """``tests/te/signatures.json`` says that the argument is Transformer Engine's."""
    path = layout_support.model_for(models, "dense", "single")
    ((initialized, loaded),) = run_with_transformer_engine(1, upstreams_own, str(path), str(tmp_path / "step_00000001"))
    assert "store_param_remainders" in initialized
    assert "AssertionError" in loaded


def refusals() -> dict[str, str]:
    """What the stand-in says to input that Transformer Engine refuses."""
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch import DotProductAttention, Linear, autocast
    from transformer_engine.pytorch.distributed import set_tensor_model_parallel_attributes

    said: dict[str, str] = {}

    def refused(name: str, call: Any) -> None:
        try:
            call()
        except (AssertionError, ValueError, TypeError, RuntimeError) as error:
            said[name] = str(error)

    attention, x = DotProductAttention(2, 4, attn_mask_type="padding_causal", qkv_format="thd"), torch.zeros(5, 2, 4)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    linear = Linear(16, 16, bias=False, device="cpu")
    mask = {"attn_mask_type": "padding_causal"}
    refused("int64", lambda: attention(x, x, x, cu_seqlens_q=ends.long(), cu_seqlens_kv=ends.long(), **mask))
    refused("mask", lambda: attention(x, x, x, cu_seqlens_q=ends, cu_seqlens_kv=ends, attn_mask_type="causal"))
    refused("batch", lambda: attention(x[None], x[None], x[None], cu_seqlens_q=ends, cu_seqlens_kv=ends, **mask))
    refused("keyword", lambda: Linear(16, 16, gather_output=True, device="cpu"))  # type: ignore[call-arg]
    refused("dtype", lambda: linear(torch.zeros(8, 16, dtype=torch.bfloat16)))
    refused("twice", lambda: set_tensor_model_parallel_attributes(linear.weight, True, 0, 1))
    with autocast(enabled=True, recipe=Float8BlockScaling()):
        refused("fp8", lambda: linear(torch.zeros(5, 16)))
        assert linear(torch.zeros(8, 16)).shape == (8, 16)
    return said


def test_the_stand_in_refuses_what_transformer_engine_refuses() -> None:
    (said,) = run_with_transformer_engine(1, refusals)
    expected = {
        "int64": "dtype torch.int32",
        "mask": "padding or padding_causal",
        "batch": "3D tensors",
        "keyword": "gather_output",
        "dtype": "must match when outside of autocasted region",
        "twice": "already has attribute",
        "fp8": "divisible by 8",
    }
    assert said.keys() == expected.keys()
    assert all(expected[name] in message for name, message in said.items()), said


def test_a_failed_rank_is_told() -> None:
    with pytest.raises(RanksFailed, match="/nowhere"):
        run_with_transformer_engine(1, modules_of, "/nowhere")


@pytest.mark.parametrize("path", sorted(json.loads(signatures.RECORDED.read_text())))
def test_the_stand_in_has_the_signatures_of_transformer_engine(path: str) -> None:
    recorded = json.loads(signatures.RECORDED.read_text())[path]
    source = STAND_IN / "transformer_engine" / signatures.ELSEWHERE.get(path, path)
    for name, own in signatures.signatures(source, tuple(recorded)).items():
        assert len(own) == len(recorded[name]), name
        for ours, theirs in zip(own, recorded[name], strict=True):
            assert ours[:2] == theirs[:2], name
            assert theirs[2] == "..." or ours[2] == theirs[2], (name, ours, theirs)


def test_what_is_rehearsed_is_proven_for_local_layers_too() -> None:
    assert te_support.REHEARSED.keys() == layout_support.KINDS.keys()
    assert all(len(names) >= 7 for names in te_support.REHEARSED.values())  # a single process and six layouts
