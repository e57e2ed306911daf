"""Which layouts a model and a cluster can have at all, and the nearest possible one to those they cannot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from mua.config.schema import ExperimentConfig, MegatronConfig
from mua.errors import ConfigError, MuaError
from mua.megatron.layouts import check_layout
from mua.megatron.model import padded_vocabulary
from mua.plan.architecture import Architecture

_SEARCHED = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


def check_possible(architecture: Architecture, config: ExperimentConfig) -> None:
    """Refuses what no machine can run.

    Raises:
        ConfigError: one line for each thing that does not divide, and the nearest possible layout.
    """
    found = [
        *problems(architecture, config.megatron),
        *_cluster_problems(config),
        *_engine_problems(architecture, config),
    ]
    if not found:
        return
    if nearest := _nearest(architecture, config):
        found.append(f"the nearest possible layout of the trainer: {nearest}")
    raise ConfigError("\n".join(found))


def gpus(config: ExperimentConfig) -> int:
    """GPUs of the cluster."""
    return config.cluster.nodes * gpus_per_node(config)


def gpus_per_node(config: ExperimentConfig) -> int:
    """GPUs of one machine; where that is not set, as many as the layout needs."""
    return config.cluster.gpus_per_node or max(1, config.megatron.world_size // config.cluster.nodes)


def problems(architecture: Architecture, layout: MegatronConfig) -> Iterator[str]:
    """What keeps the trainer's layout from dividing the model, a line each."""
    tp, ep = layout.tensor_parallel, layout.expert_parallel
    etp = layout.expert_tensor_parallel or tp
    key = f"megatron.tensor_parallel {tp}"
    if architecture.heads % tp:
        yield f"{key} does not divide the model's {architecture.heads} attention heads"
    if architecture.kv_heads % tp and tp % architecture.kv_heads:
        yield f"{key} is neither a divisor nor a multiple of the model's {architecture.kv_heads} key-value heads"
    rows = padded_vocabulary(architecture.vocabulary)
    if rows % tp:
        yield f"{key} does not divide the embedding's {rows} rows (a vocabulary of {architecture.vocabulary}, padded)"
    if not all(architecture.sparse) and architecture.ffn % tp:
        yield f"{key} does not divide the MLP's width of {architecture.ffn}"
    if architecture.shared_ffn % tp:
        yield f"{key} does not divide the shared expert's width of {architecture.shared_ffn}"
    yield from _expert_problems(architecture, layout, ep, etp)
    yield from _stage_problems(architecture.layers, layout)


def _expert_problems(architecture: Architecture, layout: MegatronConfig, ep: int, etp: int) -> Iterator[str]:
    ranks = layout.tensor_parallel * layout.context_parallel * layout.data_parallel
    if not architecture.experts:
        if ep > 1:
            yield f"megatron.expert_parallel {ep} needs a model with experts; this one has none"
        return
    if architecture.experts % ep:
        yield f"megatron.expert_parallel {ep} does not divide the model's {architecture.experts} experts"
    if architecture.expert_ffn % etp:
        yield f"megatron.expert_tensor_parallel {etp} does not divide an expert's width of {architecture.expert_ffn}"
    if ranks % (ep * etp):
        yield (
            f"megatron.expert_parallel {ep} x expert_tensor_parallel {etp} does not divide the {ranks} ranks of a "
            "stage (tensor x context x data parallel)"
        )


def _stage_problems(layers: int, layout: MegatronConfig) -> Iterator[str]:
    stages, chunks = layout.pipeline_parallel, layout.virtual_pipeline or 1
    first, last = layout.first_stage_layers, layout.last_stage_layers
    fixed = [size for size in (first, last) if size is not None]
    middle, left = stages - len(fixed), layers - sum(fixed)
    if left < 0 or (middle <= 0 and left) or (middle > 0 and left % middle):
        yield (
            f"megatron.pipeline_parallel {stages} does not divide the model's {layers} layers"
            + (f" but for the {sum(fixed)} of first_stage_layers and last_stage_layers" if fixed else "")
            + _uneven_advice(layers, stages)
        )
        return
    for size in {*fixed, left // middle if middle > 0 else fixed[0]}:
        if size % chunks or size == 0:
            yield f"megatron.virtual_pipeline {chunks} does not divide the {size} layers of a stage"


def _uneven_advice(layers: int, stages: int) -> str:
    """Sizes of a smaller first and last stage that make the rest even."""
    if stages < 3 or layers < stages:
        return ""
    middle = -(-layers // stages)
    ends = layers - middle * (stages - 2)
    if ends < 2:
        return ""
    return (
        f"; possible: first_stage_layers {ends - ends // 2}, last_stage_layers {ends // 2} (and {middle} in each other)"
    )


def _cluster_problems(config: ExperimentConfig) -> Iterator[str]:
    cluster, world = config.cluster, config.megatron.world_size
    if cluster.gpus_per_node is None:
        if world % cluster.nodes:
            yield f"megatron: {world} ranks do not divide over cluster.nodes {cluster.nodes}"
    elif world != gpus(config):
        yield (
            f"megatron: the sizes multiply to {world} ranks, but cluster.nodes {cluster.nodes} "
            f"x gpus_per_node {cluster.gpus_per_node} are {gpus(config)} GPUs"
        )
    if config.megatron.tensor_parallel > gpus_per_node(config):
        yield (
            f"megatron.tensor_parallel {config.megatron.tensor_parallel} spans nodes of {gpus_per_node(config)} GPUs; "
            "its collectives run in every layer and need NVLink"
        )


def _engine_problems(architecture: Architecture, config: ExperimentConfig) -> Iterator[str]:
    engine, per_node = config.engine, gpus_per_node(config)
    tp = engine.tensor_parallel
    if architecture.heads % tp:
        yield f"engine.tensor_parallel {tp} does not divide the model's {architecture.heads} attention heads"
    if architecture.kv_heads % tp and tp % architecture.kv_heads:
        yield (
            f"engine.tensor_parallel {tp} is neither a divisor nor a multiple of the model's {architecture.kv_heads} "
            "key-value heads"
        )
    widths = {architecture.ffn} if not all(architecture.sparse) else set()
    for width in widths | ({architecture.expert_ffn} if architecture.experts else set()):
        if width % tp:
            yield f"engine.tensor_parallel {tp} does not divide an MLP's width of {width}"
    if engine.count * tp > per_node:
        yield (
            f"engine.count {engine.count} x engine.tensor_parallel {tp} needs {engine.count * tp} GPUs, and a node has "
            f"{per_node}; the nearest possible: engine.count {max(1, per_node // tp)}"
        )


def _nearest(architecture: Architecture, config: ExperimentConfig) -> str:
    """The possible layout whose sizes are fewest doublings away from those asked for, as the keys to change.

    One that tests have proven, if there is any.
    """
    asked = config.megatron
    ranked = sorted(_candidates(architecture, config), key=lambda layout: _distance(asked, layout))
    proven = (layout for layout in ranked if _proven(layout, architecture))
    best = next(proven, None) or next(iter(ranked), None)
    if best is None:
        return ""
    changed = {name: value for name, value in best.model_dump().items() if value != getattr(asked, name)}
    return "megatron: " + ", ".join(f"{name} {'null' if value is None else value}" for name, value in changed.items())


def _proven(layout: MegatronConfig, architecture: Architecture) -> bool:
    try:
        check_layout(layout, moe=architecture.experts > 0)
    except MuaError:
        return False
    return True


def _distance(asked: MegatronConfig, layout: MegatronConfig) -> tuple[float, tuple[int, ...]]:
    sizes = [(getattr(asked, name), getattr(layout, name)) for name in (*_SEARCHED, "data_parallel")]
    chunks = (asked.virtual_pipeline or 1, layout.virtual_pipeline or 1)
    experts = (
        asked.expert_tensor_parallel or asked.tensor_parallel,
        layout.expert_tensor_parallel or layout.tensor_parallel,
    )
    uneven = (asked.first_stage_layers, asked.last_stage_layers) != (
        layout.first_stage_layers,
        layout.last_stage_layers,
    )
    steps = sum(abs(math.log2(a / b)) for a, b in [*sizes, chunks, experts])
    return steps + 0.5 * uneven, tuple(b for _, b in sizes)


def _candidates(architecture: Architecture, config: ExperimentConfig) -> Iterator[MegatronConfig]:
    """Every layout of the cluster's GPUs that divides the model."""
    count, asked = gpus(config), config.megatron
    divisors = [size for size in range(1, count + 1) if count % size == 0]
    tensor = [size for size in divisors if size <= gpus_per_node(config)]
    experts = [size for size in divisors if architecture.experts and architecture.experts % size == 0] or [1]
    for tp, pp, cp, ep in itertools.product(tensor, divisors, divisors, experts):
        if count % (tp * pp * cp) or cp > max(1, asked.context_parallel):
            continue
        for chunks, etp, even in itertools.product(
            dict.fromkeys((asked.virtual_pipeline if pp > 1 else None, None)),
            dict.fromkeys((asked.expert_tensor_parallel, 1 if ep > 1 else None)),
            (False, True),
        ):
            layout = asked.model_copy(
                update={
                    "tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp, "expert_parallel": ep,
                    "expert_tensor_parallel": etp, "virtual_pipeline": chunks, "data_parallel": count // (tp * pp * cp),
                } | ({"first_stage_layers": None, "last_stage_layers": None} if even else {})
            )  # fmt: skip
            if not any(problems(architecture, layout)):
                yield layout
