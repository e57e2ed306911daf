"""Reading what others wrote: JSON of models, users, tools and files, and files that may be anything.

``json.loads`` is no safe reader of such text. Nesting some thousands deep is a RecursionError, an integer of over 4300
digits a ValueError without a place, ``NaN`` and ``1e999`` become numbers that no JSON can hold, of two equal keys the
first is lost, and ``"\\ud800"`` becomes a string that UTF-8 cannot carry. Opening a path may wait for ever, at a FIFO.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

MAX_DEPTH = 100
"""Arrays and objects inside one another. Python code that walks the value (copies, checks of schemas, templates) takes
a few frames a level and has a thousand."""
MAX_FILE_DEPTH = 200
"""The same in files of ours, which hold values of up to :data:`MAX_DEPTH` inside records."""

MAX_FILE_BYTES = 256 << 20
"""Of a JSON file."""

MAX_UTTERANCE = 16_000
"""Characters of what a user says in one message: some pages, which no person writes into a chat."""
MAX_TOOL_TEXT = 500_000
"""Characters of one tool's answer; longer ones fit no model's context and are the tool's fault."""
MAX_VERDICT = 50_000
"""Characters of a judge's answer."""

_SPACE = re.compile(r"[ \t\r\n]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufdd0-\ufdef\ufffe\uffff]")
"""All but tab and the ends of lines."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Text that is no JSON, or JSON that is refused."""

    def __init__(self, reason: str, text: str = "", at: int = 0) -> None:
        self.reason = reason
        self.line = text.count("\n", 0, at) + 1
        """1-based, in the text that was read."""
        self.column = at - text.rfind("\n", 0, at)
        super().__init__(f"{reason} ({f'line {self.line}, ' if self.line > 1 else ''}column {self.column})")


def read_json(text: str | bytes, *, strict: bool = True, agreeing: bool = False, depth: int = MAX_DEPTH) -> Any:
    """The JSON value that ``text`` (bytes: UTF-8) holds and nothing besides.

    Args:
        text: what somebody else wrote.
        strict: refuse what other readers refuse or read otherwise: numbers that are not finite, a key twice in one
            object, unpaired surrogates. Not for what this program wrote itself, which may hold the first and the last.
        agreeing: where not strict: refuse a key twice in one object with two values.
        depth: how many arrays and objects may be inside one another.

    Raises:
        JsonError: nothing else, whatever the text.
    """
    if not isinstance(text, str):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise JsonError(f"not UTF-8 text (byte {error.start})") from None
    value, end = read_json_at(text, skip_space(text, 0), strict=strict, agreeing=agreeing, depth=depth)
    if (end := skip_space(text, end)) < len(text):
        raise JsonError("text follows the JSON value", text, end)
    return value


def read_json_at(
    text: str, at: int, *, strict: bool = True, agreeing: bool = False, depth: int = MAX_DEPTH
) -> tuple[Any, int]:
    """The value that begins at index ``at``, and the index behind it. As :func:`read_json` otherwise."""
    try:
        value, end = (_STRICT if strict else _AGREEING if agreeing else _LENIENT).raw_decode(text, at)
    except RecursionError:
        raise JsonError("nested too deeply", text, at) from None
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, text, error.pos) from None
    except ValueError as error:
        reason = "an integer has too many digits" if "integer string" in str(error) else str(error)
        raise JsonError(reason, text, at) from None
    if text.count("[", at, end) + text.count("{", at, end) > depth and deeper(value, depth):
        raise JsonError("nested too deeply", text, at)
    if strict:
        raw = unpaired_surrogate(text[at:end])
        escaped = _SURROGATE_ESCAPE.search(text, at, end)
        if raw is not None:
            raise JsonError("unpaired surrogate in a string", text, at + raw)
        if escaped and unpaired_surrogate(json.dumps(value, ensure_ascii=False)) is not None:
            raise JsonError("unpaired surrogate in a string", text, escaped.start())
    return value, end


def skip_space(text: str, at: int) -> int:
    """The index of the first character from ``at`` on that is no JSON white space."""
    found = _SPACE.match(text, at)
    assert found is not None, "the pattern matches nothing too"
    return found.end()


def deeper(value: Any, depth: int) -> bool:
    """Whether arrays and objects are more than ``depth`` inside one another; level by level, so without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        inner = (item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer))
        level = [item for item in inner if isinstance(item, dict | list)]
    return bool(level)


def is_number(value: object) -> bool:
    """Whether ``value`` is a number of JSON that a float can hold: Python's integers have no bound."""
    return isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= 128)


def unpaired_surrogate(text: str) -> int | None:
    """The index of the first unpaired surrogate in ``text``, which UTF-8 cannot carry."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def broken_at(text: str) -> int | None:
    """The index of the first character that is no text: an unpaired surrogate, or a control character."""
    if (surrogate := unpaired_surrogate(text)) is not None:
        return surrogate
    control = _CONTROL.search(text)
    return control.start() if control else None


def printable(text: str, longest: int = 500) -> str:
    """``text`` on one line for a message: what cannot be printed escaped, and cut where it is too long."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


_PICTURES = {chr(code): chr(0x2400 + code) for code in range(32)} | {"\x7f": "\u2421"}
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""What a terminal acts on, hides or turns around, and what no terminal can be sent; not what joins letters."""


def pictured(text: str) -> str:
    """``text`` without control characters, such as those of terminal escapes and of the direction of writing: as their
    Unicode pictures, or escaped. Ends of lines and tabs stay."""
    return _UNSEEN.sub(lambda found: _PICTURES.get(found[0]) or ascii(found[0])[1:-1], text)


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file.

    Raises OSError, also for a FIFO, a device or a socket, which are not read, and for a name that no file can have.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def open_file(path: Path) -> BinaryIO:
    """A regular file, open for reading bytes; raises as :func:`open_regular`."""
    return os.fdopen(open_regular(path), "rb")


def read_file(path: Path) -> bytes:
    """What is in a regular file; see :func:`open_file`."""
    with open_file(path) as file:
        return file.read()


def read_json_file(path: Path, *, strict: bool = True) -> Any:
    """What a regular file of at most :data:`MAX_FILE_BYTES` holds; raises OSError, or as :func:`read_json`.

    Strict or not, a file that says two things under one key is refused.
    """
    with open_file(path) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise JsonError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    return read_json(data, strict=strict, agreeing=True)


def is_name(value: Any) -> TypeGuard[str]:
    """Whether it can be printed as it is: a text of one line, neither empty nor long."""
    return isinstance(value, str) and 0 < len(value) <= 500 and value.isascii() and value.isprintable()


def is_count(value: Any) -> bool:
    """Whether it can be a number of elements or bytes."""
    return type(value) is int and 0 <= value < 1 << 62


def label(value: Any) -> str:
    """A name from a file for a message: as it is, if it can be printed."""
    return value if is_name(value) else shown(value)


def shown(value: Any) -> str:
    """A value from a file for a message: short, printable and on one line."""
    text = ascii(value) if not isinstance(value, dict | list) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _finite(number: str) -> float:
    if math.isfinite(value := float(number)):
        return value
    large = number[-1].isdigit()  # else one of NaN, Infinity and -Infinity
    raise ValueError(f"{number[:20]} is too large for a number" if large else f"{number} is no JSON value")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:40]!a} appears twice in one object")
    return result


def _agreeing_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        for key, value in pairs:
            if value != result[key]:
                raise ValueError(f"the key {key[:40]!a} has two values, {shown(value)} and {shown(result[key])}")
    return result


_LENIENT = json.JSONDecoder()
_AGREEING = json.JSONDecoder(object_pairs_hook=_agreeing_keys)
_STRICT = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, object_pairs_hook=_unique_keys)
