"""Attention within packed sequences that are told by cumulative lengths; also spread over context-parallel ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch.attention.rope import _places
from transformer_engine.pytorch.distributed import Gather
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p")
_MASKS = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip


class DotProductAttention(TransformerEngineBaseModule):
    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if attention_dropout or softcap or window_size is not None or softmax_type != "vanilla" or return_max_logit:
            raise NotImplementedError("the stand-in has neither dropout, softcap, windows, sinks nor maximal logits")
        assert attention_type == "self"
        assert attn_mask_type in _MASKS
        self.qkv_format, self.attn_mask_type, self.layer_number = qkv_format, attn_mask_type, layer_number
        self.take_group(tp_group, tp_size)
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.num_gqa_groups_per_partition = self.num_gqa_groups // self.tp_size
        assert self.num_gqa_groups % self.tp_size == 0, "The number of GQA groups must be divisible by tensor parallel"
        self.hidden_size_per_attention_head_k = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(self.hidden_size_per_attention_head_k)
        self.cp_group: Any = None
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: list[int] | None,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: Any = None,
    ) -> None:
        assert cp_comm_type in _COMMUNICATION, f"Unsupported communication type: {cp_comm_type}!"
        self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type = (
            cp_group, cp_global_ranks, cp_stream, cp_comm_type,
        )  # fmt: skip

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Tensor:
        assert query_layer is not None
        assert key_layer is not None
        assert value_layer is not None
        unsupported = (
            window_size, core_attention_bias, alibi_slopes, inference_params, score_mod, qkv_layer, kv_layer,
            thd_attention_policies,
        )  # fmt: skip
        if (
            any(value is not None for value in unsupported)
            or checkpoint_core_attention
            or core_attention_bias_type != ("no_bias")
        ):
            raise NotImplementedError("the stand-in attends causally within packed sequences and does nothing else")
        mask = (attn_mask_type or self.attn_mask_type).replace(",", "_")
        if (qkv_format or self.qkv_format) != "thd":
            raise NotImplementedError("the stand-in attends within packed sequences: qkv_format 'thd'")
        three = (query_layer, key_layer, value_layer)
        assert all(x.dim() == 3 for x in three), "Queries, keys and values must be 3D tensors when qkv_format = thd!"
        assert key_layer.shape[-2] == self.num_gqa_groups_per_partition, "Keys and values must have num_gqa_group heads"
        assert "padding" in mask, "Attention mask type must be padding or padding_causal for qkv_format=thd!"
        if mask != "padding_causal":
            raise NotImplementedError(f"the stand-in has no mask {mask}")
        lengths = self._lengths(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        longest = max(lengths, default=0)
        for given in (max_seqlen_q, max_seqlen_kv):  # kernels launch as many blocks as this says
            assert given is None or given >= longest, f"max_seqlen {given} is below the longest sequence, {longest}"
        if self.cp_group is None or self.cp_group.size() == 1:
            return _attended(query_layer, key_layer, value_layer, lengths, 1, 0, self.softmax_scale)
        size, rank = self.cp_group.size(), self.cp_group.rank()
        assert all(ends is not None for ends in (cu_seqlens_q_padded, cu_seqlens_kv_padded)), (
            "cu_seqlens_padded can not be None for context parallelism and qkv_format = 'thd'!"
        )
        assert all(length % (2 * size) == 0 for length in lengths), (
            f"Sequence lengths in THD must be divisible by {2 * size}, got {lengths}"
        )
        keys, values = (_whole(x, lengths, self.cp_group) for x in (key_layer, value_layer))
        return _attended(query_layer, keys, values, lengths, size, rank, self.softmax_scale)

    @staticmethod
    def _lengths(
        queries: Tensor | None, keys: Tensor | None, queries_padded: Tensor | None, keys_padded: Tensor | None
    ) -> list[int]:
        assert None not in (queries, keys), "cu_seqlens_q and cu_seqlens_kv can not be None when qkv_format = thd!"
        assert queries.shape == keys.shape == (len(queries),), (
            "cu_seqlens_q and cu_seqlens_q must both have shape [batch_size + 1]!"
        )
        assert queries.dtype == keys.dtype == torch.int32, (
            "cu_seqlens_q and cu_seqlens_q must both be in dtype torch.int32!"
        )
        padded = [(queries_padded, queries), (keys_padded, keys)]
        if any(one is not None and one is not plain and not torch.equal(one, plain) for one, plain in padded):
            raise NotImplementedError("the stand-in has no padding between sequences")
        if not torch.equal(queries, keys):
            raise NotImplementedError("the stand-in attends to as many keys as there are queries")
        return queries.diff().tolist()


def _whole(part: Tensor, lengths: list[int], group: Any) -> Tensor:
    """Every rank's tokens, in the order of the sequences."""
    size = group.size()
    start, held = 0, []
    for rank in range(size):
        start = 0
        for length in lengths:
            held.append(start + _places(length, size, rank))
            start += length
    return Gather.apply(part, group)[torch.argsort(torch.cat(held))]


def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: list[int], size: int, rank: int, scale: float
) -> Tensor:
    """``[tokens, heads * head dim]``. What lies behind the last sequence is not computed: its output is zero."""
    found, start, own = [], 0, 0
    for length in lengths:
        places = _places(length, size, rank)
        part, seen = slice(own, own + len(places)), slice(start, start + length)
        mask = places[:, None] >= torch.arange(length)[None]
        q, k, v = (x.transpose(0, 1)[None] for x in (queries[part], keys[seen], values[seen]))
        found.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1))
        start, own = start + length, own + len(places)
    assert start == len(keys) or size == 1, f"cu_seqlens hold {start} tokens, keys {len(keys)}"
    found.append(queries.new_zeros(len(queries) - own, queries.shape[1], values.shape[-1]))
    return torch.cat(found).flatten(1)
