"""Core attention over packed rows."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mua.megatron import context, flex, piecewise
from mua.megatron.modules import PackedRow
from mua.megatron.pieces import Layout, Piece, pieces


class PackedAttention(MegatronModule):
    """Causal attention in which a token sees only earlier tokens of its own sequence, or its ancestors in a tree.

    What several sequences begin with (:mod:`mua.megatron.trees`) is computed once, nothing is computed across
    boundaries, no score matrix is kept and no key copied: on CUDA in one block-sparse kernel
    (:mod:`mua.megatron.flex`), elsewhere in a few calls of fused attention (:mod:`mua.megatron.piecewise`). It takes
    the place of Megatron's ``DotProductAttention``, which refuses packed rows and materialises all scores.

    Under context parallelism (:mod:`mua.megatron.context`) every rank gathers the keys and values of the whole row,
    which with grouped query attention are small, and attends from its own queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """Attends within each sequence of the row.

        Args:
            query: ``[tokens, 1, heads, head dim]``, this rank's tokens; key and value may have fewer heads (grouped
                query attention).
            packed_seq_params: gives the lengths; the other arguments are Megatron's and unused.

        Returns:
            ``[tokens, 1, heads * head dim]``
        """
        assert packed_seq_params is not None, "PositionedRotary has checked this"
        queries, keys, values = query[:, 0], key[:, 0], value[:, 0]
        size, rank = self.group.size(), self.group.rank()
        if size > 1:
            both = context.gather(torch.cat([keys, values], dim=-1), self.group)[packed_seq_params.order]
            keys, values = both.split([key.shape[-1], value.shape[-1]], dim=-1)
        layout = _layout(packed_seq_params.lengths, packed_seq_params.used, packed_seq_params.parents)
        if query.is_cuda:
            mask = flex.block_mask(layout, size, rank, query.device)
            attended = flex.attend(queries, keys, values, mask, self.scale)
        else:
            queries, keys, values = (_full_precision(tensor) for tensor in (queries, keys, values))
            attended = piecewise.attend(queries, keys, values, _pieces(layout, size, rank), self.scale)
        return attended.reshape(*query.shape[:2], -1).to(query.dtype)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """It has no parameters."""
        return {}


# One a row, for all layers; pipelines have several rows under way.
_layout = lru_cache(maxsize=32)(Layout.of)


@lru_cache(maxsize=32)
def _pieces(layout: Layout, size: int, rank: int) -> tuple[Piece, ...]:
    return pieces(layout, size, rank)


def _full_precision(tensor: Tensor) -> Tensor:
    """In float32: softmaxes of pieces are joined, and their gradients added up, in the precision of the tensors."""
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
