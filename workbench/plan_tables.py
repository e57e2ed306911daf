"""A plan as tables for people."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.box import SIMPLE, SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from mua.launch.plan.gpu_memory import OF_ENGINE
from mua.launch.plan.layout import engine_gpus, trainer_gpus
from mua.launch.plan.planner import RECOMPUTE, Plan
from mua.observe.safe_output import SafeConsole

WIDTH = 110
"""Columns of the tables in a file or pipe."""
MFUS = (0.25, 0.35, 0.45)
"""Utilizations in training that a plan shows; which one a cluster reaches is only known by measuring it."""


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Print ``plan``; by default to standard output."""
    console = console or SafeConsole()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(Group(*_parts(plan)))


def as_text(plan: Plan) -> str:
    """What :func:`show_plan` writes into a file, without blanks at the ends of lines."""
    printed = io.StringIO()
    show_plan(plan, SafeConsole(printed, WIDTH))
    return "\n".join(line.rstrip() for line in printed.getvalue().rstrip().splitlines())


def _parts(plan: Plan) -> Iterator[RenderableType]:
    yield Text(_headline(plan))
    yield _ranks(plan)
    yield _activations(plan)
    yield _phases(plan)
    if plan.host:
        yield Text(f"host memory of a node, pinned: {_gb(plan.host)} of {plan.config.cluster.host_gigabytes:g} GB\n")
    yield _facts("engine", _engine(plan))
    yield _facts("one step", _step(plan))
    yield _facts("one weight synchronization", _sync(plan))
    yield Text("\n".join(_verdict(plan)))


def _headline(plan: Plan) -> str:
    config, model = plan.config, plan.architecture
    layout = config.megatron
    sizes = {
        "tensor": layout.tensor_parallel,
        "pipeline": layout.pipeline_parallel,
        "virtual pipeline": layout.virtual_pipeline or 1,
        "context": layout.context_parallel,
        "expert": layout.expert_parallel,
        "expert tensor": layout.expert_tensor_parallel or (layout.tensor_parallel if model.experts else 1),
        "data": layout.data_parallel,
    }
    parallel = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "none"
    nodes = "node" if config.cluster.nodes == 1 else "nodes"
    if config.placement == "separate":
        nodes += f"; trainer on {trainer_gpus(config)}, engines on {engine_gpus(config)}"
    active = f", {model.active_weights / 1e9:.1f} B active" if model.experts else ""
    return (
        f"{config.name}: {model.parameters / 1e9:.2f} B parameters{active}, {config.model.dtype}, on {plan.gpus} x "
        f"{config.cluster.gpu} ({config.cluster.nodes} {nodes})\nparallel: {parallel}; "
        f"{'distributed' if layout.distributed_optimizer else 'replicated'} optimizer; {_layers(plan)}; "
        "GB are 10^9 bytes"
    )


def _layers(plan: Plan) -> str:
    """Whose layers, and what of the options costs or saves memory."""
    layout, optimizer = plan.config.megatron, plan.config.optimizer
    found = {"transformer_engine": "Transformer Engine's layers", "local": "local layers"}[plan.options.implementation]
    named = {
        "float8 products": layout.fp8,
        "overlapped tensor-parallel communication": layout.tp_comm_overlap,
        "CUDA graphs of MLPs": layout.cuda_graphs,
        "precision-aware optimizer": optimizer.precision_aware,
        f"{optimizer.cpu_offload_fraction:.0%} of the optimizer on the CPU": optimizer.cpu_offload_fraction,
        f"{', '.join(layout.offload_activations)} in host memory": layout.offload_activations,
    }
    return ", ".join([found, *(name for name, there in named.items() if there)])


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _ranks(plan: Plan) -> Table:
    table = _table(
        "trainer, exact: GB per rank", "rank", "stage", "layers", "parameters", "weights", "gradients", "main weights",
        "moments", "together",
    )  # fmt: skip
    for stage in plan.stages:
        rank, held = stage.rank, stage.rank.bytes
        parts = (held.parameters, held.gradients, held.main_weights, held.moments, held.total)
        table.add_row(str(rank.rank), str(rank.stage), str(rank.layers), f"{rank.weights:,}", *map(_gb, parts))
        if rank.critic is not None:
            c = rank.critic
            parts = (c.parameters, c.gradients, c.main_weights, c.moments, c.total)
            table.add_row("", "", "", "its critic", *map(_gb, parts))
    return table


def _activations(plan: Plan) -> Table:
    row = plan.config.megatron.max_tokens_per_microbatch
    table = _table(
        f"activations, estimated: GB of the fullest rank, micro-batches of {row:,} tokens", "recompute", "rank", "kept",
        "computed again", "output layer", "together",
    )  # fmt: skip
    for name in RECOMPUTE:
        stage = max(plan.stages, key=lambda stage: stage.activations[name].total)
        kept = stage.activations[name]
        layout = plan.config.megatron
        of = f" of {', '.join(layout.recompute_modules)}" if name == "selective" else ""
        mark = of + (" (configured)" if name == layout.recompute else "")
        table.add_row(name + mark, str(stage.rank.rank), *map(_gb, (kept.kept, kept.working, kept.output, kept.total)))
    return table


def _phases(plan: Plan) -> Table:
    table = _table(
        f"phases: GB of the fullest GPU, with {_gb(plan.reserve)} reserved", "phase", "rank", "trainer", "activations",
        "engine", "buckets", "together", f"of {_gb(plan.gpu.memory)}",
    )  # fmt: skip
    groups = (
        ("weights", "gradients", "optimizer", "reference", "critic", "user buffers"),
        ("activations", "output", "CUDA graphs"),
        ("engine weights", "KV cache", "engine working"),
        ("buckets",),
    )
    for phase in plan.phases:
        parts = [sum(phase.parts.get(name, 0) for name in group) for group in groups]
        total = phase.total + plan.reserve
        table.add_row(
            phase.name,
            "engine" if phase.rank == OF_ENGINE else str(phase.rank),
            *map(_gb, parts),
            _gb(total),
            "fits" if total <= plan.gpu.memory else "too much",
        )
    return table


def _facts(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=SIMPLE)
    for row in rows:
        table.add_row(*row)
    return table


def _engine(plan: Plan) -> list[tuple[str, str]]:
    engine, config = plan.engine, plan.config
    tp = config.engine.tensor_parallel
    return [
        ("servers", f"{plan.servers} of {tp} GPUs"),
        ("weights per GPU", f"{_gb(engine.weights)} GB"),
        ("activations and graphs per GPU", f"{_gb(plan.phases[0].parts['engine working'])} GB, as SGLang reckons"),
        ("KV cache per GPU", f"{_gb(engine.cache)} GB, {engine.token:,} bytes per token"),
        ("KV cache a server", f"{engine.tokens:,} tokens"),
        (
            f"rollouts of {config.rollout.max_tokens:,} tokens at once",
            f"{plan.rollouts_per_server} a server, {plan.rollouts_per_server * plan.servers} in all",
        ),
        ("decoded together", f"{plan.running} a server (cache, max_running_requests, rollout.concurrency)"),
    ]


def _step(plan: Plan) -> list[tuple[str, str]]:
    done, cluster = plan.compute, plan.config.cluster
    floor = f"{done.decode_floor_seconds:.0f} s at least for decoding by memory bandwidth"
    rollout = f"{done.rollout_seconds:.0f} s at {cluster.rollout_mfu:.0%} MFU (assumed)"
    return [
        ("tokens", f"{done.tokens:,} in {done.episodes} episodes, {done.sampled_tokens:,} of them sampled (assumed)"),
        ("micro-batches of a data-parallel rank", str(done.microbatches)),
        ("pipeline bubble", f"{done.bubble:.1%} of the training time"),
        ("training", f"{done.train_flops:.3g} FLOPs, {done.recomputed_flops:.3g} more recomputed"),
        ("", f"{done.train_seconds:.0f} s at {cluster.train_mfu:.0%} MFU (assumed), bubble on top"),
        ("", ", ".join(f"{done.train_seconds * cluster.train_mfu / mfu:.0f} s at {mfu:.0%}" for mfu in MFUS)),
        ("log-probabilities", f"{done.score_flops:.3g} FLOPs, {done.score_seconds:.0f} s at the same"),
        ("rollout", f"{done.rollout_flops:.3g} FLOPs, {rollout}"),
        ("", floor),
        ("together", _together(plan)),
    ]  # fmt: skip


def _together(plan: Plan) -> str:
    done, config = plan.compute, plan.config
    if config.placement == "separate" and config.trainer.max_staleness:
        sides = done.rollout_seconds, done.train_seconds + done.score_seconds
        return f"{max(sides):.0f} s at least, rollout and training side by side"
    return f"{done.seconds:.0f} s"


def _sync(plan: Plan) -> list[tuple[str, str]]:
    moved, cluster = plan.sync, plan.config.cluster
    gpu, network = ((moved.fullest[f"{link}_out"], moved.fullest[f"{link}_in"]) for link in ("gpu", "network"))
    rate = f"{moved.peer_gigabytes_per_second:g} GB/s {moved.peers} and {cluster.network_gigabytes_per_second:g} GB/s"
    return [
        ("the model once", f"{_gb(moved.model_bytes)} GB"),
        ("handed to a GPU", f"{_gb(moved.gpu_bytes)} GB in {moved.buckets} buckets"),
        (f"{moved.peers} of the busiest GPU", f"{_gb(gpu[0])} GB out, {_gb(gpu[1])} GB in"),
        ("network of the busiest GPU", f"{_gb(network[0])} GB out, {_gb(network[1])} GB in"),
        ("time, at least", f"{moved.seconds:.2f} s at {rate} network per GPU, bucket after bucket"),
        ("", f"{moved.fullest_seconds:.2f} s of them on the busiest link"),
    ]


def _verdict(plan: Plan) -> list[str]:
    return [f"does not work: {fault}" for fault in plan.faults()] or ["It fits."]


def _gb(count: float) -> str:
    return f"{count / 1e9:.2f}"
