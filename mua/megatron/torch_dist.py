"""Checkpoints that Megatron-LM wrote (``torch_dist``), read by rows and as plain data, whatever their bytes are.

A checkpoint is a set of ``*.distcp`` files, each a sequence of archives as ``torch.save`` makes them, and an index,
``.metadata``, that says of every global tensor which rectangle ("chunk") lies in which archive. Index and archives are
pickles. torch unpickles both without restriction, so that a checkpoint from elsewhere runs what it likes; its
``weights_only`` refuses the index. Here Python's own unpickler has the few instructions that both consist of
(:mod:`mua.compat.plain_pickle`). A name must be one of an exact list of pairs, each of which stands for a value or
function given here: nothing is ever imported.
Memory and time are in proportion to the bytes read. Nothing is loaded in whole.
"""

from __future__ import annotations

import io
import itertools
import math
import operator
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mua.compat.plain_pickle import PickleError, PlainUnpickler, Record
from mua.utils.errors import DamagedCheckpoint, ModelError
from mua.utils.strict_json import is_count, is_name, label, open_regular, shown

INDEX = ".metadata"
_MAX_DIMS = 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")


def _size(*arguments: Any) -> torch.Size:
    """What stands for ``torch.Size``."""
    (numbers,) = arguments
    if not isinstance(numbers, tuple) or len(numbers) > _MAX_DIMS or not all(map(is_count, numbers)):
        raise PickleError("it has a shape that no tensor has")
    return torch.Size(numbers)


_DTYPES = {name: getattr(torch, name) for name in (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
)}  # fmt: skip
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}  # fmt: skip
_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata "
    "BytesStorageMetadata ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
}
_NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): partial(Record, name) for module, names in _CLASSES.items() for name in names.split()},
    **{("torch", name): dtype for name, dtype in (_DTYPES | _STORAGES).items()},
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): lambda: {},
}
"""All that an index or an archive may name, and what stands for it, beside the function that makes a tensor."""


@dataclass(frozen=True, slots=True)
class ArchivePlace:
    """Where an archive lies: file, and bytes."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of a checkpoint: the chunks it is stored in, by where each begins."""

    dtype: torch.dtype
    chunks: dict[tuple[int, ...], tuple[tuple[int, ...], ArchivePlace]]


def parse_index(data: bytes, sizes: Callable[[str], int]) -> dict[str, GlobalTensor]:
    """The tensors that the index ``data`` tells of, by name.

    Args:
        sizes: bytes of a file of the checkpoint by its name; raises OSError if there is none.

    Raises:
        PickleError: it is no index, names what no index names, or says what cannot be (a chunk outside its tensor or
            larger than the bytes it is said to lie in, a file outside the folder, a chunk that is nowhere).
    """
    index = Record.fields(PlainUnpickler(data, _NAMES).read_value(), "Metadata")
    stored, tensors = index.get("storage_data"), index.get("state_dict_metadata")
    if type(stored) is not dict or type(tensors) is not dict:
        raise PickleError("it lacks a dictionary that every index has")
    places: dict[tuple[str, tuple[int, ...] | None], ArchivePlace] = {}
    for key, place in stored.items():
        fields = Record.fields(key, "MetadataIndex")
        offset = fields.get("offset")
        places[str(fields.get("fqn")), None if offset is None else tuple(offset)] = _place(place, sizes)
    found = {}
    for name, entry in tensors.items():
        if type(entry) is Record and entry.kind == "BytesStorageMetadata":
            continue  # an object, which is never read
        fields = Record.fields(entry, "TensorStorageMetadata")
        size, properties = fields.get("size"), fields.get("properties")
        state = properties.state if type(properties) is Record else None
        if type(name) is not str or type(size) is not torch.Size or type(state) is not tuple or not state:
            raise PickleError("it has a tensor without a name, a shape or properties")
        if type(state[0]) is not torch.dtype or type(fields.get("chunks")) is not list:
            raise PickleError(f"{label(name)} has no dtype, or no list of chunks")
        tensor = GlobalTensor(state[0], {})
        for chunk in fields["chunks"]:
            part = Record.fields(chunk, "ChunkStorageMetadata")
            offsets, counts = part.get("offsets"), part.get("sizes")
            if type(offsets) is not torch.Size or type(counts) is not torch.Size:
                raise PickleError(f"{label(name)} has a chunk without a shape")
            ends = zip(offsets, counts, size, strict=False)
            if not len(offsets) == len(counts) == len(size) or any(first + n > end for first, n, end in ends):
                raise PickleError(f"{label(name)} has a chunk outside its shape {list(size)}")
            place = places.get((name, tuple(offsets)))
            if place is None or math.prod(counts) * tensor.dtype.itemsize > place.length:
                raise PickleError(f"it does not say where the chunk of {label(name)} at {list(offsets)} lies")
            tensor.chunks[tuple(offsets)] = tuple(counts), place
        found[name] = tensor
    return found


def _place(record: Any, sizes: Callable[[str], int]) -> ArchivePlace:
    fields = Record.fields(record, "_StorageInfo")
    name, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if not is_name(name) or name.startswith(".") or os.path.basename(name) != name:
        raise PickleError(f"it names {label(name)}, which is no file of a checkpoint")
    if fields.get("transform_descriptors"):
        raise PickleError(f"it has {label(name)} transformed, which is not supported")
    try:
        size = sizes(name)
    except OSError as error:
        raise PickleError(f"it names {label(name)}: {error.strerror}") from error
    if type(offset) is not int or type(length) is not int or not (0 <= offset <= offset + length <= size):
        raise PickleError(f"it names {shown(length)} bytes from {shown(offset)} on of {label(name)}, which has {size}")
    return ArchivePlace(name, offset, length)


@dataclass(frozen=True, slots=True)
class _Storage:
    """The values that a tensor of an archive lies in: where they begin in the file, and how many they are."""

    offset: int
    count: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an archive: where in the file its values begin."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


def find_tensor(descriptor: int, place: ArchivePlace) -> StoredTensor:
    """The one tensor that the archive at ``place`` holds.

    Raises:
        PickleError: it is no archive of one tensor whose values lie in order and without holes.
    """
    records: dict[str, tuple[int, int]] = {}

    def read(start: int, size: int) -> bytes:
        found = os.pread(descriptor, size, place.offset + start) if start >= 0 else b""
        if len(found) != size:
            raise PickleError("it is cut short")
        return found

    def storage(key: Any) -> _Storage:
        """What a persistent id names: ``("storage", kind, record, device, number of elements)``."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[1]) is not torch.dtype:
            raise PickleError("it has a tensor without a storage")
        start, size = records.get(f"data/{key[2]}", (0, -1))
        if not is_count(key[4]) or key[4] * key[1].itemsize != size:
            raise PickleError(f"it has {size} bytes for {shown(key[4])} elements of {key[1]}")
        return _Storage(place.offset + start, key[4], key[1])

    def tensor(stored: Any, first: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        size = _size(shape)
        if type(stored) is not _Storage or not is_count(first) or first + size.numel() > stored.count:
            raise PickleError("it has a tensor without a shape, or larger than its storage")
        if size.numel() and strides != torch.empty(size, device="meta").stride():
            raise PickleError("it has a tensor whose memory is not contiguous")
        return StoredTensor(stored.offset + first * stored.dtype.itemsize, stored.dtype, size)

    try:
        with zipfile.ZipFile(io.BufferedReader(_FilePart(descriptor, place), 1 << 12)) as archive:
            for entry in archive.infolist():
                signature, *lengths = _LOCAL_HEADER.unpack(read(entry.header_offset, _LOCAL_HEADER.size))
                start = entry.header_offset + _LOCAL_HEADER.size + sum(lengths)
                plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                if signature != b"PK\3\4" or not plain or start + entry.file_size > place.length:
                    raise PickleError(f"its record {label(entry.filename)} is damaged")
                records[entry.filename.partition("/")[2]] = start, entry.file_size
        if read(*records["byteorder"]) != b"little":
            raise PickleError("it was written on a machine of the other byte order")
        pickled = read(*records["data.pkl"])
    except PickleError:
        raise
    except Exception as error:  # zipfile tells damage by some ten kinds of errors
        raise PickleError("it is no archive of torch.save") from error
    found = PlainUnpickler(pickled, {**_NAMES, ("torch._utils", "_rebuild_tensor_v2"): tensor}, storage).read_value()
    if type(found) is not StoredTensor:
        raise PickleError("it is no tensor")
    return found


class _FilePart(io.RawIOBase):
    """A part of an open file as a file."""

    def __init__(self, descriptor: int, place: ArchivePlace) -> None:
        self._descriptor, self._place, self._position = descriptor, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._place.length}[whence]
        if start + offset < 0:
            raise OSError("a place before the beginning")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._place.length - self._position)]
        count = os.preadv(self._descriptor, [view], self._place.offset + self._position) if len(view) else 0
        self._position += count
        return count


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of a parameter, as a matrix, in a global tensor: rows and columns of its last dimensions at ``prefix``.

    One-dimensional parameters are matrices of one column.
    """

    first_row: int
    """Of the parameter."""
    key: str
    prefix: tuple[int, ...]
    row: int
    col: int
    rows: int
    cols: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """The part of one chunk that lies at one prefix: where its matrix is in the global tensor and in the file."""

    row: int
    col: int
    rows: int
    cols: int
    place: ArchivePlace
    first: int
    """Elements of the chunk before this matrix."""


class TorchDistReader:
    """Reads matrices of the global tensors of a checkpoint folder. Files stay open until :meth:`close`.

    Raises:
        DamagedCheckpoint: the index is missing, damaged, or a pickle of anything else than an index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}
        self._stored: dict[tuple[str, int], dict[tuple[int, ...], list[StoredMatrix]]] = {}
        self._opened: tuple[ArchivePlace, StoredTensor] | None = None
        with self._plain(INDEX), open(open_regular(folder / INDEX), "rb") as file:
            self._index = parse_index(file.read(), lambda name: os.stat(folder / name).st_size)

    def close(self) -> None:
        """Close every file."""
        while self._files:
            os.close(self._files.popitem()[1])

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a global tensor."""
        return self._tensor(key).dtype

    def stored(self, region: Region) -> list[StoredMatrix]:
        """The stored matrices that overlap ``region``."""
        key = (region.key, len(region.prefix))
        if key not in self._stored:
            self._stored[key] = self._by_prefix(*key)
        return [
            matrix
            for matrix in self._stored[key].get(region.prefix, ())
            if -matrix.rows < matrix.row - region.row < region.rows
            and -matrix.cols < matrix.col - region.col < region.cols
        ]

    def read(self, matrix: StoredMatrix, row: int, target: Tensor) -> None:
        """Whole rows ``row...`` of a stored matrix into the contiguous CPU tensor ``target``, ``[rows, cols]``."""
        place = matrix.place
        with self._plain(f"{label(place.file)} at byte {place.offset}"):
            if self._opened is None or self._opened[0] is not place:
                if place.file not in self._files:
                    self._files[place.file] = open_regular(self.folder / place.file)
                self._opened = place, find_tensor(self._files[place.file], place)
            tensor = self._opened[1]
            if target.dtype != tensor.dtype or matrix.first + matrix.rows * matrix.cols > tensor.shape.numel():
                raise PickleError(f"it is {tensor.dtype} {list(tensor.shape)}, which the index says otherwise")
            view = target.reshape(-1).view(torch.uint8).numpy().data
            position = tensor.offset + (matrix.first + row * matrix.cols) * tensor.dtype.itemsize
            while len(view):
                count = os.preadv(self._files[place.file], [view], position)
                if count == 0:
                    raise PickleError("it is cut short")
                view, position = view[count:], position + count

    @contextmanager
    def _plain(self, part: str) -> Iterator[None]:
        """A block that reads a part of the checkpoint; raises DamagedCheckpoint if it is no plain data."""
        try:
            yield
        except (OSError, PickleError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DamagedCheckpoint(
                f"checkpoint {self.folder}: {part} is damaged or holds what no checkpoint holds ({reason}); "
                "do not load it"
            ) from error

    def _tensor(self, key: str) -> GlobalTensor:
        if key not in self._index:
            raise ModelError(f"checkpoint {self.folder} is of another model: it has no tensor {key}")
        return self._index[key]

    def _by_prefix(self, key: str, dims: int) -> dict[tuple[int, ...], list[StoredMatrix]]:
        """Stored matrices by prefix; a chunk that is larger than one in a leading dimension holds several."""
        found: dict[tuple[int, ...], list[StoredMatrix]] = {}
        for offsets, (sizes, place) in self._tensor(key).chunks.items():
            if len(sizes) not in (dims + 1, dims + 2):
                raise ModelError(f"checkpoint {self.folder} is of another model: {key} has {len(sizes)} dimensions")
            if not math.prod(sizes):
                continue
            row, col = (*offsets[dims:], 0)[:2]  # there may be rows only
            rows, cols = (*sizes[dims:], 1)[:2]
            for number, index in enumerate(itertools.product(*map(range, sizes[:dims]))):
                prefix = tuple(map(operator.add, offsets, index))
                found.setdefault(prefix, []).append(StoredMatrix(row, col, rows, cols, place, number * rows * cols))
        return found
