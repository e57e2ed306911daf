"""The nodes of a job: how many there are for the layout, and what is on each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mua.config.schema import ExperimentConfig
from mua.utils.errors import ConfigError

Verb = Literal["train", "sft", "engines"]


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job."""

    trainers: int
    ranks: int
    """Trainer ranks on each of them."""
    engines: int = 0
    """Nodes with engines alone."""
    apart: bool = False
    """Whether these are a component of their own, of a heterogeneous job."""


def placement(config: ExperimentConfig, verb: Verb = "train") -> JobNodes:
    """Nodes of the job, and ranks on each.

    Raises:
        ConfigError: the layout's ranks do not fill so many nodes and GPUs, or its engines have no GPUs.
    """
    slurm, world, alone = config.slurm, config.megatron.world_size, config.engine.nodes
    separate = config.placement == "separate"
    apart = bool(slurm.engine_partition or slurm.engine_gpus_per_node is not None or slurm.engine_extra)
    if verb == "engines":
        if not separate:
            raise ConfigError("--engines-only: nodes join the engines of runs with placement: separate; set it")
        _check_engine_node(config)
        return JobNodes(0, 1, slurm.nodes or alone or 1)
    if apart and not alone:
        raise ConfigError(
            "slurm.engine_*: these are for nodes that have engines alone; set engine.nodes to their number"
        )
    alone = 0 if verb == "sft" else alone
    if alone:
        _check_engine_node(config)
    beside = config.engine.count * config.engine.tensor_parallel if separate and not alone and verb == "train" else 0
    ranks = slurm.gpus_per_node - beside if slurm.gpus_per_node else 0
    if slurm.gpus_per_node and ranks < 1:
        raise ConfigError(
            f"placement separate: engine.count {config.engine.count} x engine.tensor_parallel "
            f"{config.engine.tensor_parallel} leave none of slurm.gpus_per_node {slurm.gpus_per_node} to train with; "
            "lower engine.count, or give engines nodes of their own (engine.nodes)"
        )
    nodes = slurm.nodes - alone if slurm.nodes else (-(-world // ranks) if ranks else 1)
    if nodes < 1:
        raise ConfigError(
            f"slurm.nodes {slurm.nodes}: engine.nodes {alone} of them have engines alone, which leaves none to train; "
            f"slurm.nodes must be more, or null for as many as the layout fills"
        )
    return JobNodes(nodes, _ranks_of_node(config, nodes, ranks), alone, apart and alone > 0)


def _ranks_of_node(config: ExperimentConfig, nodes: int, gpus: int) -> int:
    """Ranks on each of ``nodes`` with ``gpus`` for them, 0 where nodes share the ranks evenly."""
    slurm, world = config.slurm, config.megatron.world_size
    layout = f"the layout of the section megatron has {world} ranks"
    if gpus and nodes * gpus != world:
        fits = [f"{world // size} x {size}" for size in range(1, 9) if world % size == 0]
        named = f"slurm.gpus_per_node {gpus}" if gpus == slurm.gpus_per_node else f"{gpus} GPUs beside engines"
        raise ConfigError(
            f"slurm.nodes {nodes} x {named} are {nodes * gpus} GPUs, "
            f"but {layout}; nodes x GPUs could be {', '.join(fits)}, or change megatron.data_parallel"
        )
    if world % nodes:
        raise ConfigError(f"slurm.nodes {nodes}: {layout}, which {nodes} nodes cannot share evenly")
    return world // nodes


def _check_engine_node(config: ExperimentConfig) -> None:
    """Raises :class:`ConfigError` where the engines do not fill an engine node's GPUs."""
    tensor, count = config.engine.tensor_parallel, config.engine.count
    key = "engine_gpus_per_node" if config.slurm.engine_gpus_per_node is not None else "gpus_per_node"
    gpus = getattr(config.slurm, key)
    if gpus and (gpus % tensor or count * tensor > gpus):
        fits = [f"{gpus // size} of {size}" for size in range(1, gpus + 1) if gpus % size == 0]
        raise ConfigError(
            f"engine.count {count} of engine.tensor_parallel {tensor} do not fit slurm.{key} {gpus}; a node could have "
            f"{', '.join(fits)}"
        )
