"""What does not fit is named: tensors, parameters and configurations of a model on one process, saved or loaded.

Round trips and log-probabilities of every family are in tests/contract/test_family_contract.py, other layouts in
tests/parity/test_bridge_layouts.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bridge_support import EXAMPLES, build, start_parallel, write_hf_model
from exported_tensors import export_hf
from safetensors.torch import load_file, save_file
from torch import distributed

from megatron_bridge.convert import load_hf
from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.plan import attach_hf_config
from megatron_bridge.save import save_hf
from mua.config.schema import MegatronConfig
from mua.utils.errors import BridgeError

QWEN3 = EXAMPLES["qwen3 tied"]


@pytest.fixture(autouse=True, scope="module")
def single_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    start_parallel(MegatronConfig())
    yield
    distributed.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_hf_model(QWEN3, tmp_path / "model")
    return tmp_path / "model"


def change_weights(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | changes, folder / "model.safetensors")


def test_layers_beyond_nine_keep_their_numbers_and_values_the_parameters_dtype(tmp_path):
    write_hf_model(QWEN3 | {"num_hidden_layers": 12}, tmp_path)
    chunks = build(tmp_path, MegatronConfig(), "bfloat16")
    load_hf(chunks, tmp_path)
    stored, exported = load_file(tmp_path / "model.safetensors"), dict(export_hf(chunks))
    assert exported.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].bfloat16()) for name, tensor in exported.items())
    layers = [name.split(".")[2] for name in exported if ".layers." in name]
    assert layers == sorted(layers, key=int)


def test_a_tensor_of_another_shape_or_for_two_parameters_is_named(folder):
    chunks = build(folder, MegatronConfig())
    chunks[0].decoder.layers[0].mlp.linear_fc1.layer_norm_weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(BridgeError, match=r"model\.layers\.0\.post_attention_layernorm\.weight is mapped twice"):
        load_hf(chunks, folder)
    change_weights(folder, {"model.norm.weight": torch.ones(33)})
    with pytest.raises(BridgeError, match=r"model\.norm\.weight has shape \[33\], the model needs \[32\]"):
        load_hf(build(folder, MegatronConfig()), folder)


@pytest.mark.parametrize(("key", "value"), [("rms_norm_eps", 1e-3), ("tie_word_embeddings", False)])
def test_a_model_built_from_another_configuration_is_refused(folder, key, value):
    chunks = build(folder, MegatronConfig())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {key: value}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(BridgeError, match=r"the model was built with .*=.*, but config\.json means"):
        load_hf(chunks, folder)


def test_a_stored_copy_of_a_tied_output_layer_must_be_equal(folder):
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_weights(folder, {"lm_head.weight": embedding.clone()})
    chunks = build(folder, MegatronConfig())
    load_hf(chunks, folder)
    assert "lm_head.weight" not in dict(export_hf(chunks))
    change_weights(folder, {"lm_head.weight": embedding + 1})
    with pytest.raises(BridgeError, match=r"ties the embeddings, but lm_head\.weight differs"):
        load_hf(chunks, folder)


def test_export_without_a_configuration_tells_the_fix(folder):
    chunks = build(folder, MegatronConfig())
    with pytest.raises(BridgeError, match=r"call attach_hf_config"):
        next(export_hf(chunks))
    attach_hf_config(chunks, read_hf_config(folder))
    assert next(export_hf(chunks))[0] == "model.embed_tokens.weight"


def test_save_raises_what_went_wrong(folder):
    chunks = build(folder, MegatronConfig())
    load_hf(chunks, folder)
    save_hf(chunks, folder.with_name("out"), source=folder)
    with pytest.raises(BridgeError, match=r"no config\.json to copy"):
        save_hf(chunks, folder.with_name("other"), source=folder.with_name("nowhere"))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "out"]
