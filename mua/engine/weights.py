"""Weights on their way into an engine: flattened buckets, their payloads, and which engine tensor each one feeds.

Nothing of SGLang is imported here. Its receiver reads a bucket's metadata by attribute and admits
``types.SimpleNamespace``, so the trainer needs neither its classes nor, on CPU, the shim.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pybase64
import torch
import torch.multiprocessing

from megatron_bridge.plan import TensorSpec
from megatron_bridge.reshard import ALIGNMENT, BucketLayout, lay_out


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one weight update moved and how long it took."""

    bytes: int
    """Payload of all tensors, padding excluded, once (not per engine)."""
    tensors: int
    buckets: int
    seconds: float
    """From the call to the return."""
    pause_seconds: float
    """While no engine generated: from the closed gate to the open one."""
    version: int = 0
    """Policy version that the engines have now."""
    moved: int = 0
    """Bytes that went from one process to another through a process group. Handles of shared memory move nothing."""
    needed: int = 0
    """The least that any plan has to move: of each feeder all bytes less those of its own shards and, where engines
    are reached by broadcast, all bytes once for each engine."""
    assemble_seconds: float = 0.0
    """Sum over the buckets of the time to put one together, other ranks' messages included."""
    load_seconds: float = 0.0
    """Sum over the buckets of the time from the first request to the last engine's answer."""
    overlap_seconds: float = 0.0
    """While one bucket was put together and another was loaded."""


class Bucket:
    """Some named tensors in one flat uint8 buffer ``[layout.nbytes]``, which may be larger than what is in it."""

    def __init__(self, layout: BucketLayout, flat: torch.Tensor) -> None:
        self.layout = layout
        self.flat = flat
        self.payload_bytes = layout.payload_bytes

    @property
    def names(self) -> list[str]:
        return [slot.spec.name for slot in self.layout.slots]

    def payload(self) -> str:
        """A fresh serialised handle of the buffer. Handles are good for one receiver: take one per rank."""
        if self.flat.is_cuda:
            _send_device_uuids()
        metadata = [
            SimpleNamespace(
                name=slot.spec.name,
                shape=torch.Size(slot.spec.shape),
                dtype=slot.spec.dtype,
                start_idx=slot.start,
                end_idx=slot.end,
                numel=slot.spec.nbytes,
            )
            for slot in self.layout.slots
        ]
        with _file_system_sharing():
            pickled = ForkingPickler.dumps({"flattened_tensor": self.flat, "metadata": metadata})
        return pybase64.b64encode(pickled).decode("ascii")


def buckets(tensors: Iterable[tuple[str, torch.Tensor]], limit: int, *, alignment: int = ALIGNMENT) -> Iterator[Bucket]:
    """Group a lazy stream into buckets of at most ``limit`` bytes; a larger tensor gets a bucket of its own."""
    pending: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        padded = -(-max(1, tensor.nbytes) // alignment) * alignment
        fits = size + padded <= limit and (not pending or next(iter(pending.values())).device == tensor.device)
        if pending and not fits:
            yield _gathered(pending, alignment)
            size = 0
        pending[name] = tensor.detach()
        size += padded
    if pending:
        yield _gathered(pending, alignment)


def _gathered(tensors: dict[str, torch.Tensor], alignment: int) -> Bucket:
    """One bucket of ``tensors``, which is emptied on the way, to free each tensor once it is copied."""
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    (layout,) = lay_out(specs, sum(spec.nbytes + alignment for spec in specs), alignment=alignment)
    flat = shared_buffer(layout.nbytes, next(iter(tensors.values())).device)
    for slot in layout.slots:
        slot.view(flat).copy_(tensors.pop(slot.spec.name))
    return Bucket(layout, flat)


def shared_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """A uint8 buffer ``[nbytes]`` that a handle can be made of: shared memory on CPU, any memory on a GPU."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    with _file_system_sharing():  # in shared memory from the start: share_memory_() would copy
        storage = torch.UntypedStorage._new_shared(nbytes, device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage)


class Buffers:
    """Two buffers taken in turn, so that one is filled while engines read the other.

    On CPU the two are used again, because fresh shared memory costs more than copying into it; engines have read a
    bucket when they answer. On a GPU an answer only says that the copies were enqueued: every bucket gets fresh memory,
    and torch keeps what a receiver still has open.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        self._nbytes = nbytes
        self._pair: list[torch.Tensor] = []
        self._turn = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The buffer taken before the last one, at least ``nbytes`` long."""
        self._turn = 1 - self._turn
        if len(self._pair) < 2:
            self._pair.append(shared_buffer(max(nbytes, self._nbytes), self._device))
            self._turn = len(self._pair) - 1
        elif self._device.type != "cpu":
            self._pair[self._turn] = shared_buffer(nbytes, self._device)
        return self._pair[self._turn]

    def clear(self) -> None:
        """Give the memory back."""
        self._pair.clear()


@contextlib.contextmanager
def _file_system_sharing() -> Iterator[None]:
    """Share CPU memory by name: handles passed as descriptors work only between relatives of one process."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def _send_device_uuids() -> None:
    """CUDA IPC handles name the device by index, which differs between processes; SGLang's own patch sends UUIDs."""
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()


_FUSED = (
    (re.compile(r"\.(q_proj|k_proj|v_proj)\."), ".qkv_proj."),
    (re.compile(r"\.experts\.\d+\.(gate_proj|up_proj)\.weight$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.\d+\.down_proj\.weight$"), ".experts.w2_weight"),
    (re.compile(r"\.(gate_proj|up_proj)\."), ".gate_up_proj."),
)


_ONE_CALL = re.compile(r"\.(q_a_proj|kv_a_proj_with_mqa)\.")


def loaded_together(name: str) -> str:
    """A key that tensors share which SGLang fuses within one call of its loader, and would lose apart.

    Those are the two down projections of multi-head latent attention; of the others it takes one at a time.
    """
    return _ONE_CALL.sub(".fused_qkv_a_proj_with_mqa.", name)


def engine_name(name: str) -> str:
    """The engine's parameter that holds the Hugging Face tensor ``name``: SGLang fuses qkv, gate/up and experts."""
    for pattern, replacement in _FUSED:
        fused, found = pattern.subn(replacement, name)
        if found:
            return fused
    return name
