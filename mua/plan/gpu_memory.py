"""Memory of one GPU: the trainer's objects, the SGLang servers', and what lies there in each phase of a step.

Bytes of a trainer rank are exact: the objects of the training backend, built on the meta device and counted. Those of a
server follow from how SGLang's layers are sharded (version 0.5.23): attention heads, MLP columns, experts and the
vocabulary are split over the tensor-parallel GPUs; key-value heads too, but with fewer heads than GPUs each GPU holds a
copy of one; norms and routers are whole everywhere. Splitting experts by number (``engine.extra.ep_size``) instead of
by width changes which bytes a GPU holds, not how many.

In a colocated step trainer and engine share the GPU::

    rollout ─► log-probabilities ─► training ─► optimizer step ─► resharding ─► rollout …

As :mod:`mua.trainer.memory_phases` does it: with ``engine.memory_saver`` the engine has no memory while the trainer
trains, with ``megatron.offload`` the trainer none while the engine rolls out; otherwise each keeps what it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mua.config.schema import AlgorithmConfig, ExperimentConfig, MegatronConfig, OptimizerConfig
from mua.megatron.architecture import Architecture
from mua.megatron.model import build_chunks
from mua.megatron.optimizer import Optimizer, wrap_data_parallel
from mua.megatron.parallel import meta_rank
from mua.plan.activations import Activations

_VOCABULARY_PADDING = 64
"""SGLang pads the embedding to a multiple of this."""

BUCKETS = 2
"""Buckets of a weight synchronisation under way at once: one being filled, one being read."""


@dataclass(frozen=True, slots=True)
class ObjectBytes:
    """Bytes of the tensors that live as long as the trainer does."""

    parameters: int
    """Weights and persistent buffers; padded where the distributed optimizer keeps them in one buffer."""
    gradients: int
    """Float32 buffers, padded as Megatron's data-parallel wrapper pads them."""
    main_weights: int
    """Float32 copies of bfloat16 weights; with the distributed optimizer this rank's shard."""
    moments: int
    """Adam's two; with the distributed optimizer this rank's shard. Allocated by the first optimizer step."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.main_weights + self.moments


@dataclass(frozen=True, slots=True)
class RankBytes:
    """One rank of a layout."""

    rank: int
    stage: int
    """Pipeline stage, from 0."""
    layers: int
    weights: int
    """Parameters of the policy this rank holds, as a number."""
    bytes: ObjectBytes
    """Of the policy."""
    critic: ObjectBytes | None = None
    """Of the critic, where there is one."""


def measure(chunks: Sequence[Any], wrapped: Sequence[Any], optimizer: Optimizer) -> ObjectBytes:
    """Counts storages, each once, of model chunks, their gradient buffers and the optimizer; on any device.

    Args:
        chunks: Megatron's model chunks.
        wrapped: the same, wrapped by :func:`mua.megatron.optimizer.wrap_data_parallel`.
    """
    seen: set[StorageWeakRef] = set()

    def fresh(tensors: Iterable[Any]) -> int:
        """Bytes of the storages behind ``tensors`` that are not seen yet."""
        storages = {StorageWeakRef(s): s for s in (t.untyped_storage() for t in tensors if isinstance(t, Tensor))}
        new = storages.keys() - seen
        seen.update(new)
        return sum(storages[key].nbytes() for key in new)

    model = [*itertools.chain.from_iterable((*chunk.parameters(), *chunk.buffers()) for chunk in chunks)]
    buffers = [b.grad_data for chunk in wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    parts = optimizer.megatron.chained_optimizers
    updated = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    moments = [t for part in parts for state in part.optimizer.state.values() for t in state.values()]
    return ObjectBytes(
        parameters=fresh(model),
        gradients=fresh(buffers),
        main_weights=fresh(updated),
        moments=fresh(moments),
    )


def rank_bytes(architecture: Architecture, config: ExperimentConfig, rank: int) -> RankBytes:
    """Builds ``rank``'s model, gradient buffers and optimizer on the meta device and counts them; the critic's too.

    Raises:
        MuaError: the layout is not a tested one.
    """
    megatron, hf_config = config.megatron, architecture.hf_config
    with meta_rank(megatron, rank):
        chunks = build_chunks(hf_config, config.model, megatron)
        critic = None
        if config.algorithm.advantage == "gae":
            values = build_chunks(hf_config, config.model, megatron, critic=True)
            critic = _trained_bytes(values, megatron, config.critic.optimizer)
        return RankBytes(
            rank=rank,
            stage=rank // (megatron.world_size // megatron.pipeline_parallel),
            layers=sum(len(chunk.decoder.layers) for chunk in chunks),
            weights=sum(p.numel() for chunk in chunks for p in chunk.parameters()),
            bytes=_trained_bytes(chunks, megatron, config.optimizer),
            critic=critic,
        )


def _trained_bytes(chunks: list[Any], megatron: MegatronConfig, optimizer: OptimizerConfig) -> ObjectBytes:
    """Of the chunks with all that training them takes."""
    wrapped = wrap_data_parallel(chunks, megatron)
    built = Optimizer(wrapped, optimizer, megatron, total_steps=1 << 30)
    for part in built.megatron.chained_optimizers:
        part.init_state_fn(part.optimizer)
    return measure(chunks, wrapped, built)


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


def scoring_passes(algorithm: AlgorithmConfig) -> int:
    """Forward passes besides training's own: the old policy's where it is recomputed, the reference's, the critic's."""
    return int(algorithm.recomputes) + int(algorithm.kl_coefficient > 0) + int(algorithm.advantage == "gae")


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
    vocabulary = -(-a.vocabulary // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    total = (1 if a.tied else 2) * vocabulary * a.hidden // tp + a.hidden
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


@dataclass(frozen=True, slots=True)
class Phase:
    """The GPU of one trainer rank at the peak of one phase; parts in bytes."""

    name: str
    rank: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def reference_bytes(rank: RankBytes, config: ExperimentConfig) -> int:
    """The frozen copy of the initial weights that a KL term needs."""
    element = 2 if config.model.dtype == "bfloat16" else 4
    return rank.weights * element if config.algorithm.kl_coefficient > 0 else 0


def trainer_at_start(rank: RankBytes, config: ExperimentConfig) -> int:
    """What the trainer holds when the engines of a new run start and measure what is free: all but Adam's moments.

    A run that is resumed has those too by then, so its KV cache is smaller.
    """
    networks = [rank.bytes, *([] if rank.critic is None else [rank.critic])]
    return sum(held.total - held.moments for held in networks) + reference_bytes(rank, config)


def phases(rank: RankBytes, kept: Activations, engine: EngineBytes, config: ExperimentConfig) -> list[Phase]:
    """Every phase of a step on the GPU of ``rank``; the critic's passes take no more than the policy's."""
    trainer = {
        "weights": rank.bytes.parameters,
        "gradients": rank.bytes.gradients,
        "optimizer": rank.bytes.main_weights + rank.bytes.moments,
        "reference": reference_bytes(rank, config),
        "critic": 0 if rank.critic is None else rank.critic.total,
    }
    serving = {"engine weights": engine.weights, "KV cache": engine.cache}
    released = config.engine.memory_saver
    idle = {} if released else serving
    loaded = {"engine weights": engine.weights} if released else serving
    scoring = {"activations": kept.layer, "output": kept.scoring}
    training = {"activations": kept.kept + kept.working, "output": kept.output}
    found = [Phase("rollout", rank.rank, serving if config.megatron.offload else trainer | serving)]
    if scoring_passes(config.algorithm):
        found.append(Phase("log-probabilities", rank.rank, trainer | idle | scoring))
    return [
        *found,
        Phase("training", rank.rank, trainer | idle | training),
        Phase("optimizer step", rank.rank, trainer | idle),
        Phase("resharding", rank.rank, trainer | loaded | {"buckets": BUCKETS * config.engine.bucket_bytes}),
    ]
