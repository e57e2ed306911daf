"""Modules plugged into Megatron-Core through its layer specification; the same on CPU and GPU."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mua.megatron.parallel import device


@dataclass
class PackedMicrobatch(PackedSeqParams):
    """How one packed micro-batch is divided; travels through Megatron-Core as its ``packed_seq_params``.

    It keeps Megatron's ``[tokens, batch 1, ...]`` form rather than its ``thd`` form: positions are explicit, so
    nothing but the core attention needs to know the boundaries.
    """

    qkv_format: str = "sbhd"
    lengths: tuple[int, ...] = ()
    """Positions of each node, padding included, in order; they add up to the micro-batch. A node is a sequence, or what
    several sequences share (:mod:`mua.megatron.trees`)."""
    used: tuple[int, ...] = ()
    """Tokens of each node; padding at the end has none."""
    parents: tuple[int, ...] = ()
    """For each node the one it continues, which comes before it; -1 for none."""
    positions: Tensor | None = None
    """int64 ``[tokens]``: depth of each of this rank's tokens, its index in every sequence that holds it."""
    order: Tensor | None = None
    """int64 ``[all tokens]``: :func:`mua.megatron.trees.gathered_order`; None without context parallelism."""
    real: Tensor | None = None
    """bool ``[tokens]``: which of this rank's tokens are no padding."""
    experts: Tensor | None = None
    """uint8 or int32 ``[tokens / tp, this rank's layers * top k]``: experts the engine chose
    (:func:`mua.megatron.microbatch.expert_rows`); None where it recorded none."""
    routed: Tensor | None = None
    """bool ``[tokens]``: of which tokens ``experts`` are known; neither padding's nor a sequence's last."""
    batch_tokens: int = 1
    """Tokens of the whole batch, padding not counted."""

    @cached_property
    def by_length(self) -> PackedSeqParams | None:
        """Sequences side by side in the form that kernels of packed attention take, ``thd``; None for trees.

        Padding counts as the end of the sequence that it is behind, so that nothing lies between two sequences. Lengths
        are those of all context-parallel ranks that share the micro-batch.
        """
        if any(parent >= 0 for parent in self.parents):
            return None
        ends = torch.tensor([0, *itertools.accumulate(self.lengths)], dtype=torch.int32, device=device())
        longest = max(self.lengths)
        # One tensor for all four: by that Transformer Engine sees that there is no padding between sequences.
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), computed in float32 and cast back before the weight.

    Megatron-Core's own torch norm refuses sequence parallelism; this one marks its weight, so that
    ``finalize_model_grads`` sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device()))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` in, the same shape and dtype out."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype) * self.weight


class PositionedRotary(torch.nn.Module):
    """Rotary embedding from explicit positions, in place of Megatron's, which counts from the start of the micro-batch.

    ``GPTModel`` calls ``get_rotary_seq_len`` and hands the answer to ``forward``; here the answer is the positions
    themselves.
    """

    def __init__(self, inverse_frequencies: Tensor) -> None:
        """Args:
        inverse_frequencies: radians per position of every rotated pair, float32 ``[rotary dim / 2]``.
        """
        super().__init__()
        self.inv_freq = inverse_frequencies

    def get_rotary_seq_len(
        self, inference_context: Any, decoder: Any, hidden: Any, config: Any, packed_seq_params: PackedMicrobatch
    ) -> Tensor:
        """The positions of this rank's tokens, int64 ``[tokens]``."""
        if packed_seq_params is None or packed_seq_params.positions is None:
            raise ValueError("the model takes packed micro-batches only: pass packed_seq_params=PackedMicrobatch(...)")
        return packed_seq_params.positions

    def forward(self, positions: Tensor, packed_seq: bool = False, cp_group: Any = None) -> Tensor:
        """Angles, float32 ``[tokens, 1, 1, rotary dim]``, of positions ``[tokens]``."""
        frequencies = self.inv_freq.to(positions.device)
        angles = torch.outer(positions.to(frequencies.dtype), frequencies)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]


class DeferredOutput(ColumnParallelLinear):
    """Megatron's output layer, which leaves its product to :mod:`mua.megatron.logprobs`: its logits never exist.

    It holds the weight of the layer it replaces, under the same name, for checkpoints, bridge and optimizer.
    """

    def __init__(self, replaced: ColumnParallelLinear) -> None:
        super().__init__(
            replaced.input_size,
            replaced.output_size,
            config=replaced.config,
            init_method=replaced.config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
            tp_group=replaced.tp_group,
        )
        self.weight = replaced.weight

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """``[tokens / tp, 1, hidden]`` under sequence parallelism, gathered to ``[tokens, 1, hidden]``.

        The gradient is summed over the tensor-parallel ranks on its way back, as each makes its shard's part of it.
        """
        if not self.sequence_parallel:
            return input_, None
        return gather_from_sequence_parallel_region(input_, group=self.tp_group), None


def defer_logits(chunks: Sequence[GPTModel]) -> None:
    """Makes the last chunk of a policy return hidden states, ``[1, tokens, hidden]``, instead of logits."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = DeferredOutput(chunk.output_layer)


class ValueHead(torch.nn.Module):
    """A critic's output layer, one number per token: a weight and a bias, whole on every tensor-parallel rank.

    Both begin at 0, so that a new critic says 0 of everything whatever its backbone.
    """

    def __init__(self, chunk: GPTModel) -> None:
        super().__init__()
        config = chunk.config
        self._group = chunk.pg_collection.tp
        self._sequence_parallel = config.sequence_parallel
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": device()}
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, **kind))
        self.bias = torch.nn.Parameter(torch.zeros(1, **kind))
        for parameter in (self.weight, self.bias):  # a rank sees its part of the tokens: gradients are to be summed
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """``[tokens / tp, 1, hidden]`` under sequence parallelism gives float32 ``[tokens, 1, 1]`` on every rank."""
        values = F.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self._sequence_parallel:
            # Every rank computes the whole loss: a rank's part of its gradient is complete.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._group)
        return values, None


def output_weight(chunk: GPTModel) -> torch.nn.Parameter:
    """The weight of the output layer, ``[V / tp, hidden]``: the embedding's where both are tied in one chunk."""
    own = chunk.output_layer.weight
    return chunk.shared_embedding_or_output_weight() if own is None else own
