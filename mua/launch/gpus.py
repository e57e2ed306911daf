"""What NVIDIA's driver says of a node's GPUs, and the variables that are read when CUDA starts.

The first is parsed from ``nvidia-smi``, which touches no CUDA context. The second is one table of what Megatron-Core,
Transformer Engine, cuBLAS and NCCL read:

    configuration, compute capability ──► needed_variables ─┬─► set_variables: each rank, before it touches CUDA
                                                            └─► check_variables: mua doctor, and the preflight

A value that a person has set stays, and is checked. What engines get is in :mod:`mua.engine.server`. Nothing is set
for ``TORCH_NCCL_AVOID_RECORD_STREAMS``: torch 2.14 says that it is the default now and the variable deprecated.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

from mua.config.schema import ExperimentConfig
from mua.engine.server import ALLOCATOR_VARIABLES, OF_NCCL_GROUP, expandable

Capability = tuple[int, int]
"""Compute capability: (9, 0) is Hopper, (10, 0) Blackwell."""
SECONDS = 30.0
MIB = 1 << 20
FIELDS = (
    "index,uuid,name,compute_cap,memory.total,memory.used,driver_version,pci.bus_id,mig.mode.current,ecc.mode.current"
)


@dataclass(frozen=True)
class GpuFacts:
    """One GPU."""

    index: int
    uuid: str
    name: str
    capability: Capability
    total: int
    """Bytes, as the driver reports them."""
    used: int
    """Bytes that are taken, by whomever."""
    driver: str
    mig: bool
    """Cut into instances."""
    ecc: bool | None
    """None where the GPU does not have it."""


@dataclass(frozen=True)
class GpuHolder:
    """A process that has memory of a GPU."""

    uuid: str
    pid: int
    name: str


@dataclass(frozen=True)
class NodeFacts:
    """The GPUs of one node that this process may use, and what lies between and around them."""

    gpus: tuple[GpuFacts, ...] = ()
    cuda: Capability | None = None
    """The newest CUDA that the driver serves."""
    holders: tuple[GpuHolder, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Between two GPUs by index, in the words of ``nvidia-smi topo -m``: NV18, PIX, SYS, ..."""


def parse_gpus(text: str) -> tuple[GpuFacts, ...]:
    """``nvidia-smi --query-gpu=<FIELDS> --format=csv,noheader,nounits``; memory is in MiB there."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        index, uuid, name, capability, total, used, driver, _, mig, ecc = (part.strip() for part in line.split(","))
        major, _, minor = capability.partition(".")
        found.append(
            GpuFacts(
                int(index), uuid, name, (int(major), int(minor)), int(total) * MIB, int(used) * MIB, driver,
                mig == "Enabled", {"Enabled": True, "Disabled": False}.get(ecc),
            )
        )  # fmt: skip
    return tuple(found)


def parse_holders(text: str) -> tuple[GpuHolder, ...]:
    """``nvidia-smi --query-compute-apps=gpu_uuid,pid,process_name --format=csv,noheader``."""
    rows = (line.split(",", 2) for line in text.splitlines() if line.count(",") >= 2)
    return tuple(GpuHolder(uuid.strip(), int(pid), name.strip()) for uuid, pid, name in rows if pid.strip().isdigit())


def parse_links(text: str) -> dict[tuple[int, int], str]:
    """``nvidia-smi topo -m``: a matrix whose rows and first columns are GPUs; what else it has is left out."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    head = next((line for line in lines if line[:1] == ["GPU0"] and (len(line) < 2 or line[1] != "X")), [])
    columns = [int(name[3:]) for name in head if re.fullmatch(r"GPU\d+", name)]
    links = {}
    for row in lines:
        if row and row is not head and re.fullmatch(r"GPU\d+", row[0]):
            for column, link in zip(columns, row[1:], strict=False):
                if link != "X":
                    links[int(row[0][3:]), column] = link
    return links


def parse_cuda(text: str) -> Capability | None:
    """The driver's newest CUDA, from ``nvidia-smi --version`` or the head of ``nvidia-smi``."""
    found = re.search(r"CUDA Version\s*:\s*(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def visible(gpus: tuple[GpuFacts, ...], chosen: str | None) -> tuple[GpuFacts, ...]:
    """Those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all where it is None or names instances of MIG."""
    if chosen is None or chosen.startswith("MIG-"):
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return tuple(gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name))


@cache
def gpus_here() -> tuple[GpuFacts, ...]:
    """The GPUs this process may use; none without NVIDIA's driver."""
    text = _smi(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits")
    return visible(parse_gpus(text), os.environ.get("CUDA_VISIBLE_DEVICES"))


def read_node() -> NodeFacts:
    """Everything that the driver says; an empty record without it."""
    if not (gpus := gpus_here()):
        return NodeFacts()
    holders = parse_holders(_smi("--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"))
    cuda = parse_cuda(_smi("--version")) or parse_cuda(_smi())
    return NodeFacts(gpus, cuda, holders, parse_links(_smi("topo", "-m")))


def visible_capability() -> Capability | None:
    """The lowest compute capability among this process's GPUs; None without one. Does not start CUDA."""
    return min((gpu.capability for gpu in gpus_here()), default=None)


def _smi(*arguments: str) -> str:
    """What ``nvidia-smi`` prints; nothing where it is not there or fails."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    try:
        return subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return ""


# ---- variables

BLACKWELL: Capability = (10, 0)
"""Both names are read; torch 2.14 prefers the first."""
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@dataclass(frozen=True)
class Variable:
    """What one variable is to be."""

    name: str
    value: str | None
    """None: not set by us, and to be left unset by others unless ``accepts`` says otherwise."""
    why: str
    otherwise: Literal["warning", "failure"]
    """What another value is."""
    accepts: Callable[[str], bool] = lambda _: False
    """Which other values serve too."""

    def takes(self, value: str | None) -> bool:
        """Whether a run may have ``value``; None: it is not set."""
        return value is None or value == self.value or self.accepts(value)


def needed_variables(config: ExperimentConfig, capability: Capability | None) -> list[Variable]:
    """The table for one configuration; ``capability`` is that of the GPUs, None where there are none.

    Megatron's rule for connections is that of ``megatron/training/arguments.py`` 0.19.2, its values for determinism
    those of ``megatron/training/determinism.py``.
    """
    megatron, engine = config.megatron, config.engine
    needed = []
    split = megatron.tensor_parallel > 1 or megatron.context_parallel > 1
    if split and capability is not None and capability < BLACKWELL:
        why = "tensor and context parallelism before Blackwell: kernels must start in the order they were launched in"
        needed.append(Variable("CUDA_DEVICE_MAX_CONNECTIONS", "1", why, "warning"))
    if engine.transport == "broadcast":
        why = "engines and trainer form one NCCL group"
        needed += [Variable(name, value, why, "warning", str.isdigit) for name, value in OF_NCCL_GROUP.items()]
    if config.trainer.deterministic:
        why = "trainer.deterministic"
        needed += [
            Variable(
                "NCCL_ALGO", "Ring", why, "failure", lambda value: value in ("^NVLS", "CollnetDirect", "CollnetChain")
            ),
            Variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", why, "failure"),
            Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", why, "failure", lambda value: value == ":16:8"),
        ]
    if engine.transport == "colocated" or engine.memory_saver or megatron.offload:
        why = "memory in expandable segments has no legacy CUDA IPC handle, and torch_memory_saver cannot release it"
        needed += [
            Variable(name, None, why, "failure", lambda value: not expandable(value)) for name in ALLOCATOR_VARIABLES
        ]
    if megatron.offload_activations:
        why = "megatron.offload_activations: without it Transformer Engine offloads weights along with them"
        needed.append(Variable("NVTE_CPU_OFFLOAD_V1", "1", why, "failure"))
    why = "Megatron-Core chooses the attention kernel, and refuses another choice"  # it sets all three to 1 itself
    needed += [Variable(name, None, why, "failure", lambda value: value == "1") for name in _ATTENTION]
    return needed


def set_variables(config: ExperimentConfig, environment: MutableMapping[str, str] = os.environ) -> None:
    """Give this process what it needs and has not, before CUDA reads it; nothing where there is no GPU."""
    if (capability := visible_capability()) is None:
        return
    for variable in needed_variables(config, capability):
        if variable.value is not None:
            environment.setdefault(variable.name, variable.value)
