"""The GPUs a plan can be made for; tokens, operations and times of one step on them.

What is assumed comes from the configuration's ``cluster`` section.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from mua.config.schema import ExperimentConfig
from mua.launch.plan.gpu_memory import EngineBytes, engine_weights, scoring_passes, servers
from mua.launch.plan.layout import engine_gpus, gpus, trainer_gpus
from mua.megatron.architecture import Architecture, Workload


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, from its vendor's datasheet. A gigabyte is 10^9 bytes, as there; drivers report a little more."""

    memory: int
    """Bytes."""
    bandwidth: float
    """Bytes per second between memory and processor."""
    flops: float
    """Dense bfloat16 operations per second of the tensor cores, without sparsity."""
    compute: tuple[int, int]
    """Compute capability."""
    source: str


GPUS: dict[str, Gpu] = {
    "A100-80": Gpu(80 * 10**9, 2.039e12, 312e12, (8, 0), "NVIDIA A100 80GB SXM datasheet"),
    "H100": Gpu(80 * 10**9, 3.35e12, 989e12, (9, 0), "NVIDIA H100 SXM datasheet (1,979 with sparsity)"),
    "H200": Gpu(141 * 10**9, 4.8e12, 989e12, (9, 0), "NVIDIA H200 SXM datasheet (1,979 with sparsity)"),
    "B200": Gpu(192 * 10**9, 8.0e12, 2250e12, (10, 0), "NVIDIA Blackwell datasheet (4,500 with sparsity)"),
}


@dataclass(frozen=True, slots=True)
class Compute:
    """One step: all episodes and all optimizer steps on them."""

    episodes: int
    tokens: int
    """Of all episodes."""
    sampled_tokens: int
    microbatches: int
    """Packed micro-batches one data-parallel rank computes for one optimizer step."""
    bubble: float
    """Share of the training time in which a pipeline stage waits."""
    train_flops: float
    """Forward and backward pass of every micro-batch, recomputation not counted."""
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

    The counts of :class:`mua.megatron.architecture.Workload`; a token attends to half of its sequence on average. A
    backward pass takes twice as many.
    """
    work = Workload.of(architecture)
    return tokens * (work.per_token + work.per_pair * length / 2)


def microbatches_per_rank(config: ExperimentConfig) -> int:
    """Packed micro-batches of one data-parallel rank in one optimizer step, with episodes of the expected length."""
    layout, algorithm = config.megatron, config.algorithm
    episodes = algorithm.groups_per_step * algorithm.group_size // algorithm.minibatches
    in_one = max(1, layout.max_tokens_per_microbatch // episode_tokens(config))
    multiple = layout.data_parallel * (layout.pipeline_parallel if layout.virtual_pipeline else 1)
    return ceil(ceil(episodes / in_one) / multiple) * multiple // layout.data_parallel


def episode_tokens(config: ExperimentConfig) -> int:
    """Expected tokens of one episode."""
    return min(config.cluster.episode_tokens or config.rollout.max_tokens, config.rollout.max_tokens)


def bubble(config: ExperimentConfig) -> float:
    """Share of time a stage idles: (p - 1) / (v m + p - 1), v = 1 for 1F1B (Narayanan et al., 2021, section 2.2)."""
    stages, chunks = config.megatron.pipeline_parallel, config.megatron.virtual_pipeline or 1
    return (stages - 1) / (chunks * microbatches_per_rank(config) + stages - 1)


def compute(architecture: Architecture, config: ExperimentConfig, engine: EngineBytes) -> Compute:
    """The arithmetic of one step."""
    algorithm, cluster, length = config.algorithm, config.cluster, episode_tokens(config)
    episodes = algorithm.groups_per_step * algorithm.group_size
    tokens = episodes * length
    forward = forward_flops(architecture, tokens, length)
    trained = algorithm.epochs * (2 if algorithm.advantage == "gae" else 1) * forward  # a critic is of the same size
    train, score = 3 * trained, scoring_passes(algorithm) * forward
    flops = GPUS[cluster.gpu].flops
    busy = trainer_gpus(config) * flops * cluster.train_mfu * (1 - bubble(config))
    generating = engine_gpus(config) if config.placement == "separate" else gpus(config)
    sampled = int(tokens * cluster.sampled_share)
    recomputed = float(config.megatron.recompute == "full")
    if config.megatron.recompute == "selective":
        weights = sum(
            architecture.mlp_weights(sparse, active=True)
            for sparse in architecture.sparse
            if ("moe" if sparse else "mlp") in config.megatron.recompute_modules
        )
        recomputed = 2 * weights / forward_flops(architecture, 1, length)
    return Compute(
        episodes=episodes,
        tokens=tokens,
        sampled_tokens=sampled,
        microbatches=microbatches_per_rank(config),
        bubble=bubble(config),
        train_flops=train,
        recomputed_flops=recomputed * trained,
        score_flops=score,
        rollout_flops=forward,
        train_seconds=train / busy,
        score_seconds=score / busy,
        rollout_seconds=forward / (generating * flops * cluster.rollout_mfu),
        decode_floor_seconds=_decode_floor(architecture, config, engine, sampled, length),
    )


def running(config: ExperimentConfig, engine: EngineBytes) -> int:
    """Episodes one server decodes together: what configuration and cache allow."""
    wanted = ceil(config.rollout.concurrency / servers(config))
    room = max(1, engine.tokens // config.rollout.max_tokens)
    return max(1, min(wanted, config.engine.max_running_requests, room))


def _decode_floor(
    architecture: Architecture, config: ExperimentConfig, engine: EngineBytes, sampled: int, length: int
) -> float:
    """Of weights each token of the episodes that run together reads all; of experts those that are chosen, taken as
    chosen at random."""
    a, together, read = architecture, running(config, engine), float(engine_weights(architecture, config))
    if a.experts:
        chosen = 1 - (1 - a.top_k / a.experts) ** together
        share = a.expert_parameters / a.parameters
        read *= 1 - share + share * chosen
    iterations = sampled / servers(config) / together
    return iterations * (read + together * engine.token * length / 2) / GPUS[config.cluster.gpu].bandwidth
