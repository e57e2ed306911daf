"""Qwen3 with a mixture of experts: Qwen3's attention, softmax routing, no shared expert, dense layers in between."""

from __future__ import annotations

from typing import Any

from megatron_bridge.families.decoder import DENSE_DECODER, ENGINE_DECODER, ENGINE_EXPERTS, EXPERTS, QK_NORM, TINY
from megatron_bridge.family import Family, HfConfig
from megatron_bridge.hf_config import check_decoder, decoder_transformer, experts_transformer, need
from mua.utils.errors import BridgeError


def _check(config: HfConfig) -> None:
    check_decoder(config, needed=["head_dim"], attention_bias=False)
    if need(config, "norm_topk_prob") and need(config, "num_experts_per_tok") == 1:
        raise BridgeError("config.json: norm_topk_prob with num_experts_per_tok=1 gives a router without a gradient")


def _transformer(config: HfConfig) -> dict[str, Any]:
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    layers = range(need(config, "num_hidden_layers"))
    sparse = [layer for layer in layers if (layer + 1) % every == 0 and layer not in dense]
    experts = config.get("num_experts") or need(config, "num_local_experts")
    return (
        decoder_transformer(config, qkv_bias=False, qk_norm=True)
        | experts_transformer(config, experts=experts, sparse_layers=sparse)
        # A softmax over the chosen experts is the softmax over all, normalized over the chosen.
        | {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not need(config, "norm_topk_prob")}
    )


_EXAMPLE = TINY | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    about="Qwen3-30B-A3B, Qwen3-235B-A22B: softmax routing, dense layers in between",
    transformer=_transformer,
    check=_check,
    parameters=DENSE_DECODER | QK_NORM | EXPERTS,
    engine=ENGINE_DECODER | ENGINE_EXPERTS,
    examples={
        "experts": _EXAMPLE,
        "mixed": _EXAMPLE | {"norm_topk_prob": False, "mlp_only_layers": [1], "tie_word_embeddings": True},
    },
)
