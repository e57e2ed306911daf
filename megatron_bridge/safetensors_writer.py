"""Writing safetensors files as the tensors become available: in any order, by several processes, after an interruption.

Since every size follows from the shapes, each tensor's file and offset are known before one value is. A writer needs
no tensor in whole: a :class:`TensorSink` takes its bytes as they come and sums them up on the way. The library's
``save_file`` wants all tensors of a file at once: four times the CPU time, a file in memory (docs/benchmarks/cpu.md).
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import DTYPES, INDEX, SINGLE
from mua.utils.checksums import ALGORITHM, HashingStream, Sidecar, digest_of, write_all
from mua.utils.errors import BridgeError

_DEVICE_STEP_BYTES = 8 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes go."""

    file: str
    offset: int
    spec: TensorSpec


def header_of(specs: Sequence[TensorSpec]) -> tuple[bytes, list[int]]:
    """The first bytes of a file of these tensors, in their order, and where in the file each begins."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends = list(itertools.accumulate((spec.nbytes for spec in specs), initial=0))
    for spec, (start, end) in zip(specs, itertools.pairwise(ends), strict=True):
        described = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [start, end]}
        header[spec.name] = described
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    first = struct.pack("<Q", len(encoded)) + encoded
    return first, [len(first) + start for start in ends[:-1]]


class SafetensorsWriter:
    """Writes a list of tensors into ``folder``, each at its own place: alike on every process given the same list.

    Files hold at most ``max_shard_bytes`` of data (or one tensor, if it alone is larger), in the order of ``specs``.

    Args:
        create: make the files (one process does, before the others open them); what a file of the same layout
            already holds stays.
        only: the tensors this process will write; None: all.
        sidecar: records tensors as they are completed. Those it already records are read again and, where the bytes
            are as recorded, count as written (:meth:`has`).
        checksums: sum up the bytes that are written.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        max_shard_bytes: int,
        *,
        create: bool = True,
        only: Collection[str] | None = None,
        sidecar: Sidecar | None = None,
        checksums: bool = True,
    ) -> None:
        self._hashing = checksums
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        """Bytes of each file."""
        self._places: dict[str, TensorPlace] = {}
        shards, used = [list[TensorSpec]()], 0
        for spec in specs:
            if shards[-1] and used + spec.nbytes > max_shard_bytes:
                shards.append([])
                used = 0
            shards[-1].append(spec)
            used += spec.nbytes
        for number, shard in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._headers[name], offsets = header_of(shard)
            self._sizes[name] = len(self._headers[name]) + sum(spec.nbytes for spec in shard)
            for spec, offset in zip(shard, offsets, strict=True):
                self._places[spec.name] = TensorPlace(name, offset, spec)
        self.digests: dict[str, str] = {}
        """Checksums of the tensors written so far."""
        self._sidecar = sidecar
        self._missing = dict.fromkeys(self._places if only is None else only)
        self._descriptors: dict[str, int] = {}
        try:
            for file in self._sizes:
                self._open(folder / file, create)
            if create and len(shards) > 1:
                total = sum(spec.nbytes for spec in specs)
                weight_map = {name: place.file for name, place in self._places.items()}
                index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
                (folder / INDEX).write_text(index + "\n", encoding="utf-8")
            elif create:
                (folder / INDEX).unlink(missing_ok=True)
            for name, entry in (sidecar.entries if sidecar else {}).items():
                place, digest = self._places.get(name), entry[ALGORITHM]
                if place and digest_of(self._descriptors[place.file], place.offset, place.spec.nbytes) == digest:
                    self._missing.pop(name, None)
                    self.digests[name] = digest
        except BaseException:
            self.close()
            raise

    def header_sizes(self) -> dict[str, int]:
        """Bytes before the first tensor, by file."""
        return {name: len(header) for name, header in self._headers.items()}

    def has(self, name: str) -> bool:
        """Whether the tensor is in its place already."""
        return name in self.digests

    def sink(self, name: str) -> TensorSink:
        """Begin to write one tensor, whose bytes follow in order; each comes once."""
        if name not in self._missing:
            raise BridgeError(f"{name} was not announced to the writer, or came twice")
        place = self._places[name]
        return TensorSink(self._descriptors[place.file], place, self._hashing)

    def complete(self, sink: TensorSink) -> None:
        """Count the tensor of ``sink`` as written."""
        name, digest = sink.place.spec.name, sink.digest()
        del self._missing[name]
        if digest:
            self.digests[name] = digest
            if self._sidecar is not None:
                self._sidecar.add(name, digest)

    def finish(self, *, sync: bool = True) -> None:
        """Flush to the disk (unless ``sync`` is false) and close; a tensor that never came is an error."""
        if self._missing:
            raise BridgeError(f"{len(self._missing)} tensors were never written, first {next(iter(self._missing))}")
        for descriptor in self._descriptors.values() if sync else ():
            os.fsync(descriptor)
        self.close()

    def close(self) -> None:
        """Close the files as they are."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _open(self, path: Path, create: bool) -> None:
        header, size = self._headers[path.name], self._sizes[path.name]
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
        self._descriptors[path.name] = descriptor
        if os.pread(descriptor, len(header), 0) == header and os.fstat(descriptor).st_size == size:
            return
        if not create:
            raise BridgeError(f"{path} is not what the first rank made; do all ranks see the same folder?")
        if os.fstat(descriptor).st_size:  # ext4 writes a file out at its close if it was ever truncated to nothing
            os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)
        write_all(descriptor, memoryview(header), 0)


class TensorSink:
    """Takes the bytes of one tensor in order and puts them into their place."""

    def __init__(self, descriptor: int, place: TensorPlace, hashing: bool) -> None:
        self.place = place
        self._stream = HashingStream(descriptor, place.offset, hashing=hashing)

    def write(self, tensor: Tensor) -> None:
        """Append ``tensor``, of the announced dtype; on another device or not contiguous, it goes through a buffer."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            self._stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
        for part in rows.split(max(1, _DEVICE_STEP_BYTES // max(1, rows.shape[1] * rows.itemsize))):
            self._stream.write(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def digest(self) -> str:
        """Checksum of the whole tensor, all of whose bytes must have come; nothing without checksums."""
        spec, written = self.place.spec, self._stream.position - self.place.offset
        if written != spec.nbytes:
            raise BridgeError(f"{spec.name}: {written} bytes came, announced were {spec.nbytes}")
        return self._stream.hexdigest()
