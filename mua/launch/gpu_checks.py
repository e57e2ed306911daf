"""The checks of ``mua doctor preflight`` on GPUs: functions of what the driver says, proven without one.

nvidia-smi ──► mua/launch/gpus.py: NodeFacts ─┐
configuration, mua.launch.plan, installed packages ──┴─► Check
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import psutil

from mua.config.schema import ExperimentConfig
from mua.engine.cluster import check_trainer_machine, first_engine_gpu, trains_beside_engines
from mua.launch.checks import Check
from mua.launch.gpus import NodeFacts
from mua.utils.errors import ConfigError

if TYPE_CHECKING:
    from mua.launch.plan.planner import Plan
    from mua.megatron.capabilities import Capabilities

_BUSY = 0.1
"""Of a GPU's memory: less is contexts of processes that hold nothing."""
_APEX = "https://github.com/NVIDIA/apex"


def gpus(facts: NodeFacts, wanted: int, own: frozenset[int] = frozenset()) -> Check:
    """``wanted`` processes of this node have a whole GPU each, free of others; ``own`` are this job's processes."""
    if not facts.gpus:
        if granted := int(os.environ.get("SLURM_GPUS_ON_NODE", "0")):
            fix = "everything runs on the CPU; check the driver, nvidia-smi and that torch is a build for CUDA"
            return Check("GPUs", "warning", f"Slurm granted {granted}, but there is none", fix)
        return Check("GPUs", "ok", "none; everything runs on the CPU, what only GPUs have is not checked")
    kinds = sorted({f"{gpu.name}, {gpu.total / 2**30:.0f} GiB" for gpu in facts.gpus})
    text = f"{len(facts.gpus)} x {' and '.join(kinds)}, driver {facts.gpus[0].driver}"
    if len(facts.gpus) < wanted:
        return Check("GPUs", "failure", text, f"{wanted} processes of this node need one each; ask for more GPUs")
    if mig := [gpu.index for gpu in facts.gpus if gpu.mig]:
        fix = "instances share no NVLink and NCCL joins none of one GPU: nvidia-smi -mig 0"
        return Check("GPUs", "failure", f"{text}; {mig} are cut by MIG", fix)
    strangers = [holder for holder in facts.holders if holder.pid not in own]
    named = {holder.uuid: f"{holder.name} ({holder.pid})" for holder in strangers}
    if busy := [gpu for gpu in facts.gpus if gpu.used > _BUSY * gpu.total]:
        held = "; ".join(
            f"GPU {gpu.index}: {gpu.used / 2**30:.0f} GiB, {named.get(gpu.uuid, 'unknown')}" for gpu in busy
        )
        return Check(
            "GPUs", "failure", f"{text}; held by others: {held}", "end those processes, or ask for other nodes"
        )
    if len(kinds) > 1:
        return Check("GPUs", "warning", text, "the smallest and slowest decides for all")
    if off := [gpu.index for gpu in facts.gpus if gpu.ecc is False]:
        fix = "a flipped bit in a weight goes unseen: nvidia-smi -e 1, then reboot"
        return Check("GPUs", "warning", f"{text}; {off} without ECC", fix)
    return Check("GPUs", "ok", text)


def own_processes() -> frozenset[int]:
    """This process, those started beside it by the same launcher, and all of their descendants."""
    parent = psutil.Process().parent()
    return frozenset(one.pid for one in ([parent, *parent.children(recursive=True)] if parent else [psutil.Process()]))


def driver(facts: NodeFacts, runtime: str | None, usable: bool = True) -> Check:
    """The driver serves the CUDA that torch was built with (``torch.version.cuda``): of the same major version, any.

    ``usable``: whether torch finds the GPUs.
    """
    if not facts.gpus or facts.cuda is None:
        return Check("driver", "ok", "skipped: no GPU")
    if runtime is None:
        return Check("driver", "failure", "torch is a build without CUDA", "install torch from PyPI, see installation")
    major, minor = (int(part) for part in runtime.split(".")[:2])
    text = f"CUDA {facts.cuda[0]}.{facts.cuda[1]}, torch's is {runtime}"
    if facts.cuda[0] < major:
        return Check("driver", "failure", text, f"update the driver to one for CUDA {major}, or take an older torch")
    if not usable:
        fix = "run nvidia-smi and python -c 'import torch; torch.cuda.init()' on the node"
        return Check("driver", "failure", f"{text}; torch finds no GPU all the same", fix)
    if facts.cuda < (major, minor):
        fix = "what is compiled on the node for a newer CUDA may not load (PTX); update the driver"
        return Check("driver", "warning", text, fix)
    return Check("driver", "ok", text)


def links(facts: NodeFacts) -> Check:
    """Every two GPUs have NVLink: the traffic of tensor and expert parallelism, and weights for engines."""
    pairs = {(a.index, b.index) for a in facts.gpus for b in facts.gpus if a.index < b.index}
    known = {pair: facts.links[pair] for pair in sorted(pairs) if pair in facts.links}
    if not pairs:
        return Check("links", "ok", "skipped: fewer than two GPUs")
    if not known:
        return Check(
            "links", "warning", "nvidia-smi topo -m says nothing", "run it by hand; MIG and containers hide it"
        )
    slow = {pair: link for pair, link in known.items() if not link.startswith("NV")}
    if slow:
        some = ", ".join(f"{a}-{b} {link}" for (a, b), link in list(slow.items())[:4])
        fix = (
            "tensor and expert parallelism and weight sync go over PCIe there: keep tensor_parallel within linked GPUs"
        )
        return Check("links", "warning", f"{len(slow)} of {len(known)} pairs without NVLink: {some}", fix)
    return Check("links", "ok", f"NVLink between all {len(facts.gpus)} GPUs ({', '.join(sorted(set(known.values())))})")


def engines(config: ExperimentConfig, on_node: int, ranks: int) -> Check:
    """The engines of a trainer's node have its GPUs: their tensor parallelism divides them, and there are enough."""
    tensor, count = config.engine.tensor_parallel, config.engine.count
    if not trains_beside_engines(config):
        return Check(
            "engines", "ok", f"on {config.engine.nodes} nodes of their own, which look at their GPUs themselves"
        )
    if not on_node:
        return Check("engines", "ok", "skipped: no GPU")
    try:
        check_trainer_machine(config, ranks, on_node)
    except ConfigError as error:
        return Check("engines", "failure", str(error))
    free = on_node - first_engine_gpu(config, ranks)
    text = f"{count} of tensor_parallel {tensor} on {free} GPUs of a node"
    if free % tensor:
        fits = ", ".join(str(size) for size in range(1, free + 1) if free % size == 0)
        return Check("engines", "failure", text, f"an engine would span nodes: engine.tensor_parallel could be {fits}")
    if count * tensor > free:
        return Check("engines", "failure", text, f"engine.count can be {free // tensor} at most")
    if count * tensor < free:
        fix = f"{free - count * tensor} generate nothing; engine.count {free // tensor} uses all"
        return Check("engines", "warning", text, fix)
    return Check("engines", "ok", text)


def memory(config: ExperimentConfig, facts: NodeFacts) -> Check:
    """Every phase of the plan fits the GPUs that are here, by the calculation of ``mua plan`` for their type."""
    if not facts.gpus:
        return Check("memory", "ok", "skipped: no GPU")
    from mua.launch.plan.planner import make_plan

    kind = gpu_type(facts.gpus[0].name)
    planned = config if kind is None else config.model_copy(
        update={"cluster": config.cluster.model_copy(update={"gpu": kind})}
    )  # fmt: skip
    return memory_of_plan(make_plan(planned), facts, kind)


def gpu_type(name: str) -> str | None:
    """Which type of the plan a GPU is that the driver calls ``name``; None: one that it has no figures of."""
    from mua.launch.plan.compute import GPUS

    found = [kind for kind in GPUS if all(part in name for part in kind.split("-"))]
    return found[0] if found else None


def memory_of_plan(plan: Plan, facts: NodeFacts, kind: str | None) -> Check:
    """The fullest phase of ``plan`` against the smallest GPU; ``kind`` is its type, None if it has no figures."""
    least = min(gpu.total for gpu in facts.gpus)
    fullest = max(plan.phases, key=lambda phase: phase.total)
    needed = fullest.total + plan.reserve
    text = f"{fullest.name} needs {needed / 1e9:.1f} of {least / 1e9:.1f} GB"
    if faults := plan.faults():
        return Check("memory", "failure", faults[0], "mua plan CONFIG shows what takes it")
    if needed > least:
        return Check("memory", "failure", text, "mua plan CONFIG shows what takes it; shard further, or offload")
    if kind is None:
        fix = f"no figures of {facts.gpus[0].name}; counted as {plan.config.cluster.gpu} (cluster.gpu)"
        return Check("memory", "warning", text, fix)
    return Check("memory", "ok", text)


def layers(config: ExperimentConfig, machine: Capabilities | None) -> Check:
    """Whose layers will run, and that this machine has every option of the section megatron: fp8, fusions, overlaps.

    ``machine`` is None without a GPU.
    """
    if machine is None:
        return Check("layers", "ok", "skipped: no GPU; Megatron's local layers")
    from mua.megatron.settings import Options

    try:
        chosen = Options.of(config.megatron, machine, experts=False).implementation
    except ConfigError as error:
        return Check("layers", "failure", str(error))
    if chosen == "transformer_engine":
        return Check("layers", "ok", f"Transformer Engine {machine.transformer_engine}")
    if config.megatron.implementation == "auto":
        fix = "install transformer-engine-torch (docs/installation.md), or say megatron.implementation: local"
        return Check("layers", "warning", "Megatron's local layers: Transformer Engine is not installed", fix)
    return Check("layers", "ok", "Megatron's local layers")


def apex(kernel: bool | None = None, package: bool | None = None) -> Check:
    """NVIDIA's Apex has a kernel that adds weight gradients in place; PyPI has another package of that name.

    ``kernel`` and ``package`` say whether each is there; by default they are looked for, not imported.
    """
    kernel = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None if kernel is None else kernel
    package = importlib.util.find_spec("apex") is not None if package is None else package
    if kernel:
        return Check("Apex", "ok", "NVIDIA's: weight gradients are accumulated in the product's kernel")
    if package:
        text = "the package apex is not NVIDIA's, or was built without --cuda_ext"
        return Check("Apex", "warning", text, f"pip uninstall apex, then build {_APEX} (docs/installation.md)")
    return Check("Apex", "ok", "none; Transformer Engine accumulates by itself where it is there")


def cores(given: int, ranks: int, gpus: bool, machine: int) -> Check:
    """The cores that this process was given are enough for a node's ranks, engines and environments."""
    text = f"{given} of the machine's {machine} for {ranks} ranks"
    fix = "slurm.exclusive: true asks for whole nodes, slurm.cpus_per_task for cores; a site may bind steps (srun -v)"
    if given < ranks:
        return Check("cores", "failure" if gpus else "warning", text, fix)
    if gpus and given < 4 * ranks:  # a rank, its share of an engine and of the environments, the data's way to the GPU
        return Check("cores", "warning", text, fix)
    return Check("cores", "ok", text)


def alike(found: Sequence[tuple[str, Check]]) -> list[Check]:
    """What differs between nodes that must not: packages, and GPUs with their driver."""
    differ = []
    for name, state, fix in (
        ("versions", "failure", "one environment for all nodes: slurm.venv in a shared folder"),
        ("GPUs", "warning", "ask for nodes of one kind: slurm.extra --constraint"),
    ):
        texts: Mapping[str, str] = {node: check.text for node, check in found if check.name == name}
        if len(set(texts.values())) > 1:
            nodes = ", ".join(f"{node}: {text}" for node, text in texts.items())
            differ.append(Check(f"{name} differ", "failure" if state == "failure" else "warning", nodes, fix))
    return differ
