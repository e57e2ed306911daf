"""A private database for every rollout without copying one: an immutable base, shared, and what a rollout changed.

::

    Base     orders ── "#W1" ──► record        parsed once a process, never written
                 ▲
    Overlay  orders ── "#W7" ──► own copy      a record is copied when it is first edited

Reading costs nothing but the lookup; what a rollout holds is the records it edited. The verdict looks at those alone:
two states over the same base are equal exactly when their :meth:`Overlay.changes` are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mua.types import Json

Changes: TypeAlias = dict[str, dict[str, Json | None]]
"""Table -> key -> the record as it is now, None where it was deleted. Holds only what differs from the base."""


@dataclass(frozen=True, slots=True)
class Base:
    """Tables of records by key. Whoever holds one must not write to it: it is every rollout's."""

    tables: Mapping[str, Mapping[str, Json]]

    def digest(self) -> str:
        """sha256 of the whole content; tests show with it that nothing wrote to a base."""
        return digest_of(self.tables)


class Overlay:
    """One rollout's state over a :class:`Base`."""

    __slots__ = ("_base", "_own")

    def __init__(self, base: Base) -> None:
        self._base = base
        self._own: dict[str, dict[str, Json | None]] = {}

    def get(self, table: str, key: str) -> Json | None:
        """The record, to read; None if there is none. Writing to it is a fault: use :meth:`edit`."""
        own = self._own.get(table)
        if own is not None and key in own:
            return own[key]
        return self._base.tables[table].get(key)

    def edit(self, table: str, key: str) -> Json:
        """The rollout's own copy of the record, to write to. KeyError if there is none."""
        own = self._own.setdefault(table, {})
        record = own.get(key)
        if record is None:
            if key in own:
                raise KeyError(key)
            record = own[key] = copied(self._base.tables[table][key])
        return record

    def insert(self, table: str, key: str, record: Json) -> None:
        """Put a new record in, or replace one."""
        self._own.setdefault(table, {})[key] = record

    def delete(self, table: str, key: str) -> None:
        """Take a record out. KeyError if there is none."""
        if self.get(table, key) is None:
            raise KeyError(key)
        self._own.setdefault(table, {})[key] = None

    def items(self, table: str) -> Iterator[tuple[str, Json]]:
        """Every record of a table with its key, to read: the base's order, then insertions."""
        base, own = self._base.tables[table], self._own.get(table)
        if own is None:
            yield from base.items()
            return
        for key, record in base.items():
            current = own.get(key, record)
            if current is not None:
                yield key, current
        for key, inserted in own.items():
            if key not in base and inserted is not None:
                yield key, inserted

    def changes(self) -> Changes:
        """What differs from the base. Records edited back to what they were are no change."""
        found: Changes = {}
        for table, own in self._own.items():
            base = self._base.tables[table]
            changed = {key: record for key, record in own.items() if not same(record, base.get(key))}
            if changed:
                found[table] = changed
        return found


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a state departs from gold, each as ``table/key/field/...`` -> values. Empty when they are equal."""

    wrong: dict[str, Json] = field(default_factory=dict)
    """Changed in both, to different values: ``{"is": ..., "should_be": ...}``."""
    missing: dict[str, Json] = field(default_factory=dict)
    """Changed by gold alone: ``{"should_be": ...}``."""
    extra: dict[str, Json] = field(default_factory=dict)
    """Changed by the rollout alone: ``{"is": ...}``."""
    right: int = 0
    """Fields that both changed to the same value."""

    @property
    def size(self) -> int:
        """Fields that differ."""
        return len(self.wrong) + len(self.missing) + len(self.extra)

    def as_json(self) -> Json:
        return {"wrong": self.wrong, "missing": self.missing, "extra": self.extra, "right": self.right}


def difference(base: Base, actual: Changes, gold: Changes) -> Difference:
    """Compare two states over ``base`` field by field (lists count as one field)."""
    have, want = _flat(base, actual), _flat(base, gold)
    found = Difference(right=sum(path in have and same(have[path], value) for path, value in want.items()))
    for path in sorted(have.keys() | want.keys()):
        is_now, should_be = have.get(path), want.get(path)
        if path in have and path in want:
            if not same(is_now, should_be):
                found.wrong[path] = {"is": is_now, "should_be": should_be}
        elif path in want:
            found.missing[path] = {"should_be": should_be}
        else:
            found.extra[path] = {"is": is_now}
    return found


def digest_of(value: Any) -> str:
    """sha256 of the canonical JSON: keys sorted, types kept apart (3, 3.0 and "3" differ)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def same(one: Any, other: Any) -> bool:
    """Equal as JSON, types included: Python takes 3, 3.0 and True for equal where tau-bench's hash does not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def copied(value: Any) -> Any:
    """A deep copy of JSON data, several times as fast as ``copy.deepcopy``."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [copied(inner) for inner in value]
    return value


def _flat(base: Base, changes: Changes) -> dict[str, Any]:
    """Every changed field by path."""
    found: dict[str, Any] = {}
    for table, records in changes.items():
        for key, record in records.items():
            _changed_fields(f"{table}/{key}", base.tables[table].get(key), record, found)
    return found


def _changed_fields(path: str, before: Any, after: Any, found: dict[str, Any]) -> None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            _changed_fields(f"{path}/{key}", before.get(key), after.get(key), found)
    elif not same(before, after):
        found[path] = after
