"""Opening files of a folder that may come from elsewhere: regular ones only, and JSON of a sane size and depth.

A FIFO, a device or a socket under the name of a weight file would hang or never end; all of them are refused before a
byte is read.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, TypeGuard

MAX_JSON_BYTES = 256 << 20


class BridgeError(Exception):
    """A checkpoint and a model do not fit together. The message names the file, tensor or key, and the fix."""


def open_regular(path: Path) -> int:
    """A descriptor for reading ``path``.

    Raises:
        OSError: it cannot be opened, or is no regular file (``filename`` and ``strerror`` are set).
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "it is no regular file", str(path))
    return descriptor


def read_json_file(path: Path, *, strict: bool = True) -> Any:
    """What a JSON file holds.

    Args:
        strict: refuse what JSON itself does not have, or leaves open: NaN, Infinity, a key that comes twice.

    Raises:
        OSError: as :func:`open_regular`.
        ValueError: it is no JSON, is nested without end or larger than 256 MiB.
    """
    with open(open_regular(path), "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    return parse_json(data, strict=strict)


def parse_json(data: bytes, *, strict: bool = True) -> Any:
    """As :func:`read_json_file`, of bytes."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        return json.loads(data, object_pairs_hook=_once, parse_constant=_no_number) if strict else json.loads(data)
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8 text") from None
    except RecursionError:
        raise ValueError("it is nested without end") from None


def _no_number(constant: str) -> Any:
    raise ValueError(f"it has {constant}, which is no JSON")


def read_json_lines(data: bytes) -> list[dict[str, Any]]:
    """The objects of JSON lines.

    Raises:
        ValueError: a line is none.
    """
    lines = [parse_json(line) for line in data.splitlines()]
    for number, line in enumerate(lines, 1):
        if not isinstance(line, dict):
            raise ValueError(f"line {number} is no JSON object")
    return lines


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {shown(twice)} twice")
    return found


def shown(value: Any) -> str:
    """A value from a file for a message: short, printable and on one line."""
    text = ascii(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def is_name(value: Any) -> TypeGuard[str]:
    """Whether it can be printed as it is: a text of one line, neither empty nor long."""
    return isinstance(value, str) and 0 < len(value) <= 500 and value.isascii() and value.isprintable()


def label(value: Any) -> str:
    """A name from a file for a message: as it is, if it can be printed."""
    return value if is_name(value) else shown(value)


def is_count(value: Any) -> bool:
    """Whether it can be a number of elements or bytes."""
    return type(value) is int and 0 <= value < 1 << 62
