"""Handles of a weight bucket that SGLang's receiver opens in another process.

Reason: three things have no public name. torch shares CPU memory by copying (``share_memory_``) or through
``UntypedStorage._new_shared``. Its handles pass as descriptors between relatives of one process only, unless the
strategy is "file_system". CUDA IPC handles name the device by index, which differs between processes; SGLang's own
patch of torch sends UUIDs. SGLang itself is imported on a GPU alone.

With "file_system" torch keeps the names of shared memory in a process of its own, ``torch_shm_manager``, which it
starts at the first use. Slurm sends a signal to every process of a step; a manager that dies of it takes the rank with
it, which aborts in C++ ("Broken pipe") as soon as it frees shared memory or makes any.

Upstream: torch 2.14.1, sglang 0.5.23. Goes when:
``tests/unit/test_engine_weights.py::test_upstream_shares_new_memory_by_a_private_name`` fails.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pybase64
import torch
import torch.multiprocessing

from megatron_bridge.reshard import BucketLayout
from mua.compat.sglang_shards import table


def shared_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 buffer ``[nbytes]`` that a handle can be made of: shared memory on CPU, any memory on a GPU."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _file_system_sharing():
        storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def shared_handle(layout: BucketLayout, flat: torch.Tensor) -> str:
    """What SGLang takes for a flattened bucket, good for one receiver: the memory of ``flat``, and what lies where.

    Its receiver reads the metadata by attribute and admits ``types.SimpleNamespace``, so neither side needs the
    other's classes.
    """
    metadata = [
        SimpleNamespace(
            name=slot.spec.name,
            shape=torch.Size(slot.spec.shape),
            dtype=slot.spec.dtype,
            start_idx=slot.start,
            end_idx=slot.end,
            numel=slot.spec.nbytes,
        )
        for slot in layout.tensors
    ]
    return _pickled({"flattened_tensor": flat[: layout.nbytes], "metadata": metadata}, flat.is_cuda)


def slices_handle(
    layout: BucketLayout, matrices: Mapping[str, tuple[int, int]], flat: torch.Tensor, receipt: int
) -> str:
    """What :mod:`mua.compat.sglang_shards` takes, good for one receiver, whose receipt goes to byte ``receipt``."""
    slots = []
    for slot in layout.tensors:
        rows, cols = slot.spec.shape
        slots.append(
            (slot.spec.name, slot.spec.row, rows, cols, str(slot.spec.dtype).removeprefix("torch."), slot.start)
        )
    whole = {slot.spec.name: list(matrices[slot.spec.name]) for slot in layout.tensors}
    return _pickled([(table(slots, whole, receipt), flat)], flat.is_cuda)


def _pickled(value: object, cuda: bool) -> str:
    if cuda:
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
    with _file_system_sharing():
        return pybase64.b64encode(ForkingPickler.dumps(value)).decode("ascii")


_NOT_FOR_THE_MANAGER = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a run to leave. torch's manager ends by itself when the last process that shares is gone."""


@contextlib.contextmanager
def _file_system_sharing() -> Iterator[None]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    # A process starts with the blocked signals of the thread that starts it; other threads go on hearing them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_MANAGER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        torch.multiprocessing.set_sharing_strategy(before)
