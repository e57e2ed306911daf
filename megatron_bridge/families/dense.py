"""Dense decoders: Qwen2, Qwen3 and Llama 3.

Qwen2 has biases on the query, key and value projections only. Qwen3 has none, and an RMSNorm on every query and key
head. Llama has neither; its rotary frequencies are scaled as config.json says.
"""

from __future__ import annotations

from functools import partial

from megatron_bridge.families.decoder import DENSE_DECODER, ENGINE_DECODER, QK_NORM, QKV_BIAS, TINY
from megatron_bridge.family import Family
from megatron_bridge.hf_config import check_decoder, decoder_transformer

_QWEN2 = TINY | {"model_type": "qwen2", "head_dim": 8}

QWEN2 = Family(
    model_type="qwen2",
    about="Qwen2 and Qwen2.5: biases on queries, keys and values",
    transformer=partial(decoder_transformer, qkv_bias=True, qk_norm=False),
    check=check_decoder,
    parameters=DENSE_DECODER | QKV_BIAS,
    engine=ENGINE_DECODER,
    examples={"untied": _QWEN2, "tied": _QWEN2 | {"tie_word_embeddings": True}},
)

_QWEN3 = TINY | {"model_type": "qwen3"}

QWEN3 = Family(
    model_type="qwen3",
    about="Qwen3, dense: norms on queries and keys",
    transformer=partial(decoder_transformer, qkv_bias=False, qk_norm=True),
    check=partial(check_decoder, needed=["head_dim"], attention_bias=False),
    parameters=DENSE_DECODER | QK_NORM,
    engine=ENGINE_DECODER,
    examples={"untied": _QWEN3, "tied": _QWEN3 | {"tie_word_embeddings": True, "num_key_value_heads": 1}},
)

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 64,
}
_SCALED = TINY | {"model_type": "llama", "head_dim": 8, "rope_parameters": _LLAMA3_ROPE}

LLAMA = Family(
    model_type="llama",
    about="Llama 3.x: rotary scaling llama3 with its constants from config.json",
    transformer=partial(decoder_transformer, qkv_bias=False, qk_norm=False),
    check=partial(check_decoder, attention_bias=False, mlp_bias=False, pretraining_tp=1),
    parameters=DENSE_DECODER,
    engine=ENGINE_DECODER,
    examples={"scaled": _SCALED, "tied": _SCALED | {"tie_word_embeddings": True}},
    # Checkpoints of early transformers versions stored what follows from the configuration.
    extras=lambda config: (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
