"""Qwen3, dense: no biases, RMSNorm on every query and key head."""

from __future__ import annotations

from functools import partial

from megatron_bridge.families.decoder import DENSE_DECODER, ENGINE_DECODER, QK_NORM, TINY
from megatron_bridge.family import Family
from megatron_bridge.hf_config import check_decoder, decoder_transformer

_UNTIED = TINY | {"model_type": "qwen3"}

QWEN3 = Family(
    model_type="qwen3",
    about="Qwen3, dense: norms on queries and keys",
    transformer=partial(decoder_transformer, qkv_bias=False, qk_norm=True),
    check=partial(check_decoder, needed=["head_dim"], attention_bias=False),
    parameters=DENSE_DECODER | QK_NORM,
    engine=ENGINE_DECODER,
    examples={"untied": _UNTIED, "tied": _UNTIED | {"tie_word_embeddings": True, "num_key_value_heads": 1}},
)
