"""The index of a checkpoint (``.metadata``), read without Python's unpickler.

Upstream: torch 2.14.1, ``distributed/checkpoint/filesystem.py``: ``FileSystemReader.read_metadata`` unpickles the index
without restriction, so that a checkpoint from elsewhere runs what it likes. Here :mod:`mua.compat.plain_pickle` reads
the same bytes, and every field is checked before it reaches a class of torch.
Goes when: ``tests/unit/test_checkpoint_attacks.py::test_upstream_still_unpickles_an_index`` fails.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mua.compat.plain_pickle import DTYPES, PickleError, PlainUnpickler, Record, size_of
from mua.utils.strict_json import is_name, label, shown

StorageInfo: TypeAlias = _StorageInfo
"""Where a part of a checkpoint lies: file, offset and length in bytes. torch's name of it is private."""
_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta TensorStorageMetadata "
    "BytesStorageMetadata ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "pathlib": "PosixPath",
}
NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): partial(Record, name) for module, names in _CLASSES.items() for name in names.split()},
    ("torch", "Size"): size_of,
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}
"""All that an index may name, and what stands for it."""


def parse_index(data: bytes, sizes: Callable[[str], int]) -> Metadata:
    """The index that the pickle ``data`` holds, with everything in it that loading uses.

    Args:
        sizes: bytes of a file of the checkpoint by its name; raises OSError if there is none.

    Raises:
        PickleError: it is no index, names what no index names, or says what cannot be (a chunk outside its tensor or
            larger than the bytes it is said to lie in, a file outside the folder, a chunk that is nowhere).
    """
    fields = _fields(PlainUnpickler(data, NAMES).read_value(), "Metadata")
    places: dict[MetadataIndex, StorageInfo] = {}
    for index, place in _dictionary(fields.get("storage_data"), Record).items():
        key = _fields(index, "MetadataIndex")
        if type(key.get("fqn")) is not str:
            raise PickleError("it has an entry without a name")
        offset = key.get("offset")
        places[MetadataIndex(key["fqn"], None if offset is None else _size(offset))] = _place(place, sizes)
    entries = {
        name: _entry(name, entry, places) for name, entry in _dictionary(fields.get("state_dict_metadata"), str).items()
    }
    version = fields.get("version")
    return Metadata(entries, storage_data=places, version=version if type(version) is str else None)


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """The fields of an instance of the class ``kind`` of the index."""
    if type(record) is not Record or record.kind != kind:
        raise PickleError(f"it has something else where a {kind} should be")
    return _dictionary(record.state, str) if record.state is not None else {}


def _dictionary(value: Any, keys: type) -> dict[Any, Any]:
    if type(value) is not dict or any(type(key) is not keys for key in value):
        raise PickleError("it lacks a dictionary that every index has")
    return value


def _size(value: Any) -> torch.Size:
    if type(value) is not torch.Size:
        raise PickleError("it has something else where a shape should be")
    return value


def _place(record: Any, sizes: Callable[[str], int]) -> StorageInfo:
    fields = _fields(record, "_StorageInfo")
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
    return StorageInfo(name, offset, length)


def _entry(
    name: str, record: Any, places: dict[MetadataIndex, StorageInfo]
) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record) is Record and record.kind == "BytesStorageMetadata":
        if MetadataIndex(name) not in places:
            raise PickleError(f"it does not say where {label(name)} lies")
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    size, properties, chunks = _size(fields.get("size")), fields.get("properties"), fields.get("chunks")
    if type(properties) is not Record or properties.kind != "TensorProperties" or type(properties.state) is not tuple:
        raise PickleError("it has a tensor without properties")
    dtype = properties.state[0] if properties.state else None  # the only property that loading looks at
    if type(dtype) is not torch.dtype or type(chunks) is not list:
        raise PickleError(f"{label(name)} has no dtype, or no list of chunks")
    found = []
    for chunk in chunks:
        fields = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
        ends = zip(offsets, sizes, size, strict=False)
        if not len(offsets) == len(sizes) == len(size) or any(first + count > end for first, count, end in ends):
            raise PickleError(f"{label(name)} has a chunk outside its shape {list(size)}")
        found.append(ChunkStorageMetadata(offsets, sizes))
    for chunk in found:
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None or math.prod(chunk.sizes) * dtype.itemsize > place.length:
            raise PickleError(f"it does not say where the chunk of {label(name)} at {list(chunk.offsets)} lies")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, found)
