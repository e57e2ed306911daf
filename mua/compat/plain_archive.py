"""Archives of ``torch.save``, read without torch's or Python's unpickler.

Upstream: torch 2.14.1, ``distributed/checkpoint/default_planner.py`` loads every object inside a ``*.distcp`` file with
``weights_only=False``, and megatron-core 0.19.2 adds nineteen classes to those that ``weights_only=True`` admits. Here
:mod:`mua.compat.plain_pickle` reads the same bytes; :data:`NAMES` are the exact pairs of module and name that may
appear, none is imported because a file says so, and objects are made by the functions below.
Goes when: ``tests/unit/test_checkpoint_attacks.py::test_upstream_still_unpickles_an_object`` fails.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.plain_files import label
from mua.compat.plain_pickle import DTYPES, Name, PickledCall, PickleError, Stored, is_count, read_pickle, shape_of

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
NAMES = frozenset(
    {
        ("torch._utils", "_rebuild_tensor_v2"),
        ("collections", "OrderedDict"),
        ("_codecs", "encode"),
        ("_io", "BytesIO"),
        ("torch", "Size"),
        *(("torch", name) for name in _STORAGES),
        *(("torch", name) for name in DTYPES),
    }
)
"""All that an archive may name."""
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


class Window(io.RawIOBase):
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

    def tell(self) -> int:
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
        self._descriptor, self._offset, self._length = descriptor, offset, length
        try:
            with zipfile.ZipFile(io.BufferedReader(Window(descriptor, offset, length), 1 << 12)) as archive:
                self._records = {entry.filename.partition("/")[2]: self._record(entry) for entry in archive.infolist()}
        except PickleError:
            raise
        except Exception as error:  # zipfile tells damage by some ten kinds of errors
            raise PickleError("it is no archive of torch.save") from error
        if self._bytes("byteorder") != b"little":
            raise PickleError("it was written on a machine of the other byte order")
        self._content = read_pickle(self._bytes("data.pkl"), NAMES)
        self._made: dict[int, Any] = {}

    def value(self) -> Any:
        """What was saved: plain values, tensors in memory of the CPU, and open ``BytesIO``."""
        return self._plain(self._content, _MAX_DEPTH)

    def tensor(self) -> StoredTensor:
        """Where the values lie of the one tensor that was saved; they lie in order and without holes."""
        stored = self._stored(self._content)
        if stored.strides != torch.empty(stored.shape, device="meta").stride() and stored.span:
            raise PickleError("it has a tensor whose memory is not contiguous")
        return stored

    def _record(self, entry: zipfile.ZipInfo) -> tuple[int, int]:
        """Where in the file the bytes of one record lie, and how many they are."""
        header = self._pread(entry.header_offset, _LOCAL_HEADER.size)
        signature, name, extra = _LOCAL_HEADER.unpack(header)
        start = entry.header_offset + _LOCAL_HEADER.size + name + extra
        plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if signature != b"PK\3\4" or not plain or start + entry.file_size > self._length:
            raise PickleError(f"its record {label(entry.filename)} is damaged")
        return self._offset + start, entry.file_size

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

    def _plain(self, value: Any, depth: int) -> Any:
        """``value`` with every object in it made; what stands in several places is made once."""
        if not depth:
            raise PickleError(f"it is nested deeper than {_MAX_DEPTH}")
        if type(value) not in (list, tuple, dict, PickledCall, Name, Stored):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._make(value, depth - 1)
        return self._made[id(value)]

    def _make(self, value: Any, depth: int) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._plain(each, depth) for each in value)
        if type(value) is dict:
            return {self._hashable(key): self._plain(each, depth) for key, each in value.items()}
        if type(value) is Name and value.module == "torch" and value.name in DTYPES:
            return DTYPES[value.name]
        if type(value) is PickledCall:
            return self._call(value, depth)
        raise PickleError("it has a name or a storage where a value should be")

    @staticmethod
    def _hashable(key: Any) -> Any:
        if type(key) is PickledCall:
            raise PickleError("it has a key that is neither text nor number")
        return key

    def _call(self, call: PickledCall, depth: int) -> Any:
        name, arguments = call.function.name, call.arguments
        if name == "_rebuild_tensor_v2":
            return self._tensor(self._stored(call))
        if name == "OrderedDict" and not arguments and call.state is None:
            return {}
        if name == "Size" and len(arguments) == 1 and call.state is None:
            return torch.Size(shape_of(arguments[0]))
        if name == "encode" and len(arguments) == 2 and type(arguments[0]) is str and arguments[1] == "latin1":
            return _latin1(arguments[0])
        if name == "BytesIO" and not arguments and type(call.state) is tuple and call.state:
            content = self._plain(call.state[0], depth)
            if type(content) is bytes:
                return io.BytesIO(content)
        raise PickleError(f"it calls {call.function.module}.{name} with other arguments than torch.save writes")

    def _stored(self, call: Any) -> StoredTensor:
        """A tensor inside its storage, no two of whose elements can share memory."""
        if type(call) is not PickledCall or call.function.name != "_rebuild_tensor_v2" or len(call.arguments) < 4:
            raise PickleError("it is no tensor")
        storage, first, shape, strides = call.arguments[:4]
        start, count, dtype = self._storage(storage)
        if not is_count(first) or len(shape_of(shape)) != len(shape_of(strides)):
            raise PickleError("it has a tensor without a shape")
        stored = StoredTensor(start + first * dtype.itemsize, shape, strides, dtype)
        if first + stored.span > count or math.prod(shape) > stored.span:
            raise PickleError("it has a tensor larger than its storage")
        return stored

    def _storage(self, stored: Any) -> tuple[int, int, torch.dtype]:
        """Where a storage begins in the file, its number of elements and its dtype."""
        key = stored.key if type(stored) is Stored else None
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[1]) is not Name:
            raise PickleError("it has a tensor without a storage")
        dtype, record, count = _STORAGES.get(key[1].name), f"data/{key[2]}", key[4]
        if dtype is None or type(key[2]) is not str or record not in self._records or not is_count(count):
            raise PickleError("it has a tensor without a storage")
        start, size = self._records[record]
        if count * dtype.itemsize != size:
            raise PickleError(f"its record {label(record)} has {size} bytes for {count} elements of {dtype}")
        return start, count, dtype

    def _tensor(self, stored: StoredTensor) -> Tensor:
        values = torch.empty(stored.span, dtype=stored.dtype)
        read_into(self._descriptor, stored.offset, values)
        return values.as_strided(stored.shape, stored.strides)


def _latin1(text: str) -> bytes:
    try:
        return text.encode("latin1")
    except UnicodeEncodeError:
        raise PickleError("it has bytes that are none") from None


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
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return Archive(descriptor, 0, os.fstat(descriptor).st_size).value()
    finally:
        os.close(descriptor)
