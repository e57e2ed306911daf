"""The numbers of a model that checks of layouts, packing and plans read, from its config.json alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.plan import gpt_model_kwargs, transformer_config_kwargs
from mua.config.schema import ModelConfig
from mua.utils.errors import BridgeError, ModelError

VOCABULARY_MULTIPLE = 128
"""The embedding is padded to a multiple of this, whatever the layout, so that checkpoints fit every layout."""


@dataclass(frozen=True)
class Architecture:
    """A decoder with grouped-query attention whose layers end in a gated MLP or in experts."""

    hf_config: dict[str, Any]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of a dense layer's MLP."""
    vocabulary: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    sparse: tuple[bool, ...]
    """For each layer whether it has experts."""
    experts: int
    """0 in a dense model."""
    top_k: int
    expert_ffn: int
    shared_ffn: int
    """Width of the expert that every token visits; 0: there is none."""

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> Self:
        """Raises :class:`mua.utils.errors.BridgeError` for a family the bridge lacks."""
        fields = transformer_config_kwargs(hf_config)
        gpt = gpt_model_kwargs(hf_config)
        experts = fields.get("num_moe_experts") or 0
        return cls(
            hf_config=dict(hf_config),
            layers=fields["num_layers"],
            hidden=fields["hidden_size"],
            heads=fields["num_attention_heads"],
            kv_heads=fields["num_query_groups"],
            head_dim=fields["kv_channels"],
            ffn=fields["ffn_hidden_size"],
            vocabulary=gpt["vocab_size"],
            tied=gpt["share_embeddings_and_output_weights"],
            qk_norm=fields["qk_layernorm"],
            qkv_bias=fields["add_qkv_bias"],
            sparse=tuple(map(bool, fields["moe_layer_freq"])) if experts else (False,) * fields["num_layers"],
            experts=experts,
            top_k=fields.get("moe_router_topk") or 0,
            expert_ffn=fields.get("moe_ffn_hidden_size") or (fields["ffn_hidden_size"] if experts else 0),
            shared_ffn=fields.get("moe_shared_expert_intermediate_size") or 0,
        )

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding."""
        return -(-self.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @property
    def attention_weights(self) -> int:
        """Weights of the query, key, value and output matrices of one layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    def mlp_weights(self, sparse: bool, *, active: bool) -> int:
        """Weights of one layer's MLP or experts with their router; of those a token meets, if ``active``."""
        if not sparse:
            return 3 * self.hidden * self.ffn
        chosen = self.top_k if active else self.experts
        return self.hidden * (3 * (chosen * self.expert_ffn + self.shared_ffn) + self.experts)

    @cached_property
    def matrix_weights(self) -> int:
        """Weights of all matrices, embeddings left out, the output layer included."""
        layers = sum(self.attention_weights + self.mlp_weights(sparse, active=False) for sparse in self.sparse)
        return layers + self.vocabulary * self.hidden

    @cached_property
    def active_weights(self) -> int:
        """Weights one token is multiplied with: the output layer and the chosen experts count, the embedding not."""
        layers = sum(self.attention_weights + self.mlp_weights(sparse, active=True) for sparse in self.sparse)
        return layers + self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model as Hugging Face counts them: without padding, tied weights once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        bias = (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        embedding = 0 if self.tied else self.vocabulary * self.hidden
        return self.matrix_weights + embedding + self.layers * (norms + bias) + self.hidden

    @cached_property
    def expert_parameters(self) -> int:
        """Those of ``parameters`` that belong to routed experts."""
        return sum(self.sparse) * self.experts * 3 * self.hidden * self.expert_ffn


def architecture_of(model: ModelConfig) -> Architecture:
    """From ``model.path``'s config.json or, where that folder is not there, from ``model.hf_config``.

    Raises:
        ModelError: neither can be read, or the family is not supported.
    """
    folder = model.path
    if not (folder / "config.json").is_file():
        if model.hf_config is None:
            raise ModelError(f"model.path: {folder} has no config.json; give model.hf_config one to plan with")
        folder = model.hf_config.parent if model.hf_config.name == "config.json" else model.hf_config
        if not (folder / "config.json").is_file():
            raise ModelError(f"model.hf_config: {folder / 'config.json'} does not exist")
    try:
        return Architecture.from_hf(read_hf_config(folder))
    except BridgeError as error:
        raise ModelError(f"model: {error}") from error


@dataclass(frozen=True, slots=True)
class Workload:
    """Operations of one forward pass; a backward pass takes twice as many of each kind."""

    per_token: int
    """Two for every weight that a token is multiplied with: of a mixture of experts those that it is sent to, and the
    output layer, but no embedding."""
    per_pair: int
    """Of a token and one that it attends to, itself included: two products over all query heads and layers."""

    @classmethod
    def of(cls, architecture: Architecture) -> Self:
        """2 a weight and token, 4 x heads x head dim a pair and layer: the matrix products as Narayanan et al.,
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021, appendix) and Chowdhery
        et al., "PaLM" (2022, appendix B) count them, but of attention only the pairs below the diagonal.

        Norms, rotary embedding and softmax are no matrix products and left out.
        """
        a = architecture
        return cls(2 * a.active_weights, 4 * a.layers * a.heads * a.head_dim)

    def operations(self, spans: Iterable[tuple[int, int]]) -> int:
        """Of runs of tokens, each ``(start, length)``: its depth in its sequences, whose earlier tokens it attends to,
        and its tokens. A sequence by itself starts at 0; what a prefix tree shares is one run, so that its tokens count
        once, while everything that continues it pays for attending to it."""
        return sum(
            length * self.per_token + (length * start + length * (length + 1) // 2) * self.per_pair
            for start, length in spans
        )
