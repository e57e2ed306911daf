"""Writing safetensors files as the tensors become available: in any order, by several processes, after an interruption.

Since every size follows from the shapes, each tensor's file and offset are known before one value is. A writer needs
no tensor in whole: a :class:`TensorSink` takes its bytes as they come and sums them up on the way. The library's
``save_file`` wants all tensors of a file at once: six times the CPU time and a file in memory (docs/benchmarks/cpu.md).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.checksums import Hasher, Sidecar, digest_of, write_all
from megatron_bridge.plain_files import BridgeError
from megatron_bridge.plan import TensorSpec
from megatron_bridge.safetensors_io import DTYPES, INDEX, SINGLE

_STEP_BYTES = 1 << 20
"""What is hashed and then written at once, so that the second finds it in the processor's cache."""
_DEVICE_STEP_BYTES = 8 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor's bytes go."""

    file: str
    offset: int
    spec: TensorSpec


class SafetensorsLayout:
    """Files, headers and offsets of a list of tensors: alike on every process that is given the same list.

    Files hold at most ``max_shard_bytes`` of data (or one tensor, if it alone is larger), in the order of ``specs``.
    """

    def __init__(self, specs: Sequence[TensorSpec], max_shard_bytes: int) -> None:
        shards = _shard_specs(specs, max_shard_bytes)
        self.files = {_file_name(number, len(shards)): shard for number, shard in enumerate(shards)}
        self.headers = {name: _encode_header(shard) for name, shard in self.files.items()}
        self.places: dict[str, TensorPlace] = {}
        for name, shard in self.files.items():
            offset = len(self.headers[name])
            for spec in shard:
                self.places[spec.name] = TensorPlace(name, offset, spec)
                offset += spec.nbytes

    def size(self, file: str) -> int:
        """Bytes of one file."""
        return len(self.headers[file]) + sum(spec.nbytes for spec in self.files[file])

    def header_sizes(self) -> dict[str, int]:
        """Bytes before the first tensor, by file."""
        return {name: len(header) for name, header in self.headers.items()}

    def index(self) -> bytes | None:
        """Content of the index, which only several files have."""
        if len(self.files) == 1:
            return None
        weight_map = {spec.name: name for name, specs in self.files.items() for spec in specs}
        total = sum(spec.nbytes for specs in self.files.values() for spec in specs)
        return (json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n").encode()


class SafetensorsWriter:
    """Writes tensors of one layout into ``folder``, each at its own place.

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
        self.layout = SafetensorsLayout(specs, max_shard_bytes)
        self.digests: dict[str, str] = {}
        """Checksums of the tensors written so far."""
        self._sidecar = sidecar
        self._missing = dict.fromkeys(self.layout.places if only is None else only)
        self._descriptors: dict[str, int] = {}
        try:
            for file in self.layout.files:
                self._open(folder / file, create)
            if create:
                _write_index(folder / INDEX, self.layout.index())
            for name, digest in (sidecar.recorded if sidecar else {}).items():
                self._verify(name, digest)
        except BaseException:
            self.close()
            raise

    def has(self, name: str) -> bool:
        """Whether the tensor is in its place already."""
        return name in self.digests

    def sink(self, name: str) -> TensorSink:
        """Begin to write one tensor, whose bytes follow in order; each comes once."""
        if name not in self._missing:
            raise BridgeError(f"{name} was not announced to the writer, or came twice")
        place = self.layout.places[name]
        return TensorSink(self._descriptors[place.file], place, self._hashing)

    def complete(self, sink: TensorSink) -> None:
        """Count the tensor of ``sink`` as written."""
        name, digest = sink.place.spec.name, sink.digest()
        del self._missing[name]
        if digest is not None:
            self.digests[name] = digest
        if digest is not None and self._sidecar is not None:
            self._sidecar.add(name, digest)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor in whole; it must be as announced."""
        sink = self.sink(name)
        spec = sink.place.spec
        if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise BridgeError(f"{name} came as {found}, announced as {spec.dtype} {list(spec.shape)}")
        sink.write(tensor)
        self.complete(sink)

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
        header, size = self.layout.headers[path.name], self.layout.size(path.name)
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

    def _verify(self, name: str, digest: str) -> None:
        place = self.layout.places.get(name)
        if place is not None and digest_of(self._descriptors[place.file], place.offset, place.spec.nbytes) == digest:
            self._missing.pop(name, None)
            self.digests[name] = digest


class TensorSink:
    """Takes the bytes of one tensor in order and puts them into their place."""

    def __init__(self, descriptor: int, place: TensorPlace, hashing: bool) -> None:
        self.place = place
        self._descriptor = descriptor
        self._written = 0
        self._hasher = Hasher() if hashing else None

    def write(self, tensor: Tensor) -> None:
        """Append ``tensor``, of the announced dtype; on another device or not contiguous, it goes through a buffer."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            self._append(tensor.reshape(-1).view(torch.uint8).numpy().data)
            return
        rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() else tensor.reshape(1, 1)
        step = max(1, _DEVICE_STEP_BYTES // max(1, rows.shape[1] * rows.itemsize))
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step].cpu().contiguous()
            self._append(part.reshape(-1).view(torch.uint8).numpy().data)

    def digest(self) -> str | None:
        """Checksum of the whole tensor, all of whose bytes must have come; None without checksums."""
        if self._written != self.place.spec.nbytes:
            spec = self.place.spec
            raise BridgeError(f"{spec.name}: {self._written} bytes came, announced were {spec.nbytes}")
        return None if self._hasher is None else self._hasher.hexdigest()

    def _append(self, data: memoryview) -> None:
        position = self.place.offset + self._written
        if self._hasher is None:
            write_all(self._descriptor, data, position)
            self._written += len(data)
            return
        for start in range(0, len(data), _STEP_BYTES):
            part = data[start : start + _STEP_BYTES]
            self._hasher.update(part)
            write_all(self._descriptor, part, position + start)
        self._written += len(data)


def _shard_specs(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.nbytes > max_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.nbytes
    return shards


def _file_name(number: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _encode_header(specs: Sequence[TensorSpec]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.nbytes
        header[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return struct.pack("<Q", len(encoded)) + encoded


def _write_index(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink(missing_ok=True)
        return
    path.write_bytes(content)
