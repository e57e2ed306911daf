"""One plan: everything ``mua plan`` says, as plain data; tokens, operations and times of one step.

What is assumed comes from the configuration's ``cluster`` section.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

from mua.compat.without_cuda import without_cuda
from mua.config.schema import ExperimentConfig
from mua.launch.plan.activations import Activations, activations
from mua.launch.plan.gpu_memory import (
    OF_ENGINE,
    EngineBytes,
    Phase,
    RankBytes,
    engine_bytes,
    engine_weights,
    host_bytes,
    phases,
    rank_bytes,
    scoring_passes,
    servers,
    trainer_at_start,
)
from mua.launch.plan.layout import (
    check_possible,
    engine_gpus,
    gpus,
    layers_by_stage,
    trainer_gpus,
    trainer_gpus_per_node,
)
from mua.launch.plan.links import Sync, plan_sync
from mua.megatron.architecture import Architecture, Workload, architecture_of
from mua.megatron.layouts import check_layout
from mua.megatron.settings import TRANSFORMER_ENGINE, Capabilities, Options


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


RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class StagePlan:
    """One rank and its estimates."""

    rank: RankBytes
    activations: dict[str, Activations]
    """By recompute setting."""


@dataclass(frozen=True)
class Plan:
    """A configuration on its cluster."""

    config: ExperimentConfig
    architecture: Architecture
    gpu: Gpu
    gpus: int
    stages: list[StagePlan]
    """The first rank of every pipeline stage, or every rank."""
    engine: EngineBytes
    """A GPU of the fullest rank."""
    servers: int
    rollouts_per_server: int
    """Episodes of ``rollout.max_tokens`` that one server's cache holds."""
    running: int
    """Episodes one server decodes together: bounded by the cache, engine.max_running_requests, rollout.concurrency."""
    phases: list[Phase]
    """Each phase on the rank where it peaks."""
    options: Options
    """Of Megatron-Core on this GPU, with Transformer Engine unless the configuration says local."""
    host: int
    """Pinned memory of one node: what is offloaded there."""
    compute: Compute

    @cached_property
    def sync(self) -> Sync:
        """Bytes over each link of a weight synchronization; planned when first asked for, which takes seconds."""
        return plan_sync(self.architecture, self.config)

    @property
    def reserve(self) -> int:
        """Bytes of a GPU that no tensor may use."""
        return int(self.config.cluster.reserve_gigabytes * 1e9)

    def faults(self) -> list[str]:
        """Why the plan does not work; empty if it does."""
        found = [
            f"{phase.name} needs {_gb(phase.total + self.reserve)} GB on the GPU of "
            f"{'an engine' if phase.rank == OF_ENGINE else f'rank {phase.rank}'}, of {_gb(self.gpu.memory)} GB"
            for phase in self.phases
            if phase.total + self.reserve > self.gpu.memory
        ]
        if self.host > self.config.cluster.host_gigabytes * 1e9:
            found.append(
                f"what is offloaded needs {_gb(self.host)} GB of a node's memory, of cluster.host_gigabytes "
                f"{self.config.cluster.host_gigabytes:g}; lower optimizer.cpu_offload_fraction or leave out "
                "megatron.offload, megatron.offload_activations or trainer.async_save"
            )
        if self.rollouts_per_server < 1:
            needed = self.engine.token * self.config.rollout.max_tokens
            found.append(
                f"the KV cache of {_gb(self.engine.cache)} GB per GPU holds no episode of rollout.max_tokens "
                f"{self.config.rollout.max_tokens}, which takes {_gb(needed)} GB; raise engine.tensor_parallel or "
                "engine.memory_fraction, or shard the trainer further"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Everything as JSON; bytes, seconds and operations as plain numbers."""
        model, config = self.architecture, self.config
        counts = {"servers": self.servers, "cache_tokens": self.engine.tokens}
        counts |= {"rollouts_per_server": self.rollouts_per_server, "running_per_server": self.running}
        return {
            "name": config.name,
            "gpu": {"name": config.cluster.gpu} | asdict(self.gpu),
            "gpus": self.gpus,
            "placement": config.placement,
            "trainer_gpus": trainer_gpus(config),
            "engine_gpus": engine_gpus(config),
            "reserve_bytes": self.reserve,
            "layout": config.megatron.model_dump(mode="json"),
            "model": {"parameters": model.parameters, "active_weights": model.active_weights},
            "ranks": [asdict(stage.rank) | {"activations": asdict(stage)["activations"]} for stage in self.stages],
            "engine": asdict(self.engine) | counts,
            "options": asdict(self.options),
            "host_bytes": self.host,
            "phases": [asdict(phase) | {"total": phase.total} for phase in self.phases],
            "compute": asdict(self.compute) | {"seconds": self.compute.seconds},
            "sync": asdict(self.sync),
            "faults": self.faults(),
        }


def make_plan(
    config: ExperimentConfig, hf_config: Mapping[str, Any] | None = None, *, every_rank: bool = False
) -> Plan:
    """Plans ``config``: one rank of each pipeline stage or, if ``every_rank``, all of them.

    Args:
        config: what is planned.
        hf_config: the policy's config.json, where that of ``config.model`` is not written yet.
        every_rank: whether every rank is planned.

    Raises:
        ConfigError: the layout is impossible for the model or the cluster; the nearest possible one is named.
        MuaError: the layout is possible, but no test has proven it; the nearest proven one is named.
        ModelError: no architecture to plan with.
    """
    architecture = architecture_of(config.model) if hf_config is None else Architecture.from_hf(hf_config)
    check_possible(architecture, config)
    check_layout(config.megatron, moe=architecture.experts > 0)
    world = config.megatron.world_size
    # The first rank of a stage stands for the others. They hold the same, but that with the distributed optimizer the
    # last shards of a buffer can be some padding smaller.
    ranks = range(0, world, 1 if every_rank else world // config.megatron.pipeline_parallel)
    gpu = GPUS[config.cluster.gpu]
    options = memory_options(architecture, config)
    stages = without_cuda(stage_plans, architecture, config, ranks, options)
    free = gpu.memory - int(config.cluster.reserve_gigabytes * 1e9)
    fullest = max(trainer_at_start(stage.rank, config) for stage in stages)
    found_free = max(0, free - fullest)
    engine = engine_bytes(architecture, config, found_free)
    kept = [(stage.rank, stage.activations[config.megatron.recompute]) for stage in stages]
    of_ranks = [phases(rank, activations, engine, config, found_free) for rank, activations in kept]
    return Plan(
        config=config,
        architecture=architecture,
        gpu=gpu,
        gpus=gpus(config),
        stages=stages,
        engine=engine,
        servers=servers(config),
        rollouts_per_server=engine.tokens // config.rollout.max_tokens,
        running=running(config, engine),
        options=options,
        host=trainer_gpus_per_node(config) * max(host_bytes(rank, activations, config) for rank, activations in kept),
        phases=[max(same, key=lambda phase: phase.total) for same in zip(*of_ranks, strict=True)],
        compute=compute(architecture, config, engine),
    )


def memory_options(architecture: Architecture, config: ExperimentConfig) -> Options:
    """What the trainer's layout comes to on a GPU of the cluster, with the constraints' Transformer Engine."""
    gpu = GPUS[config.cluster.gpu]
    machine = Capabilities(cuda=True, compute=gpu.compute, transformer_engine=TRANSFORMER_ENGINE[0])
    return Options.of(config.megatron, machine, experts=architecture.experts > 0)


def stage_plans(
    architecture: Architecture, config: ExperimentConfig, ranks: Iterable[int], options: Options
) -> list[StagePlan]:
    """Every rank of ``ranks``; of stages between the ends with the same kinds of layers only one is built."""
    layers, microbatches = layers_by_stage(architecture, config), microbatches_per_rank(config)
    last = config.megatron.pipeline_parallel - 1
    known: dict[tuple[object, ...], RankBytes] = {}
    found = []
    for rank in ranks:
        stage, place = divmod(rank, config.megatron.world_size // config.megatron.pipeline_parallel)
        own = layers[stage]
        key = (place, stage == 0, stage == last, *(architecture.sparse[layer] for layer in own))
        if key not in known:
            known[key] = rank_bytes(architecture, config, rank, options)
        estimates = {
            name: activations(architecture, config, stage, own, microbatches, name, options) for name in RECOMPUTE
        }
        found.append(StagePlan(replace(known[key], rank=rank, stage=stage), estimates))
    return found


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f}"
