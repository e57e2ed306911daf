"""Memory of this process, its children and its CUDA device."""

from __future__ import annotations

import contextlib
import sys

import psutil

GIB = float(1 << 30)


def memory_metrics() -> dict[str, float]:
    """Memory in GiB: resident set sizes, and CUDA's allocator where torch runs on a GPU.

    ``memory/children_gib`` sums the resident sets of all descendants (engines, trainer ranks); pages that processes
    share are counted once for each of them.
    """
    me = psutil.Process()
    metrics = {"memory/process_gib": _resident(me) / GIB}
    metrics["memory/children_gib"] = sum(map(_resident, me.children(recursive=True))) / GIB
    return metrics | _cuda()


def process_memory() -> dict[str, float]:
    """Memory of this process in GiB: of its device what is allocated, reserved by torch and free for all; else, on a
    host without CUDA, its resident set."""
    cuda = _cuda()
    if not cuda:
        return {"resident_gib": _resident(psutil.Process()) / GIB}
    import torch

    free, _ = torch.cuda.mem_get_info()
    return {
        "device_allocated_gib": torch.cuda.memory_allocated() / GIB,
        "device_reserved_gib": torch.cuda.memory_reserved() / GIB,
        "device_free_gib": free / GIB,
    }


def _resident(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):  # a child may end between being listed and being asked
        return int(process.memory_info().rss)
    return 0


def _cuda() -> dict[str, float]:
    torch = sys.modules.get("torch")  # whoever uses a GPU has loaded it; metrics alone must not
    if torch is None or not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "memory/cuda_allocated_gib": torch.cuda.memory_allocated() / GIB,
        "memory/cuda_peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/cuda_device_used_gib": (total - free) / GIB,
    }
