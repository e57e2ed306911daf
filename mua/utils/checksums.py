"""The sidecar of a model folder: a checksum of every tensor and file, so that no byte can change unnoticed.

``checksums.jsonl`` is JSON lines. The first names the algorithm and the job (what is converted, and how); each other
one a tensor whose bytes are in place, written as the tensors are completed. What an interrupted job left behind is
continued only by the same job, and only those tensors count as written whose bytes, read again, have the recorded
checksum. In a finished folder lines follow for every other file, for the header of every weight file, and one that
closes the list (:func:`seal`); it tells whether the folder still is what was written.
"""

from __future__ import annotations

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from mua.utils.errors import BridgeError
from mua.utils.strict_json import open_file, open_regular, read_json

NAME = "checksums.jsonl"
ALGORITHM = "xxh3_64"
TEMPLATES = "additional_chat_templates"

Hasher = xxhash.xxh3_64


class Sidecar:
    """The sidecar at ``path`` of the job ``job``, opened for appending; entries of another job are dropped."""

    def __init__(self, path: Path, job: str) -> None:
        entries = _lines(path)[1:] if same_job(path, job) else []
        self.entries = {line["name"]: line for line in entries if "name" in line and ALGORITHM in line}
        """By name of tensor, what an interrupted run of the same job recorded."""
        lines = [_line({"algorithm": ALGORITHM, "job": job}), *map(_line, self.entries.values())]
        path.write_text("".join(lines), encoding="utf-8")
        self._file = path.open("a", buffering=1, encoding="utf-8")  # a line at a time

    def add(self, name: str, digest: str, **place: str | int) -> None:
        """Record that the bytes of tensor ``name`` are in place, and which place, where that does not follow."""
        self._file.write(_line({"name": name, ALGORITHM: digest, **place}))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a closed sidecar says of its folder: checksums by name."""

    tensors: dict[str, str]
    files: dict[str, str]
    headers: dict[str, str]
    """Of weight files: their first bytes, up to the first tensor."""


def list_files(folder: Path) -> list[str]:
    """Names of all that is in a model folder, and in the one folder that transformers reads beside its files."""
    found = [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]
    return sorted(path.relative_to(folder).as_posix() for path in found if path.name != TEMPLATES)


def seal(folder: Path, headers: dict[str, int]) -> None:
    """Close the sidecar of a folder that is otherwise complete.

    Args:
        headers: how many bytes the headers of its weight files have, by name.
    """
    path = folder / NAME
    lines = [{"header": name, ALGORITHM: digest_of_file(folder / name, size)} for name, size in headers.items()]
    for other in list_files(folder):
        hidden = Path(other).name.startswith(".")
        if other not in headers and other != NAME and not hidden and (folder / other).is_file():
            lines.append({"file": other, ALGORITHM: digest_of_file(folder / other)})
    text = path.read_bytes() + "".join(map(_line, lines)).encode()
    path.write_bytes(text + _line({"end": True, ALGORITHM: Hasher(text).hexdigest()}).encode())


def read_sealed(folder: Path) -> Recorded:
    """What the sidecar of ``folder`` says.

    Raises:
        BridgeError: it is missing, was never closed, or is not as it was written.
    """
    path = folder / NAME
    try:
        with open_file(path) as file:
            data = file.read()
        lines = [read_json(line) for line in data.splitlines()]
        if not all(isinstance(line, dict) for line in lines):
            raise ValueError("a line is no JSON object")
    except FileNotFoundError:
        raise BridgeError(f"{folder} has no {NAME} to compare with") from None
    except (OSError, ValueError) as error:
        raise BridgeError(f"{path} is damaged: {getattr(error, 'strerror', None) or error}") from error
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    if not lines or lines[-1] != {"end": True, ALGORITHM: Hasher(data[:last]).hexdigest()}:
        raise BridgeError(
            f"{path} is not as it was written; copy the folder again, or remove that file to do without checksums"
        )
    return Recorded(*(
        {line[kind]: str(line.get(ALGORITHM)) for line in lines if isinstance(line.get(kind), str)}
        for kind in ("name", "file", "header")
    ))  # fmt: skip


class HashingStream(io.RawIOBase):
    """Writes to a place in an open file and sums up what is written."""

    def __init__(self, descriptor: int, position: int = 0) -> None:
        self._descriptor = descriptor
        self._hasher = Hasher()
        self.position = position
        """Where the next byte goes."""

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), 1 << 20):  # what is hashed is still in the cache
            part = view[start : start + (1 << 20)]
            self._hasher.update(part)
            write_all(self._descriptor, part, self.position)
            self.position += len(part)
        return len(view)

    def hexdigest(self) -> str:
        """Checksum of everything written so far."""
        return self._hasher.hexdigest()


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """``pwrite`` until nothing is left."""
    while (count := os.pwrite(descriptor, data, offset)) < len(data):
        data, offset = data[count:], offset + count


def digest_of_file(path: Path, size: int | None = None) -> str | None:
    """Checksum of a file, or of its first ``size`` bytes; None where it has fewer."""
    descriptor = open_regular(path)
    try:
        return digest_of(descriptor, 0, os.fstat(descriptor).st_size if size is None else size)
    finally:
        os.close(descriptor)


def digest_of(descriptor: int, offset: int, size: int) -> str | None:
    """Checksum of ``size`` bytes of an open file; None where it ends before."""
    hasher, buffer = Hasher(), memoryview(bytearray(min(size, 1 << 20)))
    while size:
        count = os.preadv(descriptor, [buffer[:size]], offset)
        if count == 0:
            return None
        hasher.update(buffer[:count])
        offset, size = offset + count, size - count
    return hasher.hexdigest()


def same_job(path: Path, job: str) -> bool:
    """Whether ``path`` is a sidecar of ``job``."""
    lines = _lines(path)
    return bool(lines) and lines[0] == {"algorithm": ALGORITHM, "job": job}


def _lines(path: Path) -> list[dict[str, Any]]:
    """Every line that is a JSON object; none if there is no such file."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content) + "\n"
