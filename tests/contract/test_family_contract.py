"""What every model family must do; any family put in the registry is run through it, and the one of the documentation.

On one process, with real Megatron-Core's local layers: for every example of the family load, log-probabilities of
transformers, bit-exact export; every line of the table is used by an example; what is missing, left over or unmapped is
an error that names it. The names of Transformer Engine's layers lead to the same tensors as those of local layers. More
processes are in tests/parity/test_bridge_layouts.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bridge_support import (
    EXAMPLES,
    IDS,
    LAYOUTS,
    OF_FUSED,
    build,
    documented_family,
    hf_log_probabilities,
    layouts_of,
    log_probabilities,
    start_parallel,
    stored_tensors,
    write_hf_model,
)
from exported_tensors import export_hf
from families_table import TABLE, table_cells
from safetensors.torch import load_file, save_file
from torch import distributed

from megatron_bridge.convert import load_hf
from megatron_bridge.families import FAMILIES
from megatron_bridge.family import Family, HfConfig, Sizes
from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.plan import plan_model
from megatron_bridge.save import save_hf
from mua.config.schema import MegatronConfig
from mua.utils.errors import BridgeError

DOCS = Path(__file__).parent.parent.parent / "docs"


DOCUMENTED = documented_family()
CASES = EXAMPLES | {f"{DOCUMENTED.model_type} {name}": config for name, config in DOCUMENTED.examples.items()}
every_example = pytest.mark.parametrize("example", CASES)
every_family = pytest.mark.parametrize("family", [*FAMILIES, DOCUMENTED.model_type])


@pytest.fixture(autouse=True, scope="module")
def single_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    start_parallel(MegatronConfig())
    yield
    distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def documented(monkeypatch):
    monkeypatch.setitem(FAMILIES, DOCUMENTED.model_type, DOCUMENTED)


def loaded(folder: Path, dtype: torch.dtype) -> Sequence[Any]:
    chunks = build(folder, MegatronConfig(), str(dtype).removeprefix("torch."))
    load_hf(chunks, folder)
    return chunks


@every_example
def test_log_probabilities_equal_transformers(tmp_path, example):
    hf = write_hf_model(CASES[example], tmp_path)
    chunks = loaded(tmp_path, torch.float32)
    expected, found = hf_log_probabilities(hf), log_probabilities(chunks, IDS)
    assert expected.std() > 0.5, "the model must tell tokens apart, or nothing is compared"
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_example
def test_import_then_export_is_bit_exact(tmp_path, example, dtype):
    write_hf_model(CASES[example], tmp_path, dtype)
    chunks = loaded(tmp_path, dtype)
    assert not any(tensor.isnan().any() for tensor in stored_tensors(chunks[0]).values())
    expected, found = load_file(tmp_path / "model.safetensors"), dict(export_hf(chunks))
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    embedding, vocabulary = chunks[0].embedding.word_embeddings.weight, CASES[example]["vocab_size"]
    assert len(embedding) > vocabulary
    assert not embedding[vocabulary:].any()


@pytest.mark.parametrize("example", ["qwen2 untied", "glm4_moe biases"])
def test_a_saved_folder_loads_in_transformers(tmp_path, example):
    hf = write_hf_model(EXAMPLES[example], tmp_path / "source", torch.bfloat16)
    out, chunks = tmp_path / "out", loaded(tmp_path / "source", torch.bfloat16)
    save_hf(chunks, out, source=tmp_path / "source", max_shard_bytes=20_000)
    assert len(list(out.glob("*.safetensors"))) > 3
    again, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor.float()) for name, tensor in hf.state_dict().items())


@every_family
def test_every_line_of_the_table_is_used_by_an_example(tmp_path, family):
    used: set[str] = set()
    for example, config in FAMILIES[family].examples.items():
        assert config["model_type"] == family
        write_hf_model(config, tmp_path / example)
        parameters = plan_model(loaded(tmp_path / example, torch.float32)).parameters
        used |= {pattern_of(FAMILIES[family], parameter.name) for parameter in parameters}
    assert used == {pattern for pattern in FAMILIES[family].parameters if not OF_FUSED.search(pattern)}


def pattern_of(family: Family, name: str) -> str:
    found = family.rule(name)
    assert found is not None
    return next(pattern for pattern, rule in family.parameters.items() if rule is found[0])


LAYER = "decoder.layers.{}."
FUSED_NAMES = {
    LAYER + "self_attention.linear_qkv.layer_norm_weight": LAYER + "input_layernorm.weight",
    LAYER + "mlp.linear_fc1.layer_norm_weight": LAYER + "pre_mlp_layernorm.weight",
    LAYER + "mlp.experts.linear_fc1.weight{}": LAYER + "mlp.experts.local_experts.{}.linear_fc1.weight",
    LAYER + "mlp.experts.linear_fc2.weight{}": LAYER + "mlp.experts.local_experts.{}.linear_fc2.weight",
}
"""Parameters of Transformer Engine's layers, and those of local layers with the same values."""


@every_family
def test_transformer_engines_names_lead_to_the_same_tensors(family):
    table = FAMILIES[family]
    assert {line for line in table.parameters if OF_FUSED.search(line)} <= FUSED_NAMES.keys()
    for fused, local in FUSED_NAMES.items():
        if "experts" in local and local not in table.parameters:
            continue
        found, expected = (table.rule(name.format(3, 17)) for name in (fused, local))
        assert found[0].sources == expected[0].sources
        assert found[1] == expected[1] == (("3", "17") if "experts" in local else ("3",))
        sizes = Sizes(vocab=100, heads=4, query_groups=2, head_dim=8, tp=2)
        assert table.packing(fused.format(3, 17), (32, 16), sizes) == table.packing(
            local.format(3, 17), (32, 16), sizes
        )


@every_family
def test_what_is_left_over_missing_or_unmapped_is_named(tmp_path, monkeypatch, family):
    config = last_example(family)
    write_hf_model(config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    chunks = build(tmp_path, MegatronConfig())
    for victim in (next(iter(tensors)), sorted(tensors)[-1]):
        save_file({name: tensor for name, tensor in tensors.items() if name != victim}, tmp_path / "model.safetensors")
        with pytest.raises(BridgeError, match=rf"lacks {re.escape(victim)}, which the model needs"):
            load_hf(chunks, tmp_path)
    save_file(tensors | {"model.layers.1.surplus": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(BridgeError, match=r"has model\.layers\.1\.surplus, which no parameter of the model takes"):
        load_hf(chunks, tmp_path)
    pattern = "decoder.layers.{}.self_attention.linear_proj.weight"
    smaller = {name: rule for name, rule in FAMILIES[family].parameters.items() if name != pattern}
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], parameters=smaller))
    with pytest.raises(BridgeError, match=r"decoder\.layers\.0\.self_attention\.linear_proj\.weight is not in the"):
        load_hf(build(tmp_path, MegatronConfig()), tmp_path)


def last_example(family: str) -> HfConfig:
    return list(FAMILIES[family].examples.values())[-1]


def test_declared_extras_are_left_out_and_no_others(tmp_path):
    """GLM-4.5 stores the layers of multi-token prediction after the last one."""
    config = EXAMPLES["glm4_moe biases"] | {"num_nextn_predict_layers": 1}
    write_hf_model(config, tmp_path)
    assert read_hf_config(tmp_path)["num_nextn_predict_layers"] == 1
    tensors = load_file(tmp_path / "model.safetensors")
    assert not any(name.startswith("model.layers.4.") for name in tensors)
    chunks = build(tmp_path, MegatronConfig())
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    load_hf(chunks, tmp_path)
    assert dict(export_hf(chunks)).keys() == tensors.keys()
    save_file(tensors | {"model.layers.5.eh_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(BridgeError, match=r"has model\.layers\.5\.eh_proj\.weight"):
        load_hf(chunks, tmp_path)


def test_a_routers_bias_stays_precise_when_the_model_is_cast(tmp_path):
    """Megatron's mixed-precision wrapper casts buffers too; the bias of a published checkpoint is float32."""
    write_hf_model(EXAMPLES["glm4_moe biases"], tmp_path, torch.bfloat16)
    chunks = [chunk.bfloat16() for chunk in build(tmp_path, MegatronConfig(), "bfloat16")]
    load_hf(chunks, tmp_path)
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    expected = load_file(tmp_path / "model.safetensors")[name]
    assert not torch.equal(expected, expected.bfloat16().float())
    assert torch.equal(dict(export_hf(chunks))[name], expected)


def test_the_table_of_families_is_of_this_registry():
    cells = table_cells(TABLE.read_text(encoding="utf-8"))
    assert list(cells) == list(LAYOUTS)
    for name, row in cells.items():
        assert list(row) == list(EXAMPLES)
        for example, cell in row.items():
            assert (cell != "-") == (name in layouts_of(EXAMPLES[example]))
            assert cell == "-" or float(cell) <= 1e-4
    page = TABLE.read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert named == ["model_type", *(family for family in FAMILIES if family != DOCUMENTED.model_type)]
