"""config.json to Megatron arguments: both spellings of the rotary base, defaults, and everything that is refused.

Covers the registered families by hand-written configurations. That the fields build a model whose log-probabilities
equal transformers' is shown in tests/parity/test_bridge_models.py.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.nn import functional
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


def test_qwen3_fields():
    assert transformer_config_kwargs(QWEN3) == {
        "num_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 48,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
    }
    assert gpt_model_kwargs(QWEN3) == {
        "vocab_size": 100,
        "max_sequence_length": 512,
        "position_embedding_type": "rope",
        "rotary_base": 1e6,
        "rotary_percent": 1.0,
        "inverse_frequencies": pytest.approx([1e6 ** (-pair / 8) for pair in range(8)]),
        "share_embeddings_and_output_weights": True,
    }


def test_qwen2_has_biases_and_derives_its_head_size():
    fields = transformer_config_kwargs(QWEN2)
    assert (fields["kv_channels"], fields["add_qkv_bias"], fields["qk_layernorm"]) == (8, True, False)


def test_rotary_base_of_transformers_5():
    config = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 5e5, "rope_type": "default"}
    assert gpt_model_kwargs(config)["rotary_base"] == 5e5


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


def test_glm_fields():
    fields = transformer_config_kwargs(GLM4_MOE | {"n_shared_experts": 2})
    expected = {
        "num_moe_experts": 8,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_ffn_hidden_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 1.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_dtype": "fp32",
        "add_qkv_bias": False,
        "qk_layernorm": True,
    }
    assert {key: fields[key] for key in expected} == expected
    kwargs = gpt_model_kwargs(GLM4_MOE)
    assert (kwargs["rotary_percent"], len(kwargs["inverse_frequencies"])) == (0.5, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topk_group": 1}, "topk_group=1 with num_experts_per_tok=4"),
        ({"norm_topk_prob": False}, "needs norm_topk_prob"),
        ({"num_experts_per_tok": 1, "n_group": 1}, "num_experts_per_tok above 1"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "no 'partial_rotary_factor'"),
        ({"routed_scaling_factor": None}, "no 'routed_scaling_factor'"),
    ],
)
def test_what_glm_routing_cannot_express_is_refused(change, message):
    with pytest.raises(BridgeError, match=message):
        transformer_config_kwargs(GLM4_MOE | change)


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


@pytest.mark.parametrize(("normalized", "before"), [(True, False), (False, True)])
def test_the_softmax_is_over_the_chosen_experts_where_it_is_normalized(normalized, before):
    assert transformer_config_kwargs(QWEN3_MOE | {"norm_topk_prob": normalized})["moe_router_pre_softmax"] is before


def test_a_router_without_a_gradient_is_refused():
    with pytest.raises(BridgeError, match="router without a gradient"):
        transformer_config_kwargs(QWEN3_MOE | {"num_experts_per_tok": 1})


def test_untied_is_the_default():
    config = {key: value for key, value in QWEN3.items() if key != "tie_word_embeddings"}
    assert gpt_model_kwargs(config)["share_embeddings_and_output_weights"] is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, r"model_type='mamba' is not supported; known: qwen2, qwen3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type='yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, r"rope_type='linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8}}, "no 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"rope_theta": None}, "no 'rope_theta'"),
        ({"head_dim": None}, "no 'head_dim'"),
        ({"num_key_value_heads": None}, "no 'num_key_value_heads'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types contains .*sliding_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_key(change, message):
    with pytest.raises(BridgeError, match=message):
        (transformer_config_kwargs(QWEN3 | change), gpt_model_kwargs(QWEN3 | change))


def test_a_broken_or_missing_config_names_the_file(tmp_path):
    with pytest.raises(BridgeError, match=r"config\.json does not exist"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(BridgeError, match=r"config\.json cannot be read as JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(BridgeError, match="not a JSON object"):
        read_hf_config(tmp_path)
