"""Archives of ``torch.save``, read without torch's or Python's unpickler.

Upstream: torch 2.14.1, ``distributed/checkpoint/default_planner.py`` loads every object inside a ``*.distcp`` file with
``weights_only=False``, and megatron-core 0.19.2 adds nineteen classes to those that ``weights_only=True`` admits. Here
:mod:`mua.compat.plain_pickle` reads the same bytes, and objects are made by the functions below.
Goes when: ``tests/unit/test_checkpoint_attacks.py::test_upstream_still_unpickles_an_object`` fails.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mua.compat.plain_pickle import DTYPES, PickleError, PlainUnpickler, shape_of, size_of
from mua.utils.strict_json import is_count, label, open_regular

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_MAX_DEPTH = 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an archive that has not been read."""

    offset: int
    """Where in the file its first value is, in bytes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def span(self) -> int:
        """Elements from its first to its last, with both."""
        if not math.prod(self.shape):
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True, slots=True)
class _Storage:
    """The values that tensors of an archive share: where they begin in the file, and how many they are."""

    offset: int
    count: int
    dtype: torch.dtype


class FilePart(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset, self._length, self._position = descriptor, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        count = os.preadv(self._descriptor, [view], self._offset + self._position) if len(view) else 0
        self._position += count
        return count


class Archive:
    """What ``torch.save`` wrote: ``length`` bytes of an open file from ``offset`` on.

    Raises:
        PickleError: it is no such archive, or names what none of ours names.
    """

    def __init__(self, descriptor: int, offset: int, length: int) -> None:
        self._descriptor, self._offset = descriptor, offset
        self._records: dict[str, tuple[int, int]] = {}
        """Where in the file the bytes of each lie, and how many they are."""
        try:
            with zipfile.ZipFile(io.BufferedReader(FilePart(descriptor, offset, length), 1 << 12)) as archive:
                for entry in archive.infolist():
                    signature, *lengths = _LOCAL_HEADER.unpack(self._pread(entry.header_offset, _LOCAL_HEADER.size))
                    start = entry.header_offset + _LOCAL_HEADER.size + sum(lengths)
                    plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                    if signature != b"PK\3\4" or not plain or start + entry.file_size > length:
                        raise PickleError(f"its record {label(entry.filename)} is damaged")
                    self._records[entry.filename.partition("/")[2]] = offset + start, entry.file_size
        except PickleError:
            raise
        except Exception as error:  # zipfile tells damage by some ten kinds of errors
            raise PickleError("it is no archive of torch.save") from error
        if self._bytes("byteorder") != b"little":
            raise PickleError("it was written on a machine of the other byte order")

    def value(self) -> Any:
        """What was saved: plain values, tensors in memory of the CPU, and open ``BytesIO``."""
        value = self._unpickled(self._tensor)
        _check_value(value, _MAX_DEPTH, set())
        return value

    def tensor(self) -> StoredTensor:
        """Where the values lie of the one tensor that was saved; they lie in order and without holes."""
        stored = self._unpickled(self._stored)
        if type(stored) is not StoredTensor:
            raise PickleError("it is no tensor")
        if stored.strides != torch.empty(stored.shape, device="meta").stride() and stored.span:
            raise PickleError("it has a tensor whose memory is not contiguous")
        return stored

    def _unpickled(self, tensor: Callable[..., Any]) -> Any:
        names = {**_NAMES, ("torch._utils", "_rebuild_tensor_v2"): tensor}
        return PlainUnpickler(self._bytes("data.pkl"), names, self._storage).read_value()

    def _bytes(self, name: str) -> bytes:
        if name not in self._records:
            raise PickleError(f"it has no record {name!r}")
        start, size = self._records[name]
        return self._pread(start - self._offset, size)

    def _pread(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, self._offset + offset) if offset >= 0 else b""
        if len(data) != size:
            raise PickleError("it is cut short")
        return data

    def _storage(self, key: Any) -> _Storage:
        """What a persistent id names: ``("storage", kind, record, device, number of elements)``."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[2]) is not str:
            raise PickleError("it has a tensor without a storage")
        dtype, record, count = key[1], f"data/{key[2]}", key[4]
        if type(dtype) is not torch.dtype or record not in self._records or not is_count(count):
            raise PickleError("it has a tensor without a storage")
        start, size = self._records[record]
        if count * dtype.itemsize != size:
            raise PickleError(f"its record {label(record)} has {size} bytes for {count} elements of {dtype}")
        return _Storage(start, count, dtype)

    def _stored(self, storage: Any, first: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        """A tensor inside its storage, no two of whose elements can share memory."""
        if type(storage) is not _Storage or not is_count(first) or len(shape_of(shape)) != len(shape_of(strides)):
            raise PickleError("it has a tensor without a shape")
        stored = StoredTensor(storage.offset + first * storage.dtype.itemsize, shape, strides, storage.dtype)
        if first + stored.span > storage.count or math.prod(shape) > stored.span:
            raise PickleError("it has a tensor larger than its storage")
        return stored

    def _tensor(self, *arguments: Any) -> Tensor:
        stored = self._stored(*arguments)
        values = torch.empty(stored.span, dtype=stored.dtype)
        read_into(self._descriptor, stored.offset, values)
        return values.as_strided(stored.shape, stored.strides)


def _latin1(text: str, encoding: str) -> bytes:
    if type(text) is not str or encoding != "latin1":
        raise PickleError("it has bytes that are none")
    return text.encode("latin1")


_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda: {},
    ("_codecs", "encode"): _latin1,
    ("_io", "BytesIO"): lambda: io.BytesIO(),
    ("torch", "Size"): size_of,
    **{("torch", name): dtype for name, dtype in (_STORAGES | DTYPES).items()},
}
"""All that an archive may name, and what stands for it, beside the function that makes a tensor."""
_VALUES = frozenset({str, int, bool, float, bytes, type(None), Tensor, torch.Size, torch.dtype, io.BytesIO})


def _check_value(value: Any, depth: int, seen: set[int]) -> None:
    """Raise unless ``value`` is plain and ends; what stands in several places is looked at once."""
    if not depth:
        raise PickleError(f"it is nested deeper than {_MAX_DEPTH}")
    if type(value) in (list, tuple, dict):
        if id(value) not in seen:
            for each in value.values() if type(value) is dict else value:
                _check_value(each, depth - 1, seen)
            seen.add(id(value))
    elif type(value) not in _VALUES:
        raise PickleError("it has a name or a storage where a value should be")


def read_into(descriptor: int, offset: int, tensor: Tensor) -> None:
    """Fill a contiguous tensor in memory of the CPU from the bytes of a file.

    Raises:
        PickleError: the file ends before.
    """
    view = tensor.reshape(-1).view(torch.uint8).numpy().data
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise PickleError("it is cut short")
        view, offset = view[count:], offset + count


def read_archive(path: Path) -> Any:
    """What ``torch.save`` wrote into the file ``path``.

    Raises:
        PickleError: see :class:`Archive`.
    """
    with open(open_regular(path), "rb") as file:
        return Archive(file.fileno(), 0, os.fstat(file.fileno()).st_size).value()
