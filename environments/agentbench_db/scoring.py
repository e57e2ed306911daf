"""AgentBench's verdict on a database task: is an answer the label, are the tables what they should be.

Rules are those of AgentBench's ``dbbench`` (its function-calling version): values are cleaned (:func:`cleaned`); two
single values agree when they are numbers at most :data:`TOLERANCE` apart or equal texts; lists of numbers agree when
they can be paired so; other lists agree as sets. What MySQL answered is read as a Python literal, never evaluated.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Sequence
from typing import Any

from environments.agentbench_db.sandbox import Rows

TOLERANCE = 1e-2
WRITES = ("INSERT", "DELETE", "UPDATE")
"""Types of tasks that are judged by the tables."""
_NOTHING = frozenset({"", "none", "null", "undefined", "nan", "inf", "infinity", "-inf", "-infinity"})
_LONGEST_CONCAT = 1024
"""Bytes that MySQL's GROUP_CONCAT gives at most by default; AgentBench's digests are made of that."""


def agrees(answer: Any, label: Any) -> bool:
    """Whether what was committed (a list of texts, or one) is the label."""
    ours, theirs = cleaned(answer), cleaned(label)
    numbers = [_number(value) for value in ours], [_number(value) for value in theirs]
    if all(value is not None for value in (*numbers[0], *numbers[1])):
        return len(ours) == len(theirs) and _paired(*numbers)
    return ours[0] == theirs[0] if len(ours) == len(theirs) == 1 else set(ours) == set(theirs)


def cleaned(value: Any) -> list[str]:
    """The values of an answer or a label, each in its plain form."""
    if isinstance(value, str):
        value = _literal(value.strip())
    if not isinstance(value, list | tuple):
        value = [value]
    return [_plain(one[0] if isinstance(one, tuple) and len(one) == 1 else one) for one in value]


def table_digest(rows: Rows) -> str:
    """What AgentBench's query gives for a table: md5 over the sorted beginnings of the rows' md5s."""
    if not rows:
        return "None"
    hashes = sorted(_md5(",".join(str(value) for value in row if value is not None))[:5] for row in rows)
    return _md5(",".join(hashes)[:_LONGEST_CONCAT])


def joined(digests: Sequence[str]) -> str:
    """The digest of several tables."""
    return "_".join(sorted(digests))


def _paired(ours: Sequence[float | None], theirs: Sequence[float | None]) -> bool:
    left = list(theirs)
    for one in ours:
        near = next((i for i, other in enumerate(left) if abs((one or 0.0) - (other or 0.0)) <= TOLERANCE), None)
        if near is None:
            return False
        left.pop(near)
    return True


def _literal(text: str) -> Any:
    """A list that is written as one; the text itself otherwise."""
    if not (text.startswith("[") and text.endswith("]")):
        return text
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        found = [part.strip() for part in text[1:-1].split(",") if part.strip()]
    return found if isinstance(found, list) else [found]


def _plain(value: Any) -> str:
    """Without quotes, percent sign and thousands separators; what stands for nothing is "0"."""
    text = "" if value is None else str(value).strip().strip("'\"").strip()
    if text.endswith("%"):
        return text[:-1].strip()
    if not (text.startswith("[") or text.endswith("]")):
        text = text.replace(",", "")
    return "0" if text.lower() in _NOTHING else text


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
