"""The trainer's memory on its device: what torch's allocator holds of it, and how it is given back.

What torch frees it keeps cached. An engine is another process: it can use what is cached only after
:func:`give_back`. Everything that mua asks of ``torch.cuda`` about memory is asked here, of :data:`torch_cuda`, which
is None on a host without CUDA; a test puts a ledger there (``tests/memory_ledger.py``).

While engines roll out, weights and optimizer wait in pinned host memory (:func:`offload`). A tensor keeps its identity
and its views (Megatron's parameters are views of flat buffers, the optimizer's main weights may be views of the same):
what goes is the storage behind it, which is resized to nothing and later filled again. Gradients are not kept; every
step begins by zeroing them. On CPU the same code runs with plain memory instead of pinned, which proves that nothing is
lost and frees nothing. An H200 had all but 0.1 of 19.6 GiB back (docs/benchmarks/gpu.md).
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mua.megatron import parallel

if TYPE_CHECKING:
    from mua.megatron.network import Network

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


class Offloaded:
    """What was given back; :meth:`restore` takes it again.

    Args:
        kept: tensors whose contents are kept in host memory.
        scratch: tensors that are zero after :meth:`restore`.
    """

    def __init__(self, kept: Iterable[Tensor], scratch: Iterable[Tensor]) -> None:
        kept_storages = {storage.data_ptr(): storage for storage in _storages(kept)}
        self._scratch = [
            (storage, storage.nbytes()) for storage in _storages(scratch) if storage.data_ptr() not in kept_storages
        ]
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Each with its contents, uint8 ``[n]`` in host memory."""
        for storage in kept_storages.values():
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            self._kept.append((storage, copy.copy_(_bytes_of(storage))))
        self.nbytes = sum(nbytes for _, nbytes in self._scratch) + sum(copy.nbytes for _, copy in self._kept)
        """Bytes of the device that are free now."""
        for storage, _ in (*self._scratch, *self._kept):
            storage.resize_(0)
        give_back()

    def restore(self) -> None:
        """Take the memory again and fill it."""
        for storage, nbytes in self._scratch:
            storage.resize_(nbytes)
            _bytes_of(storage).zero_()
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes)
            _bytes_of(storage).copy_(copy, non_blocking=True)
        synchronize()  # the host copies are about to go
        self._kept, self._scratch = [], []


def offload(networks: Iterable[Network], reference: list[Tensor] | None) -> Offloaded:
    """Give back the memory of all weights, gradients and optimizer state of this rank.

    Nothing of the networks may be used before :meth:`Offloaded.restore`.
    """
    kept, scratch = list(reference or []), []
    for network in networks:
        kept += [parameter.data for parameter in network.parameters()]
        state: list[Tensor] = []  # main weights and moments of every part of the optimizer
        for part in network.optimizer.megatron.chained_optimizers:
            if (inner := part.optimizer) is not None:  # else this rank has nothing to optimize there
                for each in (inner, *getattr(inner, "sub_optimizers", ())):  # where the CPU updates a share of them
                    state += [parameter.data for group in each.param_groups for parameter in group["params"]]
                    state += [value for of in each.state.values() for value in of.values() if isinstance(value, Tensor)]
        device = parallel.device().type
        kept += [tensor for tensor in state if tensor.ndim > 0 and tensor.device.type == device]  # step counters stay
        for chunk in network.wrapped:
            scratch += [buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return Offloaded(kept, scratch)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Every storage once. Left out are empty ones and, on CPU, those that numpy once looked into: torch never lets
    them go (weights that were read from a file and that no buffer of the distributed optimizer replaced)."""
    found = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [storage for storage in found.values() if storage.nbytes() > 0 and storage.resizable()]


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
