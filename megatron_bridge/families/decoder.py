"""The parts of the tables that Llama-like decoders share, and the tiny configuration their examples start from."""

from typing import Any

from megatron_bridge.family import (
    EngineRule,
    EngineSplit,
    Rule,
    column_split,
    gate_up,
    grouped_qkv,
    replicated,
    vocabulary,
)

MEGATRON = "decoder.layers.{}."
HF = "model.layers.{}."


def gated_mlp(megatron: str, hf: str) -> dict[str, Rule]:
    """A SwiGLU block: ``megatron`` and ``hf`` are the names of the module on either side, with a final dot."""
    return {
        megatron + "linear_fc1.weight": gate_up(hf + "gate_proj.weight", hf + "up_proj.weight"),
        megatron + "linear_fc2.weight": column_split(hf + "down_proj.weight"),
    }


DENSE_DECODER: dict[str, Rule] = {
    "embedding.word_embeddings.weight": vocabulary("model.embed_tokens.weight"),
    "output_layer.weight": vocabulary("lm_head.weight"),
    "decoder.final_layernorm.weight": replicated("model.norm.weight"),
    MEGATRON + "self_attention.linear_qkv.weight": grouped_qkv(
        HF + "self_attn.q_proj.weight", HF + "self_attn.k_proj.weight", HF + "self_attn.v_proj.weight"
    ),
    MEGATRON + "self_attention.linear_proj.weight": column_split(HF + "self_attn.o_proj.weight"),
    **gated_mlp(MEGATRON + "mlp.", HF + "mlp."),
    # The local layer specification, and every layer with experts.
    MEGATRON + "input_layernorm.weight": replicated(HF + "input_layernorm.weight"),
    MEGATRON + "pre_mlp_layernorm.weight": replicated(HF + "post_attention_layernorm.weight"),
    # Transformer Engine's, with the norms fused into the linear layers.
    MEGATRON + "self_attention.linear_qkv.layer_norm_weight": replicated(HF + "input_layernorm.weight"),
    MEGATRON + "mlp.linear_fc1.layer_norm_weight": replicated(HF + "post_attention_layernorm.weight"),
}

QKV_BIAS: dict[str, Rule] = {
    MEGATRON + "self_attention.linear_qkv.bias": grouped_qkv(
        HF + "self_attn.q_proj.bias", HF + "self_attn.k_proj.bias", HF + "self_attn.v_proj.bias"
    )
}

QK_NORM: dict[str, Rule] = {
    MEGATRON + "self_attention.q_layernorm.weight": replicated(HF + "self_attn.q_norm.weight"),
    MEGATRON + "self_attention.k_layernorm.weight": replicated(HF + "self_attn.k_norm.weight"),
}

_HF_EXPERT = HF + "mlp.experts.{}."
EXPERTS: dict[str, Rule] = {
    MEGATRON + "mlp.router.weight": replicated(HF + "mlp.gate.weight"),
    **gated_mlp(MEGATRON + "mlp.experts.local_experts.{}.", _HF_EXPERT),
    # Transformer Engine's grouped experts, one parameter an expert.
    MEGATRON + "mlp.experts.linear_fc1.weight{}": gate_up(
        _HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"
    ),
    MEGATRON + "mlp.experts.linear_fc2.weight{}": column_split(_HF_EXPERT + "down_proj.weight"),
}

_ATTENTION = HF + "self_attn."
ENGINE_DECODER: dict[str, EngineRule] = {
    "model.embed_tokens.weight": EngineRule(("model.embed_tokens.weight",), EngineSplit.VOCABULARY),
    "lm_head.weight": EngineRule(("lm_head.weight",), EngineSplit.VOCABULARY),
    "model.norm.weight": EngineRule(("model.norm.weight",), EngineSplit.WHOLE),
    **{
        _ATTENTION + f"qkv_proj.{kind}": EngineRule(
            tuple(_ATTENTION + f"{name}_proj.{kind}" for name in "qkv"), EngineSplit.HEADS
        )
        for kind in ("weight", "bias")
    },
    _ATTENTION + "o_proj.weight": EngineRule((_ATTENTION + "o_proj.weight",), EngineSplit.COLUMNS),
    HF + "mlp.gate_up_proj.weight": EngineRule(
        (HF + "mlp.gate_proj.weight", HF + "mlp.up_proj.weight"), EngineSplit.ROWS
    ),
    HF + "mlp.down_proj.weight": EngineRule((HF + "mlp.down_proj.weight",), EngineSplit.COLUMNS),
    **{
        HF + name: EngineRule((HF + name,), EngineSplit.WHOLE)
        for name in (
            "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
        )
    },
}  # fmt: skip
"""SGLang's parameters of Llama, Qwen2 and Qwen3."""

ENGINE_EXPERTS: dict[str, EngineRule] = {
    HF + "mlp.gate.weight": EngineRule((HF + "mlp.gate.weight",), EngineSplit.WHOLE),
    HF + "mlp.experts.w13_weight": EngineRule(
        (_HF_EXPERT + "gate_proj.weight", _HF_EXPERT + "up_proj.weight"), EngineSplit.ROWS
    ),
    HF + "mlp.experts.w2_weight": EngineRule((_HF_EXPERT + "down_proj.weight",), EngineSplit.COLUMNS),
}

SHARED_EXPERTS: dict[str, Rule] = gated_mlp(MEGATRON + "mlp.shared_experts.", HF + "mlp.shared_experts.")

# A buffer, and float32 whatever the parameters are.
CORRECTED_ROUTER: dict[str, Rule] = {
    MEGATRON + "mlp.router.expert_bias": replicated(HF + "mlp.gate.e_score_correction_bias")
}

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "tie_word_embeddings": False,
}
"""What the examples of families share; two KV heads, fewer than the largest tensor-parallel size of the tests."""
