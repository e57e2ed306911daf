"""Arrays as compressed blobs, bit for bit, and the same for texts.

A blob of arrays is one zstd frame with a checksum: length of the header (4 bytes, little-endian), the header as JSON
(``[[name, dtype, shape], ...]``), then the arrays' bytes one after the other, little-endian and in C order.
"""

from __future__ import annotations

import json
import math
import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from mua.store.faults import DamagedRecord

LEVEL = 3
"""Of zstd: 1 is faster and larger, 19 slow and smallest."""
MAX_BYTES = 2**32
"""Of one blob's content: a damaged header must not ask for all memory."""
_KINDS = frozenset("biuf")
_local = threading.local()


def compress(content: bytes, level: int = LEVEL) -> bytes:
    """A zstd frame with its size and a checksum."""
    compressors: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if (compressor := compressors.get(level)) is None:
        compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
        compressors[level] = compressor
    return compressor.compress(content)


def decompress(blob: bytes, what: str = "a blob") -> bytes:
    """The inverse of :func:`compress`. Raises :class:`DamagedRecord`, which names ``what``."""
    try:
        size = zstandard.get_frame_parameters(blob).content_size
        if size > MAX_BYTES:
            raise DamagedRecord(f"{what}: says it holds {size} bytes")
        decompressor = getattr(_local, "decompressor", None)
        if decompressor is None:
            decompressor = _local.decompressor = zstandard.ZstdDecompressor()
        content: bytes = decompressor.decompress(blob, max_output_size=size, allow_extra_data=False)
        return content
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedRecord(f"{what}: damaged: {error}") from None


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]], level: int = LEVEL) -> bytes:
    """A blob of named arrays of booleans, integers and floats, of any shape.

    Raises TypeError for another dtype.
    """
    header, bodies = [], []
    for name, array in arrays.items():
        if array.dtype.kind not in _KINDS:
            raise TypeError(f"array {name} of dtype {array.dtype} cannot be stored")
        dtype = array.dtype.newbyteorder("<")
        header.append([name, dtype.str, list(array.shape)])
        bodies.append(array.astype(dtype, order="C", copy=False).tobytes())
    written = json.dumps(header, separators=(",", ":")).encode()
    return compress(b"".join((struct.pack("<I", len(written)), written, *bodies)), level)


def unpack_arrays(blob: bytes, what: str = "arrays") -> dict[str, npt.NDArray[Any]]:
    """The inverse of :func:`pack_arrays`: writable arrays in the machine's byte order.

    Raises :class:`DamagedRecord`, which names ``what``, for a blob that is not exactly what was written.
    """
    content = decompress(blob, what)
    try:
        (length,) = struct.unpack_from("<I", content)
        at = 4 + length
        found: dict[str, npt.NDArray[Any]] = {}
        for name, kind, shape in json.loads(content[4:at]):
            dtype = np.dtype(kind)
            if dtype.kind not in _KINDS or name in found or any(n < 0 for n in shape):
                raise ValueError(f"array {name!a} of {kind} {shape}")
            size = math.prod(shape) * dtype.itemsize
            array = np.frombuffer(content, dtype, math.prod(shape), at).reshape(shape)
            found[name] = array.astype(dtype.newbyteorder("="))
            at += size
        if at != len(content):
            raise ValueError(f"{len(content) - at} bytes too many")
    except (ValueError, TypeError, KeyError, struct.error, RecursionError) as error:
        raise DamagedRecord(f"{what}: not a blob of arrays: {error}") from None
    return found
