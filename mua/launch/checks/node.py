"""What ``mua doctor preflight`` checks on every node, and what its rank 0 asks; see :mod:`mua.launch.checks`.

Those of GPUs are functions of what the driver says (:mod:`mua.launch.gpus`), so that they are proven without one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil

from mua.config.schema import EndpointConfig, ExperimentConfig
from mua.engine.server import ALLOCATOR_VARIABLES, expandable
from mua.launch.checks import CHECKS, Check, Stage, Start, failure, listed, ok, run_check, warning
from mua.launch.gpus import NodeFacts, needed_variables, read_node
from mua.utils.cores import given_cores
from mua.utils.masking import below, mask_secrets
from mua.utils.source_state import installed_version, shipped

if TYPE_CHECKING:
    import httpx
    from pydantic import SecretStr

    from mua.megatron.settings import Capabilities

PINNED = ("torch", "megatron-core", "sglang", "transformers", "safetensors", "numpy")
"""Packages whose versions belong together; the others' are recorded, not checked."""
SHARED_MEMORY_BYTES = 1 << 30
ENDPOINT_SECONDS = 20.0
BUSY = 0.1
"""Of a GPU's memory: less is contexts of processes that hold nothing."""


@dataclass(frozen=True)
class RunNode:
    """What the checks of a node look at."""

    config: ExperimentConfig | None = None
    """None for ``mua doctor`` alone."""
    facts: NodeFacts = field(default_factory=NodeFacts)
    ranks: int = 1
    """Processes of the run on this node."""
    rank: int = 0
    own: frozenset[int] = frozenset()
    """Processes of the run here, by number."""
    cuda: str | None = None
    """Version that torch was built with."""
    usable: bool = True
    """Whether torch finds the GPUs."""
    cores: tuple[int, int] = (1, 1)
    """Given to this process, and of the machine."""
    machine: Capabilities | None = None
    """None without a GPU."""
    has_model: bool = True
    """Whether GPUs are of use: not to a policy behind an endpoint."""

    @classmethod
    def here(cls, config: ExperimentConfig | None, has_model: bool) -> RunNode:
        """This one, of a run that torchrun started or alone."""
        import torch

        facts, parent = read_node(), psutil.Process().parent()
        machine: Capabilities | None = None
        if facts.gpus and config is not None:
            from mua.megatron.settings import Capabilities

            machine = Capabilities.here()
        own = [parent, *parent.children(recursive=True)] if parent else [psutil.Process()]  # the same launcher's
        return cls(
            config, facts, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")),
            frozenset(one.pid for one in own), torch.version.cuda, torch.cuda.is_available(),
            (len(given_cores()), os.cpu_count() or 1), machine, has_model,
        )  # fmt: skip

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest of the GPUs' compute capabilities."""
        return min((gpu.capability for gpu in self.facts.gpus), default=None)

    @property
    def ours(self) -> ExperimentConfig:
        assert self.config is not None, "checks of a configuration are made where there is one"
        return self.config


def _configured(node: RunNode) -> bool:
    return node.config is not None and node.has_model


# ---- packages and limits


@listed("versions", on="node")
def check_versions(node: RunNode) -> Check:
    """Installed versions against the constraints that were run together."""
    names = ("gpu-py312-cu.txt",) if node.usable else ("cpu-py312.txt", "cpu-py312-nodeps.txt")
    pins: dict[str, str] = {}
    for path in (shipped(f"constraints/{name}") for name in names):
        if path.is_file():
            pins |= dict(re.findall(r"^([\w.-]+)==([^\s;]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    installed = {name: installed_version(name) for name in PINNED}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    if missing := [name for name in PINNED[:4] if installed[name] is None]:
        return failure("", shown, f"install {', '.join(missing)} with the pins of {names[0]}")
    other = [
        f"{name} {pins[name]}"
        for name, version in installed.items()
        if name in pins and (version or "").partition("+")[0] != pins[name].partition("+")[0]
    ]
    if other:
        return warning("", shown, f"tested with {', '.join(other)} ({names[0]})")
    return ok(shown)


# ---- GPUs


@listed("GPUs", on="node")
def check_gpus(node: RunNode) -> Check:
    """Every process of this node has a whole GPU, free of others."""
    facts, wanted = node.facts, node.ranks if node.facts.gpus else 0
    if not facts.gpus:
        if granted := int(os.environ.get("SLURM_GPUS_ON_NODE", "0")):
            fix = "everything runs on the CPU; check the driver, nvidia-smi and that torch is a build for CUDA"
            return warning("", f"Slurm granted {granted}, but there is none", fix)
        return ok("none; everything runs on the CPU, what only GPUs have is not checked")
    kinds = sorted({f"{gpu.name}, {gpu.total / 2**30:.0f} GiB" for gpu in facts.gpus})
    text = f"{len(facts.gpus)} x {' and '.join(kinds)}, driver {facts.gpus[0].driver}"
    if len(facts.gpus) < wanted:
        return failure("", text, f"{wanted} processes of this node need one each; ask for more GPUs")
    if mig := [gpu.index for gpu in facts.gpus if gpu.mig]:
        fix = "instances share no NVLink and NCCL joins none of one GPU: nvidia-smi -mig 0"
        return failure("", f"{text}; {mig} are cut by MIG", fix)
    named = {holder.uuid: f"{holder.name} ({holder.pid})" for holder in facts.holders if holder.pid not in node.own}
    if busy := [gpu for gpu in facts.gpus if gpu.used > BUSY * gpu.total]:
        held = [f"GPU {gpu.index}: {gpu.used / 2**30:.0f} GiB, {named.get(gpu.uuid, 'unknown')}" for gpu in busy]
        fix = "end those processes, or ask for other nodes"
        return failure("", f"{text}; held by others: {'; '.join(held)}", fix)
    if len(kinds) > 1:
        return warning("", text, "the smallest and slowest decides for all")
    if off := [gpu.index for gpu in facts.gpus if gpu.ecc is False]:
        fix = "a flipped bit in a weight goes unseen: nvidia-smi -e 1, then reboot"
        return warning("", f"{text}; {off} without ECC", fix)
    return ok(text)


@listed("driver", on="node")
def check_driver(node: RunNode) -> Check:
    """The driver serves the CUDA that torch was built with (``torch.version.cuda``): of the same major version, any."""
    facts, runtime = node.facts, node.cuda
    if not facts.gpus or facts.cuda is None:
        return ok("skipped: no GPU")
    if runtime is None:
        return failure("", "torch is a build without CUDA", "install torch from PyPI, see installation")
    major, minor = (int(part) for part in runtime.split(".")[:2])
    text = f"CUDA {facts.cuda[0]}.{facts.cuda[1]}, torch's is {runtime}"
    if facts.cuda[0] < major:
        return failure("", text, f"update the driver to one for CUDA {major}, or take an older torch")
    if not node.usable:
        fix = "run nvidia-smi and python -c 'import torch; torch.cuda.init()' on the node"
        return failure("", f"{text}; torch finds no GPU all the same", fix)
    if facts.cuda < (major, minor):
        fix = "what is compiled on the node for a newer CUDA may not load (PTX); update the driver"
        return warning("", text, fix)
    return ok(text)


@listed("links", on="node")
def check_links(node: RunNode) -> Check:
    """Every two GPUs have NVLink: the traffic of tensor and expert parallelism, and weights for engines."""
    facts = node.facts
    pairs = sorted({(a.index, b.index) for a in facts.gpus for b in facts.gpus if a.index < b.index})
    known = {pair: facts.links[pair] for pair in pairs if pair in facts.links}
    if not pairs:
        return ok("skipped: fewer than two GPUs")
    if not known:
        fix = "run it by hand; MIG and containers hide it"
        return warning("", "nvidia-smi topo -m says nothing", fix)
    if slow := {pair: link for pair, link in known.items() if not link.startswith("NV")}:
        some = ", ".join(f"{a}-{b} {link}" for (a, b), link in list(slow.items())[:4])
        fix = "parallelism and weight sync go over PCIe there: keep tensor_parallel within linked GPUs"
        return warning("", f"{len(slow)} of {len(known)} pairs without NVLink: {some}", fix)
    return ok(f"NVLink between all {len(facts.gpus)} GPUs ({', '.join(sorted(set(known.values())))})")


@listed("cores", on="node")
def check_cores(node: RunNode) -> Check:
    """The cores that this process was given are enough for a node's ranks, engines and environments."""
    (given, machine), ranks, gpus = node.cores, node.ranks, bool(node.facts.gpus)
    text = f"{given} of the machine's {machine} for {ranks} ranks"
    fix = "slurm.exclusive: true asks for whole nodes, slurm.cpus_per_task for cores; a site may bind steps (srun -v)"
    if given < ranks:
        return Check("", "failure" if gpus else "warning", text, fix)
    if gpus and given < 4 * ranks:  # a rank, its share of an engine and of the environments, the data's way to the GPU
        return warning("", text, fix)
    return ok(text)


@listed("Apex", on="node")
def check_apex(_: RunNode) -> Check:
    """NVIDIA's Apex has a kernel that adds weight gradients in place; PyPI has another package of that name."""
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None:
        return ok("NVIDIA's: weight gradients are accumulated in the product's kernel")
    if importlib.util.find_spec("apex") is not None:
        fix = "pip uninstall apex, then build https://github.com/NVIDIA/apex (docs/installation.md)"
        return warning("", "the package apex is not NVIDIA's, or was built without --cuda_ext", fix)
    return ok("none; weight gradients are added after their product")


@listed("variables", on="node")
def check_variables(node: RunNode, environment: Mapping[str, str] = os.environ) -> Check:
    """What the run will have, and whether a person's own values can stay."""

    if not _configured(node):  # nobody knows what is to run
        if found := [name for name in ALLOCATOR_VARIABLES if expandable(environment.get(name, ""))]:
            why = "expandable segments can be neither shared with engines nor released"
            return warning("", ", ".join(found), why)
        return ok("none in the way")
    needed = needed_variables(node.ours, node.capability)
    if wrong := [variable for variable in needed if not variable.takes(environment.get(variable.name))]:
        text = ", ".join(f"{v.name}={environment[v.name]}" for v in wrong)
        failed = any(v.otherwise == "failure" for v in wrong)
        values = (f"unset {v.name}" if v.value is None else f"unset {v.name} or set it to {v.value}" for v in wrong)
        fixes = "; ".join(f"{value} ({v.why})" for value, v in zip(values, wrong, strict=True))
        return Check("", "failure" if failed else "warning", text, fixes)
    if node.capability is None:
        return ok("skipped what is set for GPUs; nothing in the way")
    shown = [f"{v.name}={environment.get(v.name, v.value)}" for v in needed if v.value is not None]
    return ok(", ".join(shown) or "none needed")


@listed("layers", on="node", applies=_configured)
def check_layers(node: RunNode) -> Check:
    """Whose layers will run, and that this machine has every option of the section megatron: fp8, fusions, overlaps."""
    config, machine = node.ours, node.machine
    if machine is None:
        return ok("skipped: no GPU; Megatron's local layers")
    from mua.megatron.settings import Options

    if Options.of(config.megatron, machine, experts=False).implementation == "transformer_engine":
        return ok(f"Transformer Engine {machine.transformer_engine}")
    if config.megatron.implementation == "auto":
        fix = "install transformer-engine-torch (docs/installation.md), or say megatron.implementation: local"
        return warning("", "Megatron's local layers: Transformer Engine is not installed", fix)
    return ok("Megatron's local layers")


@listed("memory", on="node", applies=lambda node: _configured(node) and node.rank == 0)
def check_memory(node: RunNode) -> Check:
    """Every phase of the plan fits the smallest GPU that is here, by the calculation of ``mua plan`` for its type."""
    config, facts = node.ours, node.facts
    if not facts.gpus:
        return ok("skipped: no GPU")
    from mua.launch.plan.planner import GPUS, make_plan

    name, least = facts.gpus[0].name, min(gpu.total for gpu in facts.gpus)
    kind = next((kind for kind in GPUS if all(part in name for part in kind.split("-"))), None)
    if kind is not None:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu": kind})})
    plan = make_plan(config)
    fullest = max(plan.phases, key=lambda phase: phase.total)
    needed = fullest.total + plan.reserve
    text = f"{fullest.name} needs {needed / 1e9:.1f} of {least / 1e9:.1f} GB"
    if faults := plan.faults():
        return failure("", faults[0], "mua plan CONFIG shows what takes it")
    if needed > least:
        return failure("", text, "mua plan CONFIG shows what takes it; shard further, or offload")
    if kind is None:
        return warning("", text, f"no figures of {name}; counted as {config.cluster.gpu} (cluster.gpu)")
    return ok(text)


@listed("open files", on="node")
def check_open_files(node: RunNode) -> Check:
    """Episodes hold connections to engines and users."""
    config = node.config
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 + 8 * (config.rollout.concurrency if config else 64)
    text = f"ulimit -n is {soft}"
    if hard < needed:
        return failure("", text, f"raise the hard limit {hard} to at least {needed}")
    if soft < needed:
        return warning("", text, f"put `ulimit -n {needed}` into slurm.setup")
    return ok(text)


@listed("shared memory", on="node")
def check_shared_memory(node: RunNode) -> Check:
    """Weights go to engines through /dev/shm on a CPU; NCCL and data loaders use it everywhere."""
    usage = shutil.disk_usage("/dev/shm")
    needed = max(SHARED_MEMORY_BYTES, 2 * node.config.engine.bucket_bytes if node.config else 0)
    text = f"/dev/shm has {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    if usage.free < needed:
        return warning("", text, f"give it {needed / 2**30:.1f} GiB (containers: --shm-size)")
    return ok(text)


def compare_nodes(found: Sequence[tuple[str, Check]]) -> list[Check]:
    """What differs between nodes that must not: packages, and GPUs with their driver."""
    differ = []
    for name, fix in (
        ("versions", "one environment for all nodes: slurm.venv in a shared folder"),
        ("GPUs", "ask for nodes of one kind: slurm.extra --constraint"),
    ):
        texts = {node: check.text for node, check in found if check.name == name}
        if len(set(texts.values())) > 1:
            nodes = ", ".join(f"{node}: {text}" for node, text in texts.items())
            differ.append(Check(f"{name} differ", "failure" if name == "versions" else "warning", nodes, fix))
    return differ


# ---- what rank 0 asks or starts


@listed("teacher", on="asked", applies=lambda s: s.verb == "train" and s.config.algorithm.distillation is not None)
def check_teacher(start: Start) -> Check:
    """The server of ``algorithm.distillation`` is there, SGLang's, and lets us in."""
    config, section = start.config.algorithm.distillation, "algorithm.distillation"
    assert config is not None
    base = config.base_url.rstrip("/")
    answer = _get(f"{base}/model_info", config.api_key, base, section)
    if isinstance(answer, Check):
        return answer
    try:
        return ok(f"{base} serves {answer.json()['model_path']}")
    except (ValueError, KeyError, TypeError):
        fix = f"{section}.base_url must be SGLang's own address, without /v1"
        return failure("", f"{base}/model_info answers {answer.status_code}", fix)


@listed("tool servers", on="asked", applies=lambda start: start.plays and start.config.environment.mcp)
def check_tool_servers(start: Start) -> Check:
    """Each server of ``environment.mcp`` opens one session and has the tools that the configuration names."""
    from mua.environment.mcp.inspection import inspected  # brings the SDK, which takes long to import

    found = inspected(start.config)
    text = ", ".join(f"{one.name}: {len(one.tools)} tools in {one.seconds:.1f} s" for one in found if not one.fault)
    if faults := [one.fault for one in found if one.fault]:
        return failure("", "; ".join(faults), "mua env servers CONFIG shows all")
    return ok(text)


@listed("endpoint", on="asked")
def check_endpoints(start: Start) -> list[Check]:
    """All that a run asks. A stand-in may be away: it is asked only while another endpoint cannot be."""
    found = list[Check]()
    for name, endpoint in start.endpoints.items():
        check = check_endpoint(endpoint, name)
        away = ".fallbacks." in name and check.state == "failure"
        found.append(replace(check, state="warning") if away else check)
    return found


def check_endpoint(model: EndpointConfig, name: str = "user.llm") -> Check:
    """The endpoint in the section ``name`` answers and knows its model."""
    shown = mask_secrets(model.base_url.rstrip("/"))
    answer = _get(below(model.base_url, "models"), model.api_key, shown, name)
    if isinstance(answer, Check):
        return answer
    try:
        known = [str(one["id"]) for one in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        known = []
    if not answer.is_success or not known:
        fix = f"it may still serve chats; check {name}.base_url (it usually ends in /v1)"
        return warning("", f"{shown}/models answers {answer.status_code} and names no models", fix)
    if model.model not in known:
        some = ", ".join(known[:5])
        return failure("", f"{shown} does not know {model.model!r}", f"set {name}.model to: {some}")
    return ok(f"{shown} serves {model.model}")


def _get(url: str, key: SecretStr, shown: str, section: str) -> httpx.Response | Check:
    """What a server answers; a failure where it is not there or does not let us in."""
    import httpx

    headers = {"Authorization": f"Bearer {key.get_secret_value()}"}
    try:
        answer = httpx.get(url, headers=headers, timeout=ENDPOINT_SECONDS)
    except httpx.HTTPError as error:
        return failure("", f"{shown}: {type(error).__name__}", f"check {section}.base_url and its server")
    if answer.status_code in (401, 403):
        return failure("", f"{shown} answers {answer.status_code}", f"check {section}.api_key")
    return answer


def run_stage(stage: Stage, subject: Any) -> list[Check]:
    """Every check of a stage of the preflight that applies, to a node or to the start of a run."""
    found = list[Check]()
    for one in CHECKS:
        if one.on == stage and one.applies(subject):
            found += run_check(one.name, partial(one.check, subject))
    return found
