"""What NVIDIA's driver says of a node's GPUs: parsed from ``nvidia-smi``, which touches no CUDA context."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

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
