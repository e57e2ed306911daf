"""Coverage of parameters and tensors, and both of Megatron's layer specifications, without building Megatron.

A skeleton carries the parameter names of a GPTModel (local or Transformer Engine specification) and nothing else, which
shows that the bridge needs only names, shapes and the configuration. One process; other layouts, real models and
log-probabilities are in tests/contract/test_family_contract.py and tests/parity/test_bridge_layouts.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from exported_tensors import export_hf
from safetensors.torch import load_file, save_file
from torch import distributed, nn

from megatron_bridge.convert import load_hf
from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.plan import attach_hf_config, gpt_model_kwargs, transformer_config_kwargs
from megatron_bridge.save import save_hf
from mua.utils.errors import BridgeError

HIDDEN, HEADS, GROUPS, HEAD, FFN, VOCAB, PADDED = 8, 4, 2, 3, 5, 11, 16
LOCAL = {"first": "input_layernorm.weight", "second": "pre_mlp_layernorm.weight"}
FUSED = {"first": "self_attention.linear_qkv.layer_norm_weight", "second": "mlp.linear_fc1.layer_norm_weight"}


@pytest.fixture(autouse=True)
def single_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def hf_config(tied: bool = False, layers: int = 2) -> dict:
    return {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "intermediate_size": FFN,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "vocab_size": VOCAB,
        "rope_theta": 1e4,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


def hf_shapes(tied: bool, layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            "self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
            "self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            "self_attn.q_norm.weight": (HEAD,),
            "self_attn.k_norm.weight": (HEAD,),
            "mlp.gate_proj.weight": (FFN, HIDDEN),
            "mlp.up_proj.weight": (FFN, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, FFN),
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return shapes


def write_model(folder: Path, *, tied: bool = False, layers: int = 2) -> dict[str, torch.Tensor]:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(tied, layers)), encoding="utf-8")
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in hf_shapes(tied, layers).items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def plant(root: nn.Module, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    root.register_parameter(last, nn.Parameter(torch.full(shape, torch.nan, dtype=dtype)))


def skeleton(config: dict, norms: dict[str, str] = LOCAL, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The parameters of a GPTModel of this configuration, all NaN."""
    layer = {
        norms["first"]: (HIDDEN,),
        "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD, HIDDEN),
        "self_attention.q_layernorm.weight": (HEAD,),
        "self_attention.k_layernorm.weight": (HEAD,),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD),
        norms["second"]: (HIDDEN,),
        "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
    }
    model = nn.Module()
    plant(model, "embedding.word_embeddings.weight", (PADDED, HIDDEN), dtype)
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList(nn.Module() for _ in range(config["num_hidden_layers"]))
    for index, module in enumerate(model.decoder.layers):
        module.layer_number = index + 1
        for name, shape in layer.items():
            plant(module, name, shape, dtype)
    plant(model, "decoder.final_layernorm.weight", (HIDDEN,), dtype)
    if not config["tie_word_embeddings"]:
        plant(model, "output_layer.weight", (PADDED, HIDDEN), dtype)
    model.config = SimpleNamespace(**transformer_config_kwargs(config))
    model.share_embeddings_and_output_weights = gpt_model_kwargs(config)["share_embeddings_and_output_weights"]
    model.pg_collection = SimpleNamespace(tp=distributed.group.WORLD, mp=distributed.group.WORLD)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norms", [LOCAL, FUSED], ids=["local", "transformer_engine"])
def test_both_layer_specifications_round_trip_bit_exact(tmp_path, tied, norms):
    tensors = write_model(tmp_path, tied=tied)
    model = skeleton(read_hf_config(tmp_path), norms)
    load_hf([model], tmp_path)
    exported = dict(export_hf([model]))
    assert exported.keys() == tensors.keys()
    assert all(torch.equal(exported[name], tensors[name]) for name in tensors)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert not model.embedding.word_embeddings.weight[VOCAB:].any()


def test_layers_beyond_nine_keep_their_numbers(tmp_path):
    tensors = write_model(tmp_path, layers=12)
    model = skeleton(read_hf_config(tmp_path))
    load_hf([model], tmp_path)
    assert torch.equal(
        model.decoder.layers[10].input_layernorm.weight, tensors["model.layers.10.input_layernorm.weight"]
    )
    layers = [name.split(".")[2] for name, _ in export_hf([model]) if ".layers." in name]
    assert layers == sorted(layers, key=int)


def test_values_are_cast_to_the_parameters_dtype(tmp_path):
    tensors = write_model(tmp_path)
    model = skeleton(read_hf_config(tmp_path), dtype=torch.bfloat16)
    load_hf([model], tmp_path)
    assert all(torch.equal(tensor, tensors[name].bfloat16()) for name, tensor in export_hf([model]))


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_what_does_not_fit_is_named(tmp_path):
    write_model(tmp_path)
    model = skeleton(read_hf_config(tmp_path))
    plant(model.decoder.layers[0], FUSED["first"], (HIDDEN,), torch.float32)
    with pytest.raises(BridgeError, match=r"model\.layers\.0\.input_layernorm\.weight is mapped twice"):
        load_hf([model], tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(HIDDEN + 1)}))
    with pytest.raises(BridgeError, match=r"model\.norm\.weight has shape \[9\], the model needs \[8\]"):
        load_hf([skeleton(read_hf_config(tmp_path))], tmp_path)


@pytest.mark.parametrize(
    ("key", "value"), [("num_hidden_layers", 3), ("rms_norm_eps", 1e-5), ("tie_word_embeddings", True)]
)
def test_a_model_built_from_another_configuration_is_refused(tmp_path, key, value):
    write_model(tmp_path)
    model = skeleton(hf_config() | {key: value})
    with pytest.raises(BridgeError, match=r"the model was built with .*=.*, but config\.json means"):
        load_hf([model], tmp_path)


def test_a_stored_copy_of_a_tied_output_layer_must_be_equal(tmp_path):
    tensors = write_model(tmp_path, tied=True)
    embedding = tensors["model.embed_tokens.weight"]
    change_weights(tmp_path, lambda stored: stored.update({"lm_head.weight": embedding.clone()}))
    model = skeleton(read_hf_config(tmp_path))
    load_hf([model], tmp_path)
    assert "lm_head.weight" not in dict(export_hf([model]))
    change_weights(tmp_path, lambda stored: stored.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(BridgeError, match=r"ties the embeddings, but lm_head\.weight differs"):
        load_hf([model], tmp_path)


def test_export_without_a_configuration_tells_the_fix():
    model = skeleton(hf_config())
    with pytest.raises(BridgeError, match=r"call attach_hf_config"):
        next(export_hf([model]))
    attach_hf_config([model], hf_config())
    assert next(export_hf([model]))[0] == "model.embed_tokens.weight"


def test_save_raises_what_went_wrong(tmp_path):
    write_model(tmp_path / "source")
    model = skeleton(hf_config())
    load_hf([model], tmp_path / "source")
    save_hf([model], tmp_path / "out", source=tmp_path / "source")
    with pytest.raises(BridgeError, match=r"no config\.json to copy"):
        save_hf([model], tmp_path / "other", source=tmp_path / "nowhere")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
