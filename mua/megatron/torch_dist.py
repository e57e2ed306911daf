"""The files of a ``torch_dist`` checkpoint: chunks of global tensors, read by rows and written one by one.

A checkpoint is a set of ``*.distcp`` files, each a sequence of blobs as ``torch.save`` makes them, and an index,
``.metadata``, that says of every global tensor which rectangle ("chunk") lies in which blob. Both are pickles, which
:mod:`mua.compat.plain_index` and :mod:`mua.compat.plain_archive` read as plain data. Reading is by rows, straight from
the file: nothing is ever loaded in whole.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mua.compat.checkpoint_reading import INDEX, plain_part, read_index
from mua.compat.plain_archive import Archive, StoredTensor, read_into
from mua.compat.plain_index import StorageInfo
from mua.compat.plain_pickle import PickleError
from mua.utils.checksums import ALGORITHM, HashingStream, Sidecar, digest_of
from mua.utils.errors import ModelError
from mua.utils.strict_json import open_regular

_FILE_BYTES = 5 << 30


@dataclass(frozen=True, slots=True)
class Region:
    """Rows of a parameter, as a matrix, in a global tensor: rows and columns of its last dimensions at ``prefix``.

    One-dimensional parameters are matrices of one column.
    """

    first_row: int
    """Of the parameter."""
    key: str
    global_shape: tuple[int, ...]
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
    blob: StorageInfo
    first: int
    """Elements of the chunk before this matrix."""


class TorchDistReader:
    """Reads matrices of the global tensors of a checkpoint folder. Files stay open until :meth:`close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._index = read_index(folder)
        self._files: dict[str, int] = {}
        self._stored: dict[tuple[str, int], dict[tuple[int, ...], list[StoredMatrix]]] = {}
        self._opened: tuple[StorageInfo, int, StoredTensor] | None = None

    def close(self) -> None:
        """Close every file."""
        while self._files:
            os.close(self._files.popitem()[1])

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of a global tensor."""
        dtype: torch.dtype = self._tensor(key).properties.dtype
        return dtype

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
        if target.shape[1] != matrix.cols or not target.is_contiguous():
            raise ValueError(f"rows of {matrix.cols} values do not fit {list(target.shape)}")
        with plain_part(self.folder, matrix.blob):
            descriptor, tensor = self._open(matrix.blob)
            if target.dtype != tensor.dtype or matrix.first + matrix.rows * matrix.cols > math.prod(tensor.shape):
                raise PickleError(f"it is {tensor.dtype} {list(tensor.shape)}, which the index says otherwise")
            read_into(descriptor, tensor.offset + (matrix.first + row * matrix.cols) * tensor.dtype.itemsize, target)

    def _tensor(self, key: str) -> TensorStorageMetadata:
        entry = self._index.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            raise ModelError(f"checkpoint {self.folder} is of another model: it has no tensor {key}")
        return entry

    def _by_prefix(self, key: str, dims: int) -> dict[tuple[int, ...], list[StoredMatrix]]:
        """Stored matrices by prefix; a chunk that is larger than one in a leading dimension holds several."""
        found: dict[tuple[int, ...], list[StoredMatrix]] = {}
        for chunk in self._tensor(key).chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if len(sizes) not in (dims + 1, dims + 2):
                raise ModelError(f"checkpoint {self.folder} is of another model: {key} has {len(sizes)} dimensions")
            if not math.prod(sizes):
                continue
            blob = self._index.storage_data[MetadataIndex(key, chunk.offsets)]
            row, col = (*offsets[dims:], 0)[:2]  # there may be rows only
            rows, cols = (*sizes[dims:], 1)[:2]
            for number, index in enumerate(itertools.product(*map(range, sizes[:dims]))):
                prefix = tuple(map(operator.add, offsets, index))
                matrix = StoredMatrix(row, col, rows, cols, blob, number * rows * cols)
                found.setdefault(prefix, []).append(matrix)
        return found

    def _open(self, info: StorageInfo) -> tuple[int, StoredTensor]:
        """The file of a blob and its tensor; the one opened last is kept, as its rows are read band by band."""
        if self._opened is None or self._opened[0] is not info:
            if info.relative_path not in self._files:
                self._files[info.relative_path] = open_regular(self.folder / info.relative_path)
            descriptor = self._files[info.relative_path]
            self._opened = (info, descriptor, Archive(descriptor, info.offset, info.length).tensor())
        return self._opened[1:]


@dataclass(slots=True)
class ChunkSpec:
    """One chunk to write: where it lies in which global tensor."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Its name in the sidecar."""
        return f"{self.key}@{','.join(map(str, self.offsets))}"

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(slots=True)
class TorchDistWriter:
    """Writes the chunks of a checkpoint one after the other and, at the end, the index.

    Chunks that the sidecar records are read again and, where the bytes are as recorded, count as written.
    """

    folder: Path
    sidecar: Sidecar
    _places: dict[str, StorageInfo] = field(default_factory=dict)
    _descriptors: list[int] = field(default_factory=list)
    _end: int = 0

    def __post_init__(self) -> None:
        entries = self.sidecar.entries
        for number in range(1 + max((int(entry["file"]) for entry in entries.values()), default=0)):
            path = self.folder / _file_name(number)
            self._descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o644))
        for name, entry in entries.items():
            number, offset, length = int(entry["file"]), int(entry["offset"]), int(entry["length"])
            if number == len(self._descriptors) - 1:
                self._end = max(self._end, offset + length)
            if digest_of(self._descriptors[number], offset, length) == entry[ALGORITHM]:
                self._places[name] = StorageInfo(_file_name(number), offset, length)
        os.ftruncate(self._descriptors[-1], self._end)

    def has(self, chunk: ChunkSpec) -> bool:
        """Whether the chunk is in its place already."""
        return chunk.name in self._places

    def write(self, chunk: ChunkSpec, values: Tensor) -> None:
        """Append one chunk: a contiguous CPU tensor of its shape and dtype that fills its storage."""
        if self._end >= _FILE_BYTES:
            path = self.folder / _file_name(len(self._descriptors))
            self._descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644))
            self._end = 0
        number = len(self._descriptors) - 1
        stream = HashingStream(self._descriptors[number], self._end)
        torch.save(values.view(chunk.sizes), cast(IO[bytes], stream))
        length = stream.position - self._end
        self._places[chunk.name] = StorageInfo(_file_name(number), self._end, length)
        self.sidecar.add(chunk.name, stream.hexdigest(), file=number, offset=self._end, length=length)
        self._end += length

    def finish(self, chunks: Sequence[ChunkSpec]) -> None:
        """Write the index of ``chunks``, all of which have been written, flush to the disk and close."""
        tensors: dict[str, TensorStorageMetadata] = {}
        storage: dict[MetadataIndex, StorageInfo] = {}
        for chunk in chunks:
            properties = TensorProperties(dtype=chunk.dtype)
            size = torch.Size(chunk.global_shape)
            entry = tensors.setdefault(chunk.key, TensorStorageMetadata(properties, size, []))
            offsets = torch.Size(chunk.offsets)
            entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
            storage[MetadataIndex(chunk.key, offsets)] = self._places[chunk.name]
        index = Metadata(dict(tensors), storage_data=storage, version=CURRENT_DCP_VERSION)
        (self.folder / INDEX).write_bytes(pickle.dumps(index))
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        self.close()

    def close(self) -> None:
        """Close the files as they are."""
        while self._descriptors:
            os.close(self._descriptors.pop())


def _file_name(number: int) -> str:
    return f"__0_{number}.distcp"
