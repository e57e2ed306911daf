"""Compressed blobs, bit for bit: arrays; bodies of messages, stored once under their hash; lists of messages that cost
only what is new in them.

A blob of arrays is one zstd frame with a checksum: length of the header (4 bytes, little-endian), the header as JSON
(``[[name, dtype, shape], ...]``), then the arrays' bytes one after the other, little-endian and in C order.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
import zstandard
from sqlalchemy.engine import Connection

from mua.store.faults import DamagedData
from mua.store.tables import json_text, parsed_json, texts
from mua.store.writer import Insert
from mua.types import Json

LEVEL = 3
"""Of zstd: 1 is faster and larger, 19 slow and smallest."""
MAX_BYTES = 2**32
"""Of one blob's content: a damaged header must not ask for all memory."""
_KINDS = frozenset("biuf")


class _Codecs(threading.local):
    """Of one thread: neither may be used by two at once."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True, write_content_size=True)
        self.decompressor = zstandard.ZstdDecompressor()


_codecs = _Codecs()


def compress(content: bytes) -> bytes:
    """A zstd frame with its size and a checksum."""
    return _codecs.compressor.compress(content)


def decompress(blob: bytes, what: str = "a blob") -> bytes:
    """The inverse of :func:`compress`. Raises :class:`DamagedData`, which names ``what``."""
    try:
        size = zstandard.get_frame_parameters(blob).content_size
        if size > MAX_BYTES:
            raise DamagedData(f"{what}: says it holds {size} bytes")
        return _codecs.decompressor.decompress(blob, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise DamagedData(f"{what}: damaged: {error}") from None


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
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
    return compress(b"".join((struct.pack("<I", len(written)), written, *bodies)))


def unpack_arrays(blob: bytes, what: str = "arrays") -> dict[str, npt.NDArray[Any]]:
    """The inverse of :func:`pack_arrays`: writable arrays in the machine's byte order.

    Raises :class:`DamagedData`, which names ``what``, for a blob that is not exactly what was written.
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
        raise DamagedData(f"{what}: not a blob of arrays: {error}") from None
    return found


_MANY = 500


def hash_text(body: bytes) -> str:
    """32 hexadecimal digits (BLAKE2b, 128 bits)."""
    return hashlib.blake2b(body, digest_size=16).hexdigest()


def text_inserts(values: Iterable[Any], known: Collection[str] = ()) -> tuple[list[str], list[Insert]]:
    """The hashes of JSON values (messages, lists of tools, results), in order, and the writes that store those that are
    neither there nor ``known``."""
    bodies = [json_text(value).encode() for value in values]
    hashes = [hash_text(body) for body in bodies]
    new = {name: body for name, body in zip(hashes, bodies, strict=True) if name not in known}
    rows = [{"hash": name, "body": compress(body)} for name, body in new.items()]
    return hashes, [Insert(texts, rows, "keep")] if rows else []


def read_texts(connection: Connection, hashes: Iterable[str]) -> dict[str, Any]:
    """The values of ``hashes``. Raises :class:`DamagedData` for one that is missing or is not what it was."""
    wanted, found = list(dict.fromkeys(hashes)), {}
    for at in range(0, len(wanted), _MANY):
        chosen = sa.select(texts.c.hash, texts.c.body).where(texts.c.hash.in_(wanted[at : at + _MANY]))
        for name, blob in connection.execute(chosen):
            found[name] = check_text(name, blob)
    if missing := [name for name in wanted if name not in found]:
        raise DamagedData(f"text {missing[0]}: not in the store")
    return found


def check_text(name: str, blob: bytes) -> Any:
    """The value of one row of ``texts``, whose hash is compared."""
    body = decompress(blob, f"text {name}")
    if (found := hash_text(body)) != name:
        raise DamagedData(f"text {name}: its content has another hash, {found}")
    return parsed_json(body)


def message_lists(requests: Iterable[Mapping[str, Any]]) -> dict[int, list[str]]:
    """The whole lists of hashes of all requests of one role and attempt, by number.

    Raises :class:`DamagedData` where one goes on from a request that is not there before it.
    """
    lists: dict[int, list[str]] = {}
    for row in sorted(requests, key=lambda row: row["number"]):
        if row["messages"] is None:
            continue
        start: list[str] = []
        if row["follows"] is not None:
            if row["follows"] not in lists or not 0 <= (row["kept"] or 0) <= len(lists[row["follows"]]):
                raise DamagedData(f"request {row['number']}: goes on from request {row['follows']}, which is not there")
            start = lists[row["follows"]][: row["kept"]]
        lists[row["number"]] = [*start, *row["messages"]]
    return lists


def pack_messages(messages: Sequence[Json]) -> bytes:
    """A conversation as a blob."""
    return compress(json_text(messages).encode())


def unpack_messages(blob: bytes, what: str = "messages") -> list[Json]:
    """The inverse of :func:`pack_messages`. Raises :class:`DamagedData`."""
    found = parsed_json(decompress(blob, what))
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise DamagedData(f"{what}: no list of messages")
    return found
