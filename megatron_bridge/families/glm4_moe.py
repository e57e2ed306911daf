"""GLM-4.5: dense layers first, then a shared expert and sigmoid routing whose choice is corrected by a bias.

Half of every head is rotated. Biases on the attention's inputs, norms on queries and keys, and groups of experts are
optional. The layers for multi-token prediction at the end of published checkpoints are left out.
"""

from __future__ import annotations

from typing import Any

from megatron_bridge.families.decoder import (
    CORRECTED_ROUTER,
    DENSE_DECODER,
    EXPERTS,
    QK_NORM,
    QKV_BIAS,
    SHARED_EXPERTS,
    TINY,
)
from megatron_bridge.family import Family, HfConfig
from megatron_bridge.hf_config import check_decoder, corrected_routing, decoder_transformer, experts_transformer, need
from mua.utils.errors import BridgeError


def _check(config: HfConfig) -> None:
    check_decoder(config, partial_rotary=True)
    if config.get("partial_rotary_factor") is None:
        need(config.get("rope_parameters") or {}, "partial_rotary_factor")
    if not need(config, "norm_topk_prob") or need(config, "num_experts_per_tok") == 1:
        raise BridgeError("config.json: sigmoid routing needs norm_topk_prob and num_experts_per_tok above 1")


def _transformer(config: HfConfig) -> dict[str, Any]:
    bias, norm = bool(config.get("attention_bias")), bool(config.get("use_qk_norm"))
    experts, layers = need(config, "n_routed_experts"), need(config, "num_hidden_layers")
    return (
        decoder_transformer(config, qkv_bias=bias, qk_norm=norm)
        | experts_transformer(
            config, experts=experts, sparse_layers=range(need(config, "first_k_dense_replace"), layers)
        )
        | corrected_routing(config)
    )


_EXAMPLE = TINY | {
    "model_type": "glm4_moe",
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5},
    "attention_bias": True,
    "use_qk_norm": False,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}

GLM4_MOE = Family(
    model_type="glm4_moe",
    about="GLM-4.5, GLM-4.5-Air: shared expert, sigmoid routing with a bias, groups, half-rotated heads",
    transformer=_transformer,
    check=_check,
    parameters=DENSE_DECODER | QKV_BIAS | QK_NORM | EXPERTS | SHARED_EXPERTS | CORRECTED_ROUTER,
    examples={
        "biases": _EXAMPLE,
        "groups": _EXAMPLE
        | {"attention_bias": False, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4},
    },
    extras=lambda config: [
        rf"model\.layers\.{need(config, 'num_hidden_layers') + i}\..*"
        for i in range(config.get("num_nextn_predict_layers") or 0)
    ],
)
