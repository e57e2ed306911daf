"""What this machine is: hardware, driver, versions, peers, and the rates that other figures are held against."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from tools.gpu_checks.child import Found, Place

PACKAGES = (
    "torch", "triton", "megatron-core", "transformer-engine", "transformer-engine-torch", "sglang", "sglang-kernel",
    "transformers", "torch-memory-saver", "flash-attn", "apex", "nvidia-nccl-cu13", "numpy", "safetensors",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]


def machine(place: Place) -> Found:
    """Fails where there is a GPU that torch does not find."""
    import torch

    found = Found()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "-") == ""
    if not place.cuda and not hidden and Path("/dev/nvidia0").exists():
        reason = (
            "CUDA" if torch.version.cuda is None else f"the driver, {_driver()}, or torch's CUDA {torch.version.cuda}"
        )
        found.expect(
            False, f"/dev/nvidia0 is there, but torch {torch.__version__} finds no device: a build without {reason}"
        )
    about: dict[str, Any] = {"device": "cpu", "gpus": "none"}
    if place.cuda:
        about |= _gpus(torch)
        _rates(torch, found)
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        found.expect(
            "expandable_segments:True" not in allocator.replace(" ", ""),
            "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments: neither torch_memory_saver nor CUDA IPC works with it; "
            "unset it",
        )
    about |= {"host": _host(), "python": platform.python_version(), "mua": _commit(), "versions": _versions()}
    found.machine = about
    return found


def _gpus(torch: Any) -> dict[str, Any]:
    count, cuda = torch.cuda.device_count(), torch.cuda
    properties = [cuda.get_device_properties(index) for index in range(count)]
    memory = min(of.total_memory for of in properties)
    peers = [(a, b) for a in range(count) for b in range(count) if a != b and not cuda.can_device_access_peer(a, b)]
    gpus = f"{count} x {properties[0].name}, {memory / 2**30:.0f} GiB, {properties[0].multi_processor_count} SMs, "
    about = {
        "device": properties[0].name,
        "gpus": gpus + f"compute capability {properties[0].major}.{properties[0].minor}",
        "driver": _driver(),
        "cuda": f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {_nccl(torch)}",
    }
    if count > 1:
        without = (
            f"none between {', '.join(f'{a} and {b}' for a, b in peers if a < b)}" if peers else "all reach each other"
        )
        about["peers"] = f"{without}; links by nvidia-smi: {_links()}"
    return about


def _nccl(torch: Any) -> str:
    with suppress(Exception):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return "unknown"


def _smi(*arguments: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
    return ""


def _driver() -> str:
    return (_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines() or ["unknown"])[0]


def _links() -> str:
    """How the first GPU reaches each other one: NV18 is NVLink, SYS the way over the processors."""
    for line in _smi("topo", "-m").splitlines():
        if line.startswith("GPU0"):
            return " ".join(line.split()[1:])[:80]
    return "unknown"


def _host() -> str:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    memory = next(int(line.split()[1]) for line in lines if line.startswith("MemTotal"))
    return f"{os.cpu_count()} cores, {memory / 2**20:.0f} GiB, {platform.machine()}, kernel {platform.release()}"


def _commit() -> str:
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return "no git here"


def _versions() -> str:
    known = []
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            known.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(known)


def _rates(torch: Any, found: Found) -> None:
    """A large matrix product and a copy: the ceilings of this card, on random data."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found.add("bf16 matrix product", 2 * size**3 / _seconds(torch, lambda: left @ right) / 1e12, "TFLOP/s")
    data = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(data)
    found.add("copy on the device", 2 * data.nbytes / _seconds(torch, lambda: target.copy_(data)) / 1e9, "GB/s")
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    to_host = _seconds(torch, lambda: host.copy_(data[: host.nbytes], non_blocking=True))
    found.add("copy to pinned host memory", host.nbytes / to_host / 1e9, "GB/s")


def _seconds(torch: Any, work: Any, times: int = 10) -> float:
    """Mean of ten after three that are not counted."""
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times
