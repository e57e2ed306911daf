"""The sidecar of a model folder: one checksum a tensor, written as the tensors are completed.

``checksums.jsonl`` is JSON lines. The first names the algorithm and the job (what is converted, and how); each other
one a tensor whose bytes are in place. What an interrupted job left behind is continued only by the same job, and only
those tensors count as written whose bytes, read again, have the recorded checksum. In a finished folder the file stays
and tells whether the weights are still what was written.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import xxhash

NAME = "checksums.jsonl"
ALGORITHM = "xxh3_64"

Hasher = xxhash.xxh3_64


class Sidecar:
    """The sidecar at ``path`` of the job ``job``, opened for appending; entries of another job are dropped."""

    def __init__(self, path: Path, job: str) -> None:
        self.entries: dict[str, dict[str, Any]] = _entries(path) if same_job(path, job) else {}
        """By name of tensor, what an interrupted run of the same job recorded."""
        lines = [_line({"algorithm": ALGORITHM, "job": job}), *map(_line, self.entries.values())]
        path.write_text("".join(lines), encoding="utf-8")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    @property
    def recorded(self) -> dict[str, str]:
        """Checksums by name of tensor that an interrupted run of the same job left."""
        return {name: entry[ALGORITHM] for name, entry in self.entries.items()}

    def add(self, name: str, digest: str, **place: str | int) -> None:
        """Record that the bytes of tensor ``name`` are in place, and which place, where that does not follow."""
        os.write(self._descriptor, _line({"name": name, ALGORITHM: digest, **place}).encode())

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_checksums(path: Path) -> dict[str, str]:
    """Checksums by name of tensor; a last line that was cut short is left out."""
    return {name: entry[ALGORITHM] for name, entry in _entries(path).items()}


def same_job(path: Path, job: str) -> bool:
    """Whether ``path`` is a sidecar of ``job``."""
    lines = _lines(path)
    return bool(lines) and lines[0] == {"algorithm": ALGORITHM, "job": job}


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in _lines(path)[1:] if "name" in line and ALGORITHM in line}


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
