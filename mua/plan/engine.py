"""Memory of the SGLang servers, from how its layers are sharded (version 0.5.23).

Attention heads, MLP columns, experts and vocabulary rows are split over the tensor-parallel GPUs; key-value heads too,
but with fewer heads than GPUs each GPU holds a copy of one; norms and routers are whole everywhere. Splitting experts
by number (``engine.extra.ep_size``) instead of by width changes which bytes a GPU holds, not how many.
"""

from __future__ import annotations

from dataclasses import dataclass

from mua.config.schema import ExperimentConfig
from mua.plan.architecture import Architecture

_VOCABULARY_PADDING = 64
"""SGLang pads embedding rows to a multiple of this."""


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """One GPU of one server."""

    weights: int
    token: int
    """KV cache of one token."""
    cache: int
    """KV cache in all."""

    @property
    def tokens(self) -> int:
        """Tokens the cache of one server holds; the GPUs of a server hold different heads of the same tokens."""
        return self.cache // self.token


def engine_element(config: ExperimentConfig) -> int:
    """Bytes of a weight, and of an element of the KV cache."""
    return 2 if (config.engine.dtype or config.model.dtype) == "bfloat16" else 4


def engine_weights(architecture: Architecture, config: ExperimentConfig) -> int:
    """Bytes of weights on one GPU of a server."""
    a, tp = architecture, config.engine.tensor_parallel
    kv = max(a.kv_heads, tp)
    attention = a.hidden * a.head_dim * 2 * (a.heads + kv) // tp
    bias = (a.heads + 2 * kv) * a.head_dim // tp if a.qkv_bias else 0
    norms = 2 * a.hidden + (2 * a.head_dim if a.qk_norm else 0)
    rows = -(-a.vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    total = (1 if a.tied else 2) * rows * a.hidden // tp + a.hidden
    for sparse in a.sparse:
        router = a.hidden * a.experts if sparse else 0
        total += attention + bias + norms + router + (a.mlp_weights(sparse, active=False) - router) // tp
    return total * engine_element(config)


def engine_bytes(architecture: Architecture, config: ExperimentConfig, free: int) -> EngineBytes:
    """Weights and KV cache of one GPU on which ``free`` bytes are free when the server starts.

    SGLang keeps ``memory_fraction`` of what is free then for both; the rest is left for activations and CUDA graphs.
    """
    a, tp = architecture, config.engine.tensor_parallel
    weights = engine_weights(a, config)
    token = 2 * a.layers * max(1, a.kv_heads // tp) * a.head_dim * engine_element(config)
    cache = max(0, int(free * config.engine.memory_fraction) - weights)
    if config.engine.max_total_tokens is not None:
        cache = min(cache, config.engine.max_total_tokens * token)
    return EngineBytes(weights, token, cache - cache % token)


def servers(config: ExperimentConfig) -> int:
    """SGLang servers of the whole cluster."""
    return config.engine.count * config.cluster.nodes
