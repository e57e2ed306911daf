"""Which layouts a model and a cluster can have at all."""

from __future__ import annotations

from collections.abc import Iterator

from mua.config.schema import ExperimentConfig
from mua.engine.cluster import engine_problem
from mua.megatron.architecture import Architecture
from mua.megatron.layouts import head_problems, problems, undivided
from mua.utils.errors import ConfigError


def check_possible(architecture: Architecture, config: ExperimentConfig) -> None:
    """Refuses what no machine can run.

    Raises:
        ConfigError: one line for each thing that does not divide, with a size that does.
    """
    if found := [*problems(architecture, config.megatron), *_cluster_problems(architecture, config)]:
        raise ConfigError("\n".join(found))


def gpus(config: ExperimentConfig) -> int:
    """GPUs of the cluster."""
    return config.cluster.nodes * gpus_per_node(config)


def gpus_per_node(config: ExperimentConfig) -> int:
    """GPUs of one machine; where that is not set, as many as the layout needs, and the engines beside it."""
    if config.cluster.gpus_per_node:
        return config.cluster.gpus_per_node
    beside = engine_gpus_per_node(config) if config.placement == "separate" and not config.engine.nodes else 0
    return max(1, config.megatron.world_size // max(1, trainer_nodes(config))) + beside


def trainer_nodes(config: ExperimentConfig) -> int:
    """Machines with trainer ranks: all, but for those of ``engine.nodes``."""
    return config.cluster.nodes - config.engine.nodes


def trainer_gpus_per_node(config: ExperimentConfig) -> int:
    """GPUs of such a machine that are the trainer's: all, but for those of engines that share none with it."""
    if config.placement == "separate" and not config.engine.nodes:
        return gpus_per_node(config) - engine_gpus_per_node(config)
    return gpus_per_node(config)


def trainer_gpus(config: ExperimentConfig) -> int:
    """GPUs of the trainer."""
    return trainer_nodes(config) * trainer_gpus_per_node(config)


def engine_nodes(config: ExperimentConfig) -> int:
    """Machines with engines."""
    return config.engine.nodes or config.cluster.nodes


def engine_gpus_per_node(config: ExperimentConfig) -> int:
    """GPUs of one of them that engines use."""
    return config.engine.count * config.engine.tensor_parallel


def engine_gpus(config: ExperimentConfig) -> int:
    """GPUs of all engines; with placement colocated they are among the trainer's."""
    return engine_nodes(config) * engine_gpus_per_node(config)


def layers_by_stage(architecture: Architecture, config: ExperimentConfig) -> list[list[int]]:
    """Numbers of the layers of each pipeline stage; an interleaved stage has several runs of them."""
    layout = config.megatron
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline or 1
    sizes: list[int | None] = [None] * stages
    sizes[0], sizes[-1] = layout.first_stage_layers or sizes[0], layout.last_stage_layers or sizes[-1]
    open_stages = sizes.count(None)
    rest = architecture.layers - sum(size or 0 for size in sizes)
    counts = [size or rest // open_stages for size in sizes]
    numbers: list[list[int]] = [[] for _ in range(stages)]
    layer = 0
    for _ in range(chunks):
        for stage, count in enumerate(counts):
            numbers[stage] += range(layer, layer + count // chunks)
            layer += count // chunks
    return numbers


def _cluster_problems(architecture: Architecture, config: ExperimentConfig) -> Iterator[str]:
    """What keeps trainer and engines from the cluster's nodes, and engines from the model."""
    cluster, engine, world, nodes = config.cluster, config.engine, config.megatron.world_size, trainer_nodes(config)
    if nodes < 1:
        yield (
            f"placement separate: engine.nodes {engine.nodes} of cluster.nodes {cluster.nodes} leave no node to the "
            "trainer; cluster.nodes counts both"
        )
    elif cluster.gpus_per_node is None:
        if world % nodes:
            yield f"megatron: {world} ranks do not divide over cluster.nodes {nodes}"
    elif world != trainer_gpus(config):
        taken = f"{engine_gpus_per_node(config)} GPUs of each node (engine.count x engine.tensor_parallel)"
        taken = f"engine.nodes {engine.nodes}" if engine.nodes else taken
        left = f", of which engines on GPUs of their own have {taken}, so that {max(0, trainer_gpus(config))} are left"
        yield (
            f"megatron: the sizes multiply to {world} ranks, but cluster.nodes {cluster.nodes} x gpus_per_node "
            f"{cluster.gpus_per_node} are {gpus(config)} GPUs{left if config.placement == 'separate' else ''}"
        )
    per_node, tensor = gpus_per_node(config), config.megatron.tensor_parallel
    of_trainer = trainer_gpus_per_node(config) if trainer_gpus(config) > 0 else per_node
    if tensor > of_trainer:
        yield (
            f"megatron.tensor_parallel {tensor} spans nodes of {of_trainer} GPUs; its collectives run in every layer "
            "and need NVLink"
        )
    yield from engine_problems(architecture, config)
    if problem := engine_problem(engine, per_node, "a node"):
        yield problem


def engine_problems(architecture: Architecture, config: ExperimentConfig) -> Iterator[str]:
    """What keeps the ranks of an engine from dividing the model."""
    tp = config.engine.tensor_parallel
    yield from head_problems("engine.tensor_parallel", tp, architecture)
    widths = {architecture.ffn} if not all(architecture.sparse) else set()
    for width in widths | ({architecture.expert_ffn} if architecture.experts else set()):
        yield from undivided("engine.tensor_parallel", tp, "an MLP's width of {}", width)
