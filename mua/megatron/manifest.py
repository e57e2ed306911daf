"""``manifest.json``: what a checkpoint holds, and what every file of it must look like.

It is written last, into the folder that is still hidden, so that a folder without one was never whole. Sizes of all
files and the checksums of small ones are compared before a checkpoint is loaded; the checksums of large files are there
for :func:`check_files` with ``thorough=True``, which reads them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_bridge.checksums import ALGORITHM
from megatron_bridge.safetensors_writer import digest_of, flush
from mua.errors import ModelError
from mua.types import Json

NAME, STATE, HF_FILES = "manifest.json", "state.json", "hf"
FORMAT = 2
SMALL_BYTES = 4 << 20
"""Files up to this size are read and compared before every load."""


def read(folder: Path) -> Json:
    """The manifest of the checkpoint ``folder``.

    Raises:
        ModelError: there is no such folder, it has no manifest, or one of another format.
    """
    path = folder / NAME
    if not folder.is_dir():
        raise ModelError(f"checkpoint {folder} does not exist; name a step_* folder, or none to start afresh")
    try:
        content: Json = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"checkpoint {folder} is not whole: it has no {NAME}; remove it") from None
    except ValueError as error:
        raise ModelError(f"checkpoint {folder} is damaged: {NAME} is not JSON ({error}); remove it") from error
    if content.get("format") != FORMAT:
        raise ModelError(f"checkpoint {folder} has format {content.get('format')}, this version reads {FORMAT}")
    return content


def write(folder: Path, content: Mapping[str, Any], digests: Mapping[str, str] | None = None) -> None:
    """Describe ``content`` and every file of ``folder``, and flush all of them to the disk.

    Args:
        digests: checksums by file name that are known already; the other files are read.
    """
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.name.startswith(".") and path.name != ".metadata":
            continue
        size = path.stat().st_size
        files[name] = {"bytes": size, ALGORITHM: (digests or {}).get(name) or _digest(path, size)}
    (folder / NAME).write_text(json.dumps({"format": FORMAT, **content, "files": files}, indent=1))
    for path in [*folder.rglob("*"), folder]:
        flush(path)


def check_files(folder: Path, content: Json, *, thorough: bool = False) -> None:
    """Raises ModelError unless all files are there in the recorded size and small ones (or all) have their checksum."""
    for name, expected in content["files"].items():
        path, size = folder / name, expected["bytes"]
        found = path.stat().st_size if path.is_file() else None
        state = None
        if found is None:
            state = "is missing"
        elif found != size:
            state = f"has {found} bytes instead of {size}"
        elif (thorough or size <= SMALL_BYTES) and _digest(path, size) != expected[ALGORITHM]:
            state = "has other bytes than were written"
        if state is not None:
            raise ModelError(f"checkpoint {folder} is damaged: {name} {state}; remove it to resume from an older one")


def _digest(path: Path, size: int) -> str | None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return digest_of(descriptor, 0, size)
    finally:
        os.close(descriptor)
