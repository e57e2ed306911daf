"""One plan: everything ``mua plan`` says, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from mua.compat.without_cuda import without_cuda
from mua.config.schema import ExperimentConfig
from mua.launch.plan.activations import Activations, activations
from mua.launch.plan.compute import GPUS, Compute, Gpu, compute, microbatches_per_rank, running
from mua.launch.plan.gpu_memory import (
    OF_ENGINE,
    EngineBytes,
    Phase,
    RankBytes,
    engine_bytes,
    host_bytes,
    phases,
    rank_bytes,
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
from mua.megatron.architecture import Architecture, architecture_of
from mua.megatron.capabilities import TRANSFORMER_ENGINE, Capabilities
from mua.megatron.layouts import check_layout
from mua.megatron.settings import Options

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
        """Bytes over each link of a weight synchronisation; planned when first asked for, which takes seconds."""
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
        return {
            "name": self.config.name,
            "gpu": {"name": self.config.cluster.gpu} | asdict(self.gpu),
            "gpus": self.gpus,
            "placement": self.config.placement,
            "trainer_gpus": trainer_gpus(self.config),
            "engine_gpus": engine_gpus(self.config),
            "reserve_bytes": self.reserve,
            "layout": self.config.megatron.model_dump(mode="json"),
            "model": {"parameters": self.architecture.parameters, "active_weights": self.architecture.active_weights},
            "ranks": [
                asdict(stage.rank) | {"activations": {name: asdict(a) for name, a in stage.activations.items()}}
                for stage in self.stages
            ],
            "engine": asdict(self.engine)
            | {
                "servers": self.servers,
                "cache_tokens": self.engine.tokens,
                "rollouts_per_server": self.rollouts_per_server,
                "running_per_server": self.running,
            },
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
