"""The numbers of a model that the formulas of a plan read, from its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from megatron_bridge.hf_config import read_hf_config
from megatron_bridge.plain_files import BridgeError
from megatron_bridge.plan import gpt_model_kwargs, transformer_config_kwargs
from mua.config.schema import ModelConfig
from mua.errors import ModelError


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
        """Raises :class:`megatron_bridge.plain_files.BridgeError` for a family the bridge lacks."""
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
            expert_ffn=fields.get("moe_ffn_hidden_size") or 0,
            shared_ffn=fields.get("moe_shared_expert_intermediate_size") or 0,
        )

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
        folder = _folder_of(model.hf_config)
    try:
        return Architecture.from_hf(read_hf_config(folder))
    except BridgeError as error:
        raise ModelError(f"model: {error}") from error


def _folder_of(path: Path) -> Path:
    if path.name == "config.json":
        path = path.parent
    if not (path / "config.json").is_file():
        raise ModelError(f"model.hf_config: {path / 'config.json'} does not exist")
    return path
