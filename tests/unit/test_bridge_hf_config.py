"""config.json to Megatron arguments: both spellings of the rotary base, defaults, and everything that is refused.

Covers the registered families by hand-written configurations. That the fields build a model whose log-probabilities
equal transformers' is shown in tests/contract/test_family_contract.py.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_bridge.families import FAMILIES
from megatron_bridge.hf_config import read_hf_config
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
        (QWEN3, {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8}}, "'low_freq_factor'"),
        (QWEN3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
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
