"""Reading rows and columns out of safetensors files.

Format: 8 bytes little-endian length, a JSON header of ``{name: {dtype, shape, data_offsets}}``, then the data.
The writer is in :mod:`megatron_bridge.safetensors_writer`. What a folder from elsewhere says is checked before it is
believed: tensors that overlap, leave holes or reach beyond the file, files outside the folder, what is no regular file.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from megatron_bridge.plain_files import BridgeError, is_name, label, open_regular, parse_json, read_json_file, shown

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_BUFFER_BYTES = 16 << 20
_SKIP_BYTES = 16 << 10
"""A call of the operating system costs as much as reading about this much beside what is wanted."""
_MAX_HEADER_BYTES = 100 << 20
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
    """

    def __init__(self, folder: Path, *, finite: bool = True) -> None:
        self.folder = folder
        self.data_starts: dict[str, int] = {}
        """Bytes before the first tensor, by file."""
        self._finite = finite
        self._files: dict[Path, int] = {}
        self._entries: dict[str, Entry] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        try:
            for path in _weight_files(folder):
                self._open(path)
            _check_index(folder, self._entries)
            if not self._entries:
                raise BridgeError(f"{folder} holds no tensor")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._copy(name, row, col, target)
        if self._finite and target.numel() and not all(map(math.isfinite, torch.aminmax(target))):
            raise BridgeError(
                f"{self._entries[name].path}: {name} has values that are no finite numbers; get the file again"
            )

    def _copy(self, name: str, row: int, col: int, target: Tensor) -> None:
        entry = self._entries[name]
        width = torch.Size(entry.shape[1:]).numel()
        if _is_plain_memory(target, entry.dtype) and target.shape[1] == width:
            self._read_bytes(entry, row * entry.row_bytes, target)
            return
        skipped = entry.row_bytes - target.shape[1] * entry.dtype.itemsize
        if _is_plain_memory(target, entry.dtype) and skipped >= _SKIP_BYTES:
            for number in range(target.shape[0]):
                offset = (row + number) * entry.row_bytes + col * entry.dtype.itemsize
                self._read_bytes(entry, offset, target[number])
            return
        step = max(1, _BUFFER_BYTES // entry.row_bytes)
        for start in range(0, target.shape[0], step):
            part = target[start : start + step]
            rows = self._rows(entry, row + start, part.shape[0], width)
            part.copy_(rows[:, col : col + part.shape[1]])

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same shape, dtype and bytes."""
        a, b = self._entries[first], self._entries[second]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        width, step = torch.Size(a.shape[1:]).numel(), max(1, _BUFFER_BYTES // max(1, a.row_bytes))
        for row in range(0, a.shape[0], step):
            count = min(step, a.shape[0] - row)
            left = self._rows(a, row, count, width).clone()
            if not torch.equal(left, self._rows(b, row, count, width)):
                return False
        return True

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
        try:
            descriptor = self._files[path] = open_regular(path)
            entries, self.data_starts[path.name] = _read_header(path, descriptor)
        except OSError as error:
            raise BridgeError(f"{path} cannot be opened: {error.strerror}") from error
        for name, entry in entries.items():
            if name in self._entries:
                raise BridgeError(f"{name} is in both {self._entries[name].path} and {path}; remove one file")
            self._entries[name] = entry


def _is_plain_memory(target: Tensor, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()


def _weight_files(folder: Path) -> list[Path]:
    """The files named by the index, or the only safetensors file."""
    index = folder / INDEX
    if os.path.lexists(index):
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    if not os.path.lexists(folder / SINGLE):
        raise BridgeError(f"{folder} has neither {SINGLE} nor {INDEX}; the weights must be safetensors")
    return [folder / SINGLE]


def _weight_map(index: Path) -> dict[str, str]:
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
        if (
            not is_name(name)
            or not is_name(file)
            or os.path.basename(file) != file
            or not file.endswith(".safetensors")
        ):
            raise BridgeError(
                f"{index} says {shown(name)} is in {shown(file)}, which is no safetensors file of this folder"
            )
    return files


def _check_index(folder: Path, entries: dict[str, Entry]) -> None:
    index = folder / INDEX
    if not os.path.lexists(index):
        return
    for name, file in _weight_map(index).items():
        if name not in entries or entries[name].path.name != file:
            raise BridgeError(f"{index} says {name} is in {file}, but it is not there")


def _read_header(path: Path, descriptor: int) -> tuple[dict[str, Entry], int]:
    """The tensors of a file, and the bytes before the first."""
    size = os.fstat(descriptor).st_size
    prefix = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise BridgeError(f"{path} is no safetensors file, or is cut short; copy it again")
    try:
        header = parse_json(os.pread(descriptor, length, 8))
        if not isinstance(header, dict):
            raise ValueError("it is no JSON object")
        _check_metadata(header.pop("__metadata__", {}))
        entries = {name: _entry(path, name, info, 8 + length) for name, info in header.items()}
    except ValueError as error:
        raise BridgeError(f"{path} has a damaged safetensors header ({error}); copy it again") from error
    _check_places(path, entries, 8 + length, size)
    return entries, 8 + length


def _check_metadata(metadata: Any) -> None:
    """It is not used, but the format says what it is, and other readers refuse anything else."""
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its __metadata__ is no object of texts")
    "".join((*metadata, *metadata.values())).encode()  # half of a surrogate pair is an error


def _check_places(path: Path, entries: dict[str, Entry], data_start: int, file_size: int) -> None:
    """As the format has it, tensors lie one after the other from the header to the end of the file."""
    end = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset + entry.nbytes > file_size:
            last = entry.offset + entry.nbytes
            raise BridgeError(f"{path} is cut short: {name} ends at byte {last} of {file_size}; copy it again")
        if entry.offset != end:
            fault = "overlaps the tensor before it" if entry.offset < end else "leaves a hole before it"
            raise BridgeError(f"{path}: {name} {fault}, at byte {entry.offset} instead of {end}; copy the file again")
        end += entry.nbytes
    if end != file_size:
        raise BridgeError(f"{path} has {file_size - end} bytes behind its last tensor; copy it again")


def _entry(path: Path, name: str, info: Any, data_start: int) -> Entry:
    if not is_name(name):
        raise ValueError(f"{shown(name)} is no name of a tensor")
    if not isinstance(info, dict):
        raise ValueError(f"{name} is described by no JSON object")
    fields: dict[str, Any] = {"shape": None, "data_offsets": None, "dtype": None, **info}
    shape, offsets, kind = fields["shape"], fields["data_offsets"], fields["dtype"]
    if not _are_counts(shape) or len(shape) > _MAX_DIMS:
        raise ValueError(f"{name} has a shape that no tensor has")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name} has data_offsets that are no two places")
    dtype = DTYPES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise BridgeError(f"{path}: {name} has dtype {label(kind)}; supported: {', '.join(DTYPES)}")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise BridgeError(f"{path}: {name} has offsets that do not fit its shape; copy the file again")
    return Entry(path, data_start + offsets[0], tuple(shape), dtype)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 48 for value in values)
