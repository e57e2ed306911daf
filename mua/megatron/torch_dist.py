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

import itertools
import math
import mmap
import operator
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from megatron_bridge.blocks import BandPart, bands
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
    found = {}
    try:
        places = {}
        for record, stored in index["storage_data"].items():
            key = Record.fields(record, "MetadataIndex")
            if (offset := key.get("offset")) is not None:  # else it is an object's, which is never read
                places[key["fqn"], _size(offset)] = _place(stored, sizes)
        for name, entry in index["state_dict_metadata"].items():
            if entry.kind == "BytesStorageMetadata":
                continue
            fields = Record.fields(entry, "TensorStorageMetadata")
            shape, dtype = _size(fields["size"]), fields["properties"].state[0]
            itemsize = dtype.itemsize
            chunks: dict[tuple[int, ...], tuple[tuple[int, ...], ArchivePlace]] = {}
            for chunk in fields["chunks"]:
                part = Record.fields(chunk, "ChunkStorageMetadata")
                offsets, counts = _size(part["offsets"]), _size(part["sizes"])
                if any(first + count > end for first, count, end in zip(offsets, counts, shape, strict=True)):
                    raise PickleError(f"{label(name)} has a chunk outside its shape {list(shape)}")
                place = places.get((name, offsets))
                if place is None or math.prod(counts) * itemsize > place.length:
                    raise PickleError(f"it does not say where the chunk of {label(name)} at {list(offsets)} lies")
                chunks[offsets] = counts, place
            found[name] = GlobalTensor(dtype, chunks)
    except (PickleError, OSError):
        raise
    except Exception as error:  # a value of another kind, or none: Python tells it by whatever is asked of it
        raise PickleError("it has something else where every index has a name, a shape, a dtype or a list") from error
    return found


def _place(record: Any, sizes: Callable[[str], int]) -> ArchivePlace:
    fields = Record.fields(record, "_StorageInfo")
    name, offset, length = (fields.get(key) for key in ("relative_path", "offset", "length"))
    if not is_name(name) or name.startswith(".") or os.path.basename(name) != name:
        raise PickleError(f"it names {label(name)}, which is no file of a checkpoint")
    if fields.get("transform_descriptors"):
        raise PickleError(f"it has {label(name)} transformed, which is not supported")
    size = sizes(name)
    if type(offset) is not int or type(length) is not int or not (0 <= offset <= offset + length <= size):
        raise PickleError(f"it names {shown(length)} bytes from {shown(offset)} on of {label(name)}, which has {size}")
    return ArchivePlace(name, offset, length)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of an archive, or the storage that it lies in: where in the file its values begin."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size


def find_tensor(descriptor: int, place: ArchivePlace) -> StoredTensor:
    """The one tensor that the archive at ``place`` holds.

    Raises:
        PickleError: it is no archive of one tensor whose values lie in order and without holes.
    """
    records: dict[str, tuple[int, int]] = {}
    start = place.offset - place.offset % mmap.ALLOCATIONGRANULARITY

    def storage(key: Any) -> StoredTensor:
        """What a persistent id names: ``("storage", kind, record, device, number of elements)``."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[1]) is not torch.dtype:
            raise PickleError("it has a tensor without a storage")
        first, size = records.get(f"data/{key[2]}", (0, -1))
        if not is_count(key[4]) or key[4] * key[1].itemsize != size:
            raise PickleError(f"it has {size} bytes for {shown(key[4])} elements of {key[1]}")
        return StoredTensor(start + first, key[1], torch.Size([key[4]]))

    def tensor(stored: Any, first: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        size = _size(shape)
        if type(stored) is not StoredTensor or not is_count(first) or first + size.numel() > stored.shape.numel():
            raise PickleError("it has a tensor without a shape, or larger than its storage")
        if size.numel() and strides != torch.empty(size, device="meta").stride():
            raise PickleError("it has a tensor whose memory is not contiguous")
        return StoredTensor(stored.offset + first * stored.dtype.itemsize, stored.dtype, size)

    try:
        with (
            mmap.mmap(descriptor, place.offset - start + place.length, offset=start, access=mmap.ACCESS_READ) as data,
            zipfile.ZipFile(cast(IO[bytes], data)) as archive,  # a map is read like a file
        ):
            for entry in archive.infolist():
                values = entry.header_offset + _LOCAL_HEADER.size
                signature, *lengths = _LOCAL_HEADER.unpack(data[entry.header_offset : values])
                values += sum(lengths)
                plain = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
                plain = plain and entry.header_offset >= place.offset - start  # and not in what the map begins with
                if signature != b"PK\3\4" or not plain or values + entry.file_size > len(data):
                    raise PickleError(f"its record {label(entry.filename)} is damaged")
                records[entry.filename.partition("/")[2]] = values, entry.file_size
            order, pickled = (data[at : at + size] for at, size in (records["byteorder"], records["data.pkl"]))
    except PickleError:
        raise
    except Exception as error:  # zipfile tells damage by some ten kinds of errors
        raise PickleError("it is no archive of torch.save") from error
    if order != b"little":
        raise PickleError("it was written on a machine of the other byte order")
    found = PlainUnpickler(pickled, {**_NAMES, ("torch._utils", "_rebuild_tensor_v2"): tensor}, storage).read_value()
    if type(found) is not StoredTensor:
        raise PickleError("it is no tensor")
    return found


_Matrix = BandPart[tuple[ArchivePlace, int]]
"""The part of one chunk that lies at one prefix: of the chunk the archive, and the elements before this matrix."""


class TorchDistReader:
    """Reads matrices of the global tensors of a checkpoint folder. Files stay open until :meth:`close`.

    Raises:
        DamagedCheckpoint: the index is missing, damaged, or a pickle of anything else than an index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, int] = {}
        self._matrices: dict[tuple[str, int], dict[tuple[int, ...], list[_Matrix]]] = {}
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

    def read(self, key: str, prefix: tuple[int, ...], row: int, target: Tensor) -> None:
        """Rows ``row...`` of the matrix at ``prefix`` of a global tensor into ``target``, CPU ``[rows, cols]``.

        The last one or two dimensions of the tensor are the matrix. One-dimensional ones have one column.

        Raises:
            DamagedCheckpoint: what the index says of a chunk is not what is there.
            ModelError: the tensor is not in the checkpoint, or has another shape.
            BridgeError: an element is in no chunk, or in several.
        """
        if (key, len(prefix)) not in self._matrices:
            self._matrices[key, len(prefix)] = self._by_prefix(key, len(prefix))
        pieces = [
            BandPart(m.origin, low - m.row, 0, low - row, m.col, high - low, m.cols)
            for m in self._matrices[key, len(prefix)].get(prefix, ())
            if (low := max(row, m.row)) < (high := min(row + len(target), m.row + m.rows))
        ]
        rows, cols = target.shape
        for band in bands(f"{self.folder}: {key}", pieces, rows, cols, rows):
            for piece in band.pieces:
                place, first = piece.origin
                with self._plain(f"{label(place.file)} at byte {place.offset}"):
                    part = target[band.row : band.row + band.rows, piece.col : piece.col + piece.cols]
                    self._read_values(place, first + piece.origin_row * piece.cols, part)

    def _read_values(self, place: ArchivePlace, first: int, part: Tensor) -> None:
        """The elements from ``first`` on of the tensor at ``place``."""
        if self._opened is None or self._opened[0] is not place:
            if place.file not in self._files:
                self._files[place.file] = open_regular(self.folder / place.file)
            self._opened = place, find_tensor(self._files[place.file], place)
        tensor = self._opened[1]
        if part.dtype != tensor.dtype or first + part.numel() > tensor.shape.numel():
            raise PickleError(f"it is {tensor.dtype} {list(tensor.shape)}, which the index says otherwise")
        values = part if part.is_contiguous() else torch.empty(part.shape, dtype=part.dtype)
        view, position = values.view(-1).view(torch.uint8).numpy().data, tensor.offset + first * part.itemsize
        while len(view):
            count = os.preadv(self._files[place.file], [view], position)
            if count == 0:
                raise PickleError("it is cut short")
            view, position = view[count:], position + count
        if values is not part:
            part.copy_(values)

    @contextmanager
    def _plain(self, part: str) -> Iterator[None]:
        """A block that reads a part of the checkpoint; raises DamagedCheckpoint if it is no plain data."""
        try:
            yield
        except (OSError, PickleError) as error:
            reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else error
            raise DamagedCheckpoint(
                f"checkpoint {self.folder}: {part} is damaged or holds what no checkpoint holds ({reason}); "
                "do not load it"
            ) from error

    def _tensor(self, key: str) -> GlobalTensor:
        if key not in self._index:
            raise ModelError(f"checkpoint {self.folder} is of another model: it has no tensor {key}")
        return self._index[key]

    def _by_prefix(self, key: str, dims: int) -> dict[tuple[int, ...], list[_Matrix]]:
        """Stored matrices by prefix; a chunk that is larger than one in a leading dimension holds several."""
        found: dict[tuple[int, ...], list[_Matrix]] = {}
        for offsets, (sizes, place) in self._tensor(key).chunks.items():
            if len(sizes) not in (dims + 1, dims + 2):
                raise ModelError(f"checkpoint {self.folder} is of another model: {key} has {len(sizes)} dimensions")
            if not math.prod(sizes):
                continue
            row, col = (*offsets[dims:], 0)[:2]  # there may be rows only
            rows, cols = (*sizes[dims:], 1)[:2]
            for number, index in enumerate(itertools.product(*map(range, sizes[:dims]))):
                prefix = tuple(map(operator.add, offsets, index))
                matrix = BandPart((place, number * rows * cols), 0, 0, row, col, rows, cols)
                found.setdefault(prefix, []).append(matrix)
        return found
