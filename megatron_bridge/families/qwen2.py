"""Qwen2 and Qwen2.5, dense: biases on the query, key and value projections only."""

from __future__ import annotations

from functools import partial

from megatron_bridge.families.decoder import DENSE_DECODER, ENGINE_DECODER, QKV_BIAS, TINY
from megatron_bridge.family import Family
from megatron_bridge.hf_config import check_decoder, decoder_transformer

_UNTIED = TINY | {"model_type": "qwen2", "head_dim": 8}

QWEN2 = Family(
    model_type="qwen2",
    about="Qwen2 and Qwen2.5: biases on queries, keys and values",
    transformer=partial(decoder_transformer, qkv_bias=True, qk_norm=False),
    check=check_decoder,
    parameters=DENSE_DECODER | QKV_BIAS,
    engine=ENGINE_DECODER,
    examples={"untied": _UNTIED, "tied": _UNTIED | {"tie_word_embeddings": True}},
)
