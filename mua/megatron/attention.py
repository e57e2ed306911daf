"""Core attention over packed rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from mua.megatron import context
from mua.megatron.modules import PackedRow


class PackedAttention(MegatronModule):
    """Causal attention in which a token sees only earlier tokens of its own sequence, or its ancestors in a tree.

    One call of torch's fused attention a node (:mod:`mua.megatron.trees`): no score matrix is kept, nothing is computed
    across boundaries, and what several sequences begin with is computed once. A node that continues others gets a copy
    of their keys and values in front of its own. It takes the place of Megatron's ``DotProductAttention``, which
    refuses packed rows and materialises all scores.

    Under context parallelism (:mod:`mua.megatron.context`) every rank gathers the keys and values of the whole row,
    which with grouped query attention are small, and attends from its own queries: two calls a node.
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
        attend = self._attend_own if self.group.size() == 1 else self._attend_gathered
        attended = torch.cat(attend(query, key, value, packed_seq_params), dim=2)
        return attended.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1).to(query.dtype)

    def _attend_own(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> list[Tensor]:
        """Every node: ``[1, heads, length, head dim]``."""
        queries, keys, values = (_by_head(tensor).split(row.lengths, dim=2) for tensor in (query, key, value))
        return [
            self._attend(queries[node], *(_with_ancestors(parts, parts[node], node, row) for parts in (keys, values)))
            for node in range(len(queries))
        ]

    def _attend_gathered(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> list[Tensor]:
        """This rank's head and tail chunk of every node: ``[1, heads, chunk, head dim]``."""
        assert row.order is not None
        size, rank = self.group.size(), self.group.rank()
        whole = context.gather(torch.cat([key, value], dim=-1), self.group)[row.order]
        keys, values = (
            _by_head(t).split(row.lengths, dim=2) for t in whole.split([key.shape[-1], value.shape[-1]], -1)
        )
        chunks = [length // (2 * size) for length in row.lengths for _ in range(2)]
        queries = iter(_by_head(query).split(chunks, dim=2))
        attended = []
        for node, length in enumerate(row.lengths):
            for part in (rank, 2 * size - 1 - rank):
                seen = (part + 1) * length // (2 * size)
                own = (_with_ancestors(parts, parts[node][:, :, :seen], node, row) for parts in (keys, values))
                attended.append(self._attend(next(queries), *own))
        return attended

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[1, heads, queries, head dim]``: the queries are the last of the keys' positions."""
        settings: dict[str, Any] = {"scale": self.scale, "enable_gqa": query.shape[1] != key.shape[1]}
        if query.shape[2] == key.shape[2]:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **settings)
        mask = causal_lower_right(query.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **settings)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """It has no parameters."""
        return {}


def _with_ancestors(parts: Sequence[Tensor], own: Tensor, node: int, row: PackedRow) -> Tensor:
    """Keys or values ``own`` of a node, ``[1, heads, n, head dim]``, behind those of the nodes it continues."""
    chain = [own]
    parent = row.parents[node] if node < len(row.parents) else -1
    while parent >= 0:
        chain.append(parts[parent][:, :, : row.used[parent]])
        parent = row.parents[parent]
    return torch.cat(chain[::-1], dim=2) if len(chain) > 1 else own


def _by_head(tensor: Tensor) -> Tensor:
    """``[tokens, 1, heads, head dim]`` as ``[1, heads, tokens, head dim]``, contiguous.

    In float32 on the CPU: torch 2.13's bfloat16 kernel there takes four times as long, mostly in the backward pass.
    """
    dtype = torch.float32 if tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16 else tensor.dtype
    return tensor.permute(1, 2, 0, 3).to(dtype).contiguous()
