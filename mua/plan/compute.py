"""Tokens, operations and times of one step; what is assumed comes from the configuration's ``cluster`` section."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mua.config.schema import AlgorithmConfig, ExperimentConfig
from mua.megatron.workload import Workload
from mua.plan.architecture import Architecture
from mua.plan.engine import EngineBytes, engine_weights, servers
from mua.plan.gpus import GPUS
from mua.plan.layout import gpus, gpus_per_node


@dataclass(frozen=True, slots=True)
class Compute:
    """One step: all episodes and all optimizer steps on them."""

    episodes: int
    tokens: int
    """Of all episodes."""
    sampled_tokens: int
    rows: int
    """Packed micro-batches one data-parallel rank computes for one optimizer step."""
    bubble: float
    """Share of the training time in which a pipeline stage waits."""
    train_flops: float
    """Forward and backward pass of every row, recomputation not counted."""
    recomputed_flops: float
    """What recomputation adds; no part of model FLOPs."""
    score_flops: float
    """Log-probabilities under the old policy and the reference and values, where the algorithm asks for them."""
    rollout_flops: float
    train_seconds: float
    score_seconds: float
    rollout_seconds: float
    decode_floor_seconds: float
    """Least time of the rollout's decoding by memory bandwidth: weights and cache are read once a token."""

    @property
    def seconds(self) -> float:
        return self.train_seconds + self.score_seconds + self.rollout_seconds


def forward_flops(architecture: Architecture, tokens: float, length: float) -> float:
    """Operations of one forward pass over ``tokens`` in sequences of ``length``.

    The counts of :class:`mua.megatron.workload.Workload`; a token attends to half of its sequence on average. A
    backward pass takes twice as many.
    """
    work = Workload.of(architecture)
    return tokens * (work.per_token + work.per_pair * length / 2)


def rows_per_rank(config: ExperimentConfig) -> int:
    """Packed micro-batches of one data-parallel rank in one optimizer step, with episodes of the expected length."""
    layout, algorithm = config.megatron, config.algorithm
    episodes = algorithm.groups_per_step * algorithm.group_size // algorithm.minibatches
    in_row = max(1, layout.max_tokens_per_microbatch // episode_tokens(config))
    multiple = layout.data_parallel * (layout.pipeline_parallel if layout.virtual_pipeline else 1)
    return ceil(ceil(episodes / in_row) / multiple) * multiple // layout.data_parallel


def episode_tokens(config: ExperimentConfig) -> int:
    """Expected tokens of one episode."""
    return min(config.cluster.episode_tokens or config.rollout.max_tokens, config.rollout.max_tokens)


def bubble(config: ExperimentConfig) -> float:
    """Share of time a stage idles: (p - 1) / (v m + p - 1), v = 1 for 1F1B (Narayanan et al., 2021, section 2.2)."""
    stages, chunks = config.megatron.pipeline_parallel, config.megatron.virtual_pipeline or 1
    return (stages - 1) / (chunks * rows_per_rank(config) + stages - 1)


def scoring_passes(algorithm: AlgorithmConfig) -> int:
    """Forward passes besides training's own: the old policy's where it is recomputed, the reference's, the critic's."""
    return int(algorithm.recomputes) + int(algorithm.kl_coefficient > 0) + int(algorithm.advantage == "gae")


def compute(architecture: Architecture, config: ExperimentConfig, engine: EngineBytes) -> Compute:
    """The arithmetic of one step."""
    algorithm, cluster, length = config.algorithm, config.cluster, episode_tokens(config)
    episodes = algorithm.groups_per_step * algorithm.group_size
    tokens = episodes * length
    forward = forward_flops(architecture, tokens, length)
    trained = algorithm.epochs * (2 if algorithm.advantage == "gae" else 1) * forward  # a critic is of the same size
    train, score = 3 * trained, scoring_passes(algorithm) * forward
    peak = gpus(config) * GPUS[cluster.gpu].flops
    busy = peak * cluster.train_mfu * (1 - bubble(config))
    sampled = int(tokens * cluster.sampled_share)
    return Compute(
        episodes=episodes,
        tokens=tokens,
        sampled_tokens=sampled,
        rows=rows_per_rank(config),
        bubble=bubble(config),
        train_flops=train,
        recomputed_flops=_recomputed(architecture, config) * trained,
        score_flops=score,
        rollout_flops=forward,
        train_seconds=train / busy,
        score_seconds=score / busy,
        rollout_seconds=forward / (peak * cluster.rollout_mfu),
        decode_floor_seconds=_decode_floor(architecture, config, engine, sampled, length),
    )


def _recomputed(architecture: Architecture, config: ExperimentConfig) -> float:
    """Forward passes that recomputation adds to one forward and backward pass."""
    if config.megatron.recompute == "selective":
        mlp = sum(architecture.mlp_weights(False, active=True) for sparse in architecture.sparse if not sparse)
        return 2 * mlp / forward_flops(architecture, 1, episode_tokens(config))
    return float(config.megatron.recompute == "full")


def running(config: ExperimentConfig, engine: EngineBytes) -> int:
    """Episodes one server decodes together: what configuration and cache allow."""
    wanted = ceil(config.rollout.concurrency / servers(config))
    room = max(1, engine.tokens // config.rollout.max_tokens)
    return max(1, min(wanted, config.engine.max_running_requests, room))


def _decode_floor(
    architecture: Architecture, config: ExperimentConfig, engine: EngineBytes, sampled: int, length: int
) -> float:
    together = running(config, engine)
    iterations = sampled / servers(config) / together
    read = _weights_read(architecture, config, together) + together * engine.token * length / 2
    return iterations * read / GPUS[config.cluster.gpu].bandwidth


def _weights_read(architecture: Architecture, config: ExperimentConfig, together: int) -> float:
    """Bytes of weights one GPU reads for a token of each of ``together`` episodes; of experts those that are chosen,
    taken as chosen at random."""
    a, weights = architecture, engine_weights(architecture, config)
    if not a.experts:
        return float(weights)
    chosen = 1 - (1 - a.top_k / a.experts) ** together
    share = a.expert_parameters / a.parameters
    return weights * (1 - share + share * chosen)


@dataclass(frozen=True, slots=True)
class Sync:
    """One weight synchronisation."""

    model_bytes: int
    """The whole model once, in the engine's type."""
    gpu_bytes: int
    """What one GPU of an engine needs."""
    absent_bytes: int
    """What the GPUs of one node need that none of them has: it must come over the network."""
    seconds: float
    """Least time at the given bandwidths: the network's part, shared by the node's adapters, then NVLink's."""


def sync(architecture: Architecture, config: ExperimentConfig) -> Sync:
    """Bytes and time of one weight synchronisation into engines on the trainer's own GPUs."""
    cluster, layout = config.cluster, config.megatron
    element = 2 if (config.engine.dtype or config.model.dtype) == "bfloat16" else 4
    dense, experts = _present(config)
    absent = element * (
        (1 - dense) * (architecture.parameters - architecture.expert_parameters)
        + (1 - experts) * architecture.expert_parameters
    )
    needed = engine_weights(architecture, config)
    network = absent / (gpus_per_node(config) * cluster.network_gigabytes_per_second * 1e9)
    moved = needed if layout.world_size > 1 else 0
    return Sync(
        model_bytes=architecture.parameters * element,
        gpu_bytes=needed,
        absent_bytes=int(absent),
        seconds=network + moved / (cluster.nvlink_gigabytes_per_second * 1e9),
    )


def _present(config: ExperimentConfig) -> tuple[float, float]:
    """The shares of the dense and of the expert weights that the ranks of the first node hold together.

    Ranks are numbered tensor, context, expert, data, pipeline parallel, the first fastest; within a stage experts are
    numbered by expert-tensor rank first.
    """
    layout = config.megatron
    tp, etp = layout.tensor_parallel, layout.expert_tensor_parallel or layout.tensor_parallel
    stage = layout.world_size // layout.pipeline_parallel
    ranks = range(gpus_per_node(config))
    dense = {(rank // stage, rank % tp) for rank in ranks}
    expert = {(rank // stage, rank % (etp * layout.expert_parallel)) for rank in ranks}
    shards, expert_shards = tp * layout.pipeline_parallel, etp * layout.expert_parallel * layout.pipeline_parallel
    return len(dense) / shards, len(expert) / expert_shards
