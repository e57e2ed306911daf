"""The trainer's memory on its device: what torch's allocator holds of it, and how it is given back.

What torch frees it keeps cached. An engine is another process: it can use what is cached only after
:func:`give_back`. Everything that mua asks of ``torch.cuda`` about memory is asked here, of :data:`torch_cuda`, which
is None on a host without CUDA; a test puts a ledger there (``tests/memory_ledger.py``).
"""

from __future__ import annotations

import gc
from typing import Any

import torch

GIB = float(1 << 30)

torch_cuda: Any = torch.cuda if torch.cuda.is_available() else None
"""What answers for the device's memory; None where there is none."""


def give_back() -> None:
    """Leave to other processes what torch caches of the device, after whatever is unreachable is freed.

    Memory that an engine had open is freed here only once it has closed it. Does nothing without a device.
    """
    if torch_cuda is None:
        return
    gc.collect()  # graphs of a step that failed, and whatever else waits in a cycle
    torch_cuda.synchronize()  # what is still read by a kernel is not cached yet
    torch_cuda.ipc_collect()
    torch_cuda.empty_cache()


def synchronize() -> None:
    """Wait for everything that was asked of the device."""
    if torch_cuda is not None:
        torch_cuda.synchronize()


def in_use() -> dict[str, float]:
    """This process's device memory in GiB: ``device_allocated_gib`` by tensors, ``device_reserved_gib`` by torch's
    allocator with what it caches, and ``device_free_gib``, which is left for all processes. Empty without a device."""
    if torch_cuda is None:
        return {}
    free, _ = torch_cuda.mem_get_info()
    return {
        "device_allocated_gib": torch_cuda.memory_allocated() / GIB,
        "device_reserved_gib": torch_cuda.memory_reserved() / GIB,
        "device_free_gib": free / GIB,
    }
