"""Reading rows and columns out of safetensors files.

Format: 8 bytes little-endian length, a JSON header of ``{name: {dtype, shape, data_offsets}}``, then the data.
The writer is in :mod:`megatron_bridge.safetensors_writer`. What a folder from elsewhere says is checked before it is
believed: by the safetensors library, tensors that overlap, leave holes or reach beyond the file; here, files outside
the folder and what is no regular file. The library's own slices are copies of mapped memory: they take about the CPU
time of the reads below and keep the whole file resident (docs/benchmarks/cpu.md).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mua.utils.checksums import digest_of
from mua.utils.errors import BridgeError
from mua.utils.strict_json import is_name, label, open_regular, read_json, read_json_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BUFFER_BYTES = 16 << 20
_SKIP_BYTES = 16 << 10
"""A call of the operating system costs as much as reading about this much beside what is wanted."""
_MAX_DIMS = 16
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
    """The tensors of a model folder. Headers are parsed once and files stay open until ``close``.

    Args:
        finite: raise where values that are read are no finite numbers.
        single: the one file to read, which may be empty, instead of those of the folder's index.
    """

    def __init__(self, folder: Path, *, finite: bool = True, single: str | None = None) -> None:
        self.folder = folder
        self.data_starts: dict[str, int] = {}
        """Bytes before the first tensor, by file."""
        self._finite = finite
        self._files: dict[Path, int] = {}
        self._entries: dict[str, Entry] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        index = folder / INDEX
        try:
            weight_map = _weight_map(index) if single is None and os.path.lexists(index) else {}
            if single is None and not weight_map and not os.path.lexists(folder / SINGLE):
                raise BridgeError(f"{folder} has neither {SINGLE} nor {INDEX}; the weights must be safetensors")
            for name in sorted(set(weight_map.values())) or [single or SINGLE]:
                self._open(folder / name)
            for name, file in weight_map.items():
                if name not in self._entries or self._entries[name].path.name != file:
                    raise BridgeError(f"{index} says {name} is in {file}, but it is not there")
            if not self._entries and single is None:
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
        """The open file that holds the tensor."""
        return self._files[self._entries[name].path]

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
        digests = (digest_of(self._files[one.path], one.offset, one.nbytes) for one in (a, b))
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
            count = os.preadv(self._files[entry.path], [view], position)
            if count == 0:
                raise BridgeError(f"{entry.path} ends at byte {position}, inside a tensor; copy the file again")
            view, position = view[count:], position + count

    def _open(self, path: Path) -> None:
        """Open a file and believe its header, once the library has found that tensors fill it without a hole."""
        try:
            descriptor = self._files[path] = open_regular(path)
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
