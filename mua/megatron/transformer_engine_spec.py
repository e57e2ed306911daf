"""Transformer Engine's layers for packed micro-batches: Megatron-Core's own specification with two modules of ours.

Imported where Transformer Engine is: its classes are bases here.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mua.megatron.attention import PackedAttention
from mua.megatron.modules import PackedMicrobatch
from mua.megatron.moe import PackedRouter

FinalNorm = TENorm
"""Norm behind the last layer."""


class FusedAttention(TEDotProductAttention):
    """Transformer Engine's attention by cumulative lengths, where a micro-batch holds sequences side by side.

    Prefix trees, which cumulative lengths cannot say, and float32 on a GPU, for which Transformer Engine has no kernel
    that packs, go to :class:`mua.megatron.attention.PackedAttention`. Positions are explicit in both, so rotary
    embedding, fused or not, is done before either and does not depend on which it is.

    Under context parallelism Transformer Engine lays each sequence over the ranks as :func:`mua.megatron.trees.zigzag`
    does. Padding belongs to the sequence it is behind, whose tokens do not see it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.trees = PackedAttention(config, softmax_scale, pg_collection)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType,
        *_: Any,
        packed_seq_params: PackedMicrobatch,
        **__: Any,
    ) -> Tensor:
        """As :meth:`mua.megatron.attention.PackedAttention.forward`."""
        packed = packed_seq_params.by_length
        if packed is None or (query.is_cuda and query.dtype == torch.float32):
            return self.trees(query, key, value, packed_seq_params=packed_seq_params)
        attended = super().forward(
            query[:, 0], key[:, 0], value[:, 0], None, AttnMaskType.causal, packed_seq_params=packed
        )
        return attended.view(*query.shape[:2], -1)


def layer_spec(config: TransformerConfig, sparse: bool) -> ModuleSpec:
    """Megatron's layer of Transformer Engine's modules, with experts where ``sparse``, and this package's attention.

    Norms are fused into the linear layers that follow them, but for the one before experts, which has no such layer; a
    rank's experts are one grouped product.
    """
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if sparse else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    layer = spec.submodules
    layer.self_attention.submodules.core_attention = FusedAttention
    if sparse:
        layer.mlp.keywords["submodules"].router = PackedRouter
        # The name that the local layer gives it in checkpoints.
        layer.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return spec
