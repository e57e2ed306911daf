"""What the subjects of the fuzzers share: mutations of bytes and of JSON, and how an outcome is judged.

A subject is a module of this folder with ``run(cases, seed) -> list[str]``, which gives one line for each fault it
finds; names that begin with an underscore are no subjects. ``tools/fuzz.py`` runs them in processes of their own.
"""

from __future__ import annotations

import json
import random
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LONGEST_LINE = 3000
NASTY_BYTES = (
    b"\x00", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\xc3", b"\xed\xa0\x80", b"\r", b"\r\n", b"\n", b"\t", b"\x1b[2J",
    b"\x85", "\u2028".encode(), "\u0085".encode(), "🙂".encode(), b'"', b"'", b"\\", b"{", b"}", b"[", b"]", b":", b",",
)  # fmt: skip
NASTY_JSON = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, 1e308, -0.0, float("nan"),
    float("inf"), "", "x", "\x00", "\ud800", "a\ud83d", "\u2028", "\x1b[2J", "a\nb", "../../x", "x" * 5000, "=", "AAAA",
    [], [[]], [None], {}, {"": {}}, {"a": [{"b": 1}]}, [1, "2", 3.0], {"name": "f", "arguments": {}},
)  # fmt: skip
NASTY_TEXTS = (
    "[" * 100_000, '{"a":' * 100_000, "[" * 120 + "]" * 120, "[" * 700 + "]" * 700, "9" * 5000, "-" + "9" * 5000, "NaN",
    "-Infinity", "1e999", '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '{"a":1,"a":2}', '{"a":1}{', "tru", "nul", "",
    '"', "\\", "1.", "01", '"\\x"', "\ufeff{}", '"\x01"',
)  # fmt: skip


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """``data`` with one to four changes at drawn places."""
    for _ in range(rng.randint(1, 4)):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        end = min(end, at + rng.choice((1, 4, 40)))
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + rng.choice(NASTY_BYTES) + data[at:]
        elif kind == 1:
            data = data[:at] + data[end:]
        elif kind == 2:
            data = data[:at] + data[at:end] * 2 + data[end:]
        elif kind == 3 and at < len(data):
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 4:
            data = data[:at] + rng.randbytes(rng.randint(1, 8)) + data[end:]
        else:
            data = data[:at] if rng.random() < 0.3 else data[:at] + rng.choice(NASTY_BYTES) * 3 + data[at:]
    return data


def mutated_json(value: Any, rng: random.Random) -> str:
    """The text of ``value`` with something in it replaced, removed, added, or twice."""
    mark = "\x07here\x07"
    value = json.loads(json.dumps(value))
    holders = [(holder, key) for holder in _containers(value) for key in _keys(holder)]
    if not holders:
        return rng.choice(NASTY_TEXTS)
    holder, key = rng.choice(holders)
    kind = rng.randrange(6)
    if kind == 0:
        holder[key] = rng.choice(NASTY_JSON)
    elif kind == 1:
        del holder[key]
    elif kind == 2:
        other, place = rng.choice(holders)
        holder[key] = json.loads(json.dumps(other[place]))
    elif kind == 3:
        holder[key] = [holder[key]] if rng.random() < 0.5 else {"a": holder[key]}
    elif kind == 4:
        holder[key] = mark
        return json.dumps(value).replace(json.dumps(mark), rng.choice(NASTY_TEXTS))
    elif isinstance(holder, dict):
        holder[rng.choice(("", "zzq", "\x00", "\ud800", "name", "role", "format"))] = rng.choice(NASTY_JSON)
    else:
        holder.insert(key, rng.choice(NASTY_JSON))
    return json.dumps(value)


def mutated_lines(lines: list[bytes], rng: random.Random) -> bytes:
    """A file of JSON lines with lines twice, cut, swapped, joined, emptied, mutated as bytes, or as they were."""
    lines = list(lines)
    at = rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:
        lines.insert(at, rng.choice(lines))
    elif kind == 1:
        lines[-1] = lines[-1][: rng.randrange(len(lines[-1]))]
        return b"\n".join(lines)
    elif kind == 2:
        lines[at] = lines[at] + lines[-1]
    elif kind == 3:
        lines[at] = rng.choice((b"", b" ", b"\t", b"[]", b"5", b"null", b'"x"', b"{}", b"\x00" * 100))
    elif kind == 4:
        return b"\r\n".join(lines) + b"\r\n"
    elif kind == 5:
        lines[at] = rng.choice(NASTY_TEXTS).encode("utf-8", "surrogatepass")
    elif kind == 6:
        return mutated_bytes(b"\n".join(lines) + b"\n", rng)
    else:
        lines[at] = mutated_bytes(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def damage_json(path: Path, rng: random.Random) -> None:
    path.write_text(mutated_json(json.loads(path.read_text()), rng), encoding="utf-8", errors="surrogatepass")


def damage_bytes(path: Path, rng: random.Random) -> None:
    path.write_bytes(mutated_bytes(path.read_bytes(), rng))


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one case."""
    with tempfile.TemporaryDirectory(prefix="mua-fuzz-") as name:
        yield Path(name)


def drawn(subject: str, cases: int, seed: int) -> Iterator[tuple[str, random.Random]]:
    """What each case is called, and what decides it."""
    for number in range(cases):
        yield f"seed {seed}, case {number}", random.Random(f"{subject}/{seed}/{number}")


def outcome(
    function: Callable[[], Any], allowed: tuple[type[Exception], ...]
) -> tuple[Any, Exception | None, list[str]]:
    """What ``function`` gives, or the error of an ``allowed`` type it raises, and the faults of that: a traceback, or a
    message that is not one or several short printable lines."""
    try:
        return function(), None, []
    except allowed as error:
        return None, error, _unfit(str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        return None, None, [f"traceback {type(error).__name__} at {where}: {str(error)[:200]!a}"]


def _unfit(message: str) -> list[str]:
    lines = message.split("\n")
    if not message.strip() or any(not line.strip() for line in lines):
        return ["an empty line of a message"]
    if any(len(line) > LONGEST_LINE for line in lines):
        return [f"a message of {max(map(len, lines))} characters: {message[:100]!a}"]
    return [f"a message that cannot be printed: {line[:300]!a}" for line in lines if not line.isprintable()]


def _containers(value: Any) -> list[Any]:
    found, level = [], [value]
    while level:
        level = [item for item in level if isinstance(item, dict | list)]
        found += level
        level = [inner for item in level for inner in (item.values() if isinstance(item, dict) else item)]
    return found


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))
