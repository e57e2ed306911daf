"""Reading rows and columns out of safetensors files, and writing them as the tensors become available.

Format: 8 bytes little-endian length, a JSON header of ``{name: {dtype, shape, data_offsets}}``, then the data.

Tensors are written in any order, by several processes, after an interruption. Since every size follows from the shapes,
each tensor's file and offset are known before one value is. A writer needs no tensor in whole: a :class:`TensorSink`
takes its bytes as they come and sums them up on the way. The library's ``save_file`` wants all tensors of a file at
once: four times the CPU time, a file in memory (docs/benchmarks/cpu.md).

What a folder from elsewhere says is checked before it is
believed: by the safetensors library, tensors that overlap, leave holes or reach beyond the file; here, files outside
the folder and what is no regular file. The library's own slices are copies of mapped memory: they take about the CPU
time of the reads below and keep the whole file resident (docs/benchmarks/cpu.md).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_bridge.plan import TensorSpec
from mua.utils.checksums import ALGORITHM, HashingStream, Sidecar, digest_of, write_all
from mua.utils.errors import BridgeError
from mua.utils.strict_json import is_name, label, open_regular, read_json, read_json_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BUFFER_BYTES = 16 << 20
_SKIP_BYTES = 16 << 10
"""A call of the operating system costs as much as reading about this much beside what is wanted."""
_MAX_DIMS = 16
_MOST_OPEN = 32
"""Files of a folder that are open at a time: a checkpoint has one for every rank that saved it."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: file, absolute byte offset, shape and dtype."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize


class SafetensorsFolder:
    """The tensors of a model folder. Headers are parsed once; the files read last stay open until ``close``.

    Args:
        finite: raise where values that are read are no finite numbers.
        files: those to read, which may be empty, instead of those of the folder's index.
    """

    def __init__(self, folder: Path, *, finite: bool = True, files: Sequence[str] | None = None) -> None:
        self.folder = folder
        self.data_starts: dict[str, int] = {}
        """Bytes before the first tensor, by file."""
        self._finite = finite
        self._files: dict[Path, int] = {}
        self._entries: dict[str, Entry] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        index = folder / INDEX
        try:
            weight_map = _weight_map(index) if files is None and os.path.lexists(index) else {}
            if files is None and not weight_map and not os.path.lexists(folder / SINGLE):
                raise BridgeError(f"{folder} has neither {SINGLE} nor {INDEX}; the weights must be safetensors")
            for name in (sorted(set(weight_map.values())) or [SINGLE]) if files is None else files:
                self._read_header(folder / name)
            for name, file in weight_map.items():
                if name not in self._entries or self._entries[name].path.name != file:
                    raise BridgeError(f"{index} says {name} is in {file}, but it is not there")
            if not self._entries and files is None:
                raise BridgeError(f"{folder} holds no tensor")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @property
    def names(self) -> Iterable[str]:
        """Names of all tensors."""
        return self._entries.keys()

    def entry(self, name: str) -> Entry:
        """Where the tensor lies."""
        return self._entries[name]

    def descriptor(self, name: str) -> int:
        """The open file that holds the tensor, until another one is asked for."""
        return self._opened(self._entries[name].path)

    def _opened(self, path: Path) -> int:
        """A file, which is opened anew if :data:`_MOST_OPEN` others were read since."""
        if (descriptor := self._files.pop(path, None)) is None:
            while len(self._files) >= _MOST_OPEN:
                os.close(self._files.pop(next(iter(self._files))))
            descriptor = open_regular(path)
        self._files[path] = descriptor
        return descriptor

    def read(self, name: str, row: int, col: int, target: Tensor) -> None:
        """Copy rows ``row...`` and columns ``col...`` of tensor ``name`` into ``target``, ``[rows, cols]``.

        Whole rows of the target's own dtype are read straight into its memory, and so are parts of long rows, row by
        row. Anything else goes through a buffer of at most 16 MiB (or one row), and is cast.

        Raises:
            BridgeError: the file is shorter than its header says, or a value is no finite number.
        """
        entry = self._entries[name]
        width = torch.Size(entry.shape[1:]).numel()
        skipped = entry.row_bytes - target.shape[1] * entry.dtype.itemsize
        straight = target.device.type == "cpu" and target.dtype == entry.dtype and target.is_contiguous()
        if straight and target.shape[1] == width:
            self._read_bytes(entry, row * entry.row_bytes, target)
        elif straight and skipped >= _SKIP_BYTES:
            for number in range(target.shape[0]):
                offset = (row + number) * entry.row_bytes + col * entry.dtype.itemsize
                self._read_bytes(entry, offset, target[number])
        else:
            step = max(1, _BUFFER_BYTES // entry.row_bytes)
            for start in range(0, target.shape[0], step):
                part = target[start : start + step]
                rows = self._rows(entry, row + start, part.shape[0], width)
                part.copy_(rows[:, col : col + part.shape[1]])
        if self._finite and target.numel() and not all(map(math.isfinite, torch.aminmax(target))):
            raise BridgeError(f"{entry.path}: {name} has values that are no finite numbers; get the file again")

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape, dtype and bytes."""
        a, b = self._entries[first], self._entries[second]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        digests = (digest_of(self._opened(one.path), one.offset, one.nbytes) for one in (a, b))
        return next(digests) == next(digests)

    def _rows(self, entry: Entry, row: int, count: int, width: int) -> Tensor:
        """``count`` whole rows in the shared buffer, valid until the next call."""
        size = count * entry.row_bytes
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        raw = self._buffer[:size]
        self._read_bytes(entry, row * entry.row_bytes, raw)
        return raw.view(entry.dtype).view(count, width)

    def _read_bytes(self, entry: Entry, offset: int, target: Tensor) -> None:
        view = target.reshape(-1).view(torch.uint8).numpy().data
        position = entry.offset + offset
        while len(view):
            count = os.preadv(self._opened(entry.path), [view], position)
            if count == 0:
                raise BridgeError(f"{entry.path} ends at byte {position}, inside a tensor; copy the file again")
            view, position = view[count:], position + count

    def _read_header(self, path: Path) -> None:
        """Open a file and believe its header, once the library has found that tensors fill it without a hole."""
        try:
            descriptor = self._opened(path)
            with safe_open(path, "pt"):
                start = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
            header = read_json(os.pread(descriptor, start - 8, 8))
            header.pop("__metadata__", None)
            for name, info in header.items():
                if not is_name(name) or len(info["shape"]) > _MAX_DIMS or any(n >= 1 << 48 for n in info["shape"]):
                    raise ValueError(f"{label(name)} has a name or shape that no tensor has")
        except OSError as error:
            raise BridgeError(f"{path} cannot be opened: {error.strerror}") from error
        except (SafetensorError, ValueError) as error:
            raise BridgeError(
                f"{path} is no safetensors file, damaged or cut short ({label(str(error))}); copy it again"
            ) from error
        self.data_starts[path.name] = start
        for name, info in header.items():
            if name in self._entries:
                raise BridgeError(f"{name} is in both {self._entries[name].path} and {path}; remove one file")
            if info["dtype"] not in DTYPES:
                raise BridgeError(f"{path}: {name} has dtype {label(info['dtype'])}; supported: {', '.join(DTYPES)}")
            offset = start + info["data_offsets"][0]
            self._entries[name] = Entry(path, offset, tuple(info["shape"]), DTYPES[info["dtype"]])


def _weight_map(index: Path) -> dict[str, str]:
    """Which file of the folder holds each tensor."""
    try:
        content = read_json_file(index)
    except OSError as error:
        raise BridgeError(f"{index} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BridgeError(f"{index} is not a safetensors index: {error}") from error
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise BridgeError(f"{index} is not a safetensors index: it has no weight_map")
    for name, file in files.items():
        inside = is_name(file) and os.path.basename(file) == file and file.endswith(".safetensors")
        if not is_name(name) or not inside:
            raise BridgeError(
                f"{index} says {label(name)} is in {label(file)}, which is no safetensors file of this folder"
            )
    return files


# ---- writing

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
    ) -> None:
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
        return TensorSink(self._descriptors[place.file], place)

    def complete(self, sink: TensorSink) -> None:
        """Count the tensor of ``sink`` as written."""
        name, digest = sink.place.spec.name, sink.digest()
        del self._missing[name]
        self.digests[name] = digest
        if self._sidecar is not None:
            self._sidecar.add(name, digest)

    def finish(self) -> None:
        """Flush to the disk and close; a tensor that never came is an error."""
        if self._missing:
            raise BridgeError(f"{len(self._missing)} tensors were never written, first {next(iter(self._missing))}")
        for descriptor in self._descriptors.values():
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

    def __init__(self, descriptor: int, place: TensorPlace) -> None:
        self.place = place
        self._stream = HashingStream(descriptor, place.offset)

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
        """Checksum of the whole tensor, all of whose bytes must have come."""
        spec, written = self.place.spec, self._stream.position - self.place.offset
        if written != spec.nbytes:
            raise BridgeError(f"{spec.name}: {written} bytes came, announced were {spec.nbytes}")
        return self._stream.hexdigest()
