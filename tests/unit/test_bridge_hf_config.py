"""config.json to Megatron arguments: both spellings of the rotary base, defaults, and everything that is refused.

Covers the registered families by hand-written configurations. That the fields build a model whose log-probabilities
equal transformers' is shown in tests/contract/test_family_contract.py.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_bridge.families import FAMILIES
from megatron_bridge.hf_config import context_length, read_hf_config, rotary_parameters, weights_dtype
from megatron_bridge.plan import gpt_model_kwargs, transformer_config_kwargs
from mua.utils.errors import BridgeError

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "vocab_size": 100,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
QWEN2 = {key: value for key, value in QWEN3.items() if key != "head_dim"} | {"model_type": "qwen2"}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}


@pytest.mark.parametrize("length", [64, 8192])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_llama_3_frequencies_are_those_of_transformers(spelling, length):
    """Also with other factors than Llama 3.1's, which Megatron-Core hard-codes."""
    rope = LLAMA3 | {"original_max_position_embeddings": length}
    config = QWEN2 | {"model_type": "llama", "head_dim": 64, "rope_theta": 5e5, spelling: rope}
    hf = transformers.LlamaConfig(**config | {"rope_parameters": rope | {"rope_theta": 5e5}, "rope_scaling": None})
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](hf)
    found = torch.tensor(gpt_model_kwargs(config)["inverse_frequencies"])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    unscaled = torch.tensor(gpt_model_kwargs(config | {spelling: None})["inverse_frequencies"])
    assert (found == unscaled).any(), "short wavelengths are kept"
    assert torch.isclose(found * 8, unscaled).any(), "long ones are divided"


GLM4_MOE = dict(FAMILIES["glm4_moe"].examples["groups"])


QWEN3_MOE = dict(FAMILIES["qwen3_moe"].examples["experts"])


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, [1, 1, 1, 1]),
        ({"decoder_sparse_step": 2}, [0, 1, 0, 1]),
        ({"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [0, 0, 0, 1]),
    ],
)
def test_which_layers_of_qwen3_moe_have_experts(change, sparse):
    assert transformer_config_kwargs(QWEN3_MOE | change)["moe_layer_freq"] == sparse


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (QWEN3, {"model_type": "mamba"}, "model_type='mamba'"),
        (QWEN3, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        (QWEN3, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type='linear'"),
        (QWEN3, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8}}, "'low_freq_factor'"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        (QWEN3, {"rope_theta": None}, "'rope_theta'"),
        (QWEN3, {"head_dim": None}, "'head_dim'"),
        (QWEN3, {"num_key_value_heads": None}, "'num_key_value_heads'"),
        (QWEN3, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (QWEN3, {"attention_bias": True}, "attention_bias=True"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window=True"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types .*sliding_attention"),
        (QWEN3, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (QWEN3_MOE, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        (GLM4_MOE, {"topk_group": 1}, "topk_group=1 with num_experts_per_tok=4"),
        (GLM4_MOE, {"norm_topk_prob": False}, "norm_topk_prob"),
        (GLM4_MOE, {"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok"),
        (GLM4_MOE, {"rope_parameters": {"rope_theta": 1e4}}, "'partial_rotary_factor'"),
        (GLM4_MOE, {"routed_scaling_factor": None}, "'routed_scaling_factor'"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_key(base, change, named):
    with pytest.raises(BridgeError, match=named):
        (transformer_config_kwargs(base | change), gpt_model_kwargs(base | change))


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_broken_or_missing_config_names_the_file(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BridgeError, match=r"config\.json"):
        read_hf_config(tmp_path)


TWO_THINGS = [  # and both values
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
      "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "default", "yarn"),
    ({"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 4.0}}, "default", "linear"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
     "4.0", "2.0"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "rope_scaling": {"rope_type": "yarn"}}, "4.0", "None"),
    ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "yarn", "linear"),
    ({"rope_parameters": {"rope_theta": 5e5}}, "500000.0", "1000000.0"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1.0}, "0.5", "1.0"),
    ({"max_position_embeddings": 4096, "model_max_length": 32768}, "4096", "32768"),
    ({"max_position_embeddings": 4096, "seq_length": 2048}, "4096", "2048"),
    ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16", "float32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "one", "other"), TWO_THINGS)
def test_a_config_that_says_two_things_is_refused_with_both(tmp_path, change, one, other):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | change), encoding="utf-8")
    with pytest.raises(BridgeError) as caught:
        read_hf_config(tmp_path)
    assert one in str(caught.value)
    assert other in str(caught.value)


def test_a_key_that_stands_twice_is_refused_unless_it_says_the_same(tmp_path):
    whole = json.dumps(QWEN3)[:-1]
    for key, one, other in (("eos_token_id", 1, 2), ("eos_token_id", 1, [1, 2]), ("vocab_size", 9, 8)):
        (tmp_path / "config.json").write_text(f'{{"{key}": {one}, "{key}": {other}}}', encoding="utf-8")
        with pytest.raises(BridgeError, match=f"{key}.* two values, {one} and"):
            read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(f'{whole}, "eos_token_id": 3, "eos_token_id": 3}}', encoding="utf-8")
    assert read_hf_config(tmp_path)["eos_token_id"] == 3


def test_what_is_said_twice_alike_is_taken():
    rope = LLAMA3 | {"original_max_position_embeddings": 64, "rope_theta": 1e6}
    old = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")} | {"type": "llama3"}
    both = QWEN3 | {
        "rope_parameters": rope,
        "rope_scaling": old,
        "max_sequence_length": QWEN3["max_position_embeddings"],
    }
    assert rotary_parameters(both) == rope
    assert gpt_model_kwargs(both) == gpt_model_kwargs(QWEN3 | {"rope_scaling": rope})
    assert (context_length(both), weights_dtype(both)) == (512, None)
