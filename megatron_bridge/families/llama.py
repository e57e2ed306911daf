"""Llama 3 and its like: no biases, no norms on queries and keys, rotary frequencies scaled as config.json says."""

from __future__ import annotations

from functools import partial

from megatron_bridge.families.decoder import DENSE_DECODER, ENGINE_DECODER, TINY
from megatron_bridge.family import Family
from megatron_bridge.hf_config import check_decoder, decoder_transformer

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
