"""Which of tau2-bench's tasks are in which split.

``split_tasks.json`` maps names to lists of task ids. ``train`` and ``test`` are splits of ours too, ``dev`` and
``validation`` are our validation split. The other names are sets of their own, which overlap these: ``base``, all
that tau2-bench reports on, is the union of train and test; telecom's ``small`` and ``full`` are others. With
``environment.options.split: NAME`` the set of that name is the test split and the others are empty.

A file that has none of our names gives its set ``base`` as the test split; where there is no such file, all tasks are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from mua.environment.protocol import Split
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import printable

OURS: dict[str, Split] = {"train": "train", "dev": "validation", "validation": "validation", "test": "test"}
Named: TypeAlias = dict[str, list[str]]
"""Task ids by the file's names."""


def listed_tasks(value: Any, path: Path) -> dict[str, Json]:
    """The entries of ``tasks.json`` by id. ConfigError where one has no id of its own."""
    entries = value.get("tasks") if isinstance(value, dict) else value
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        raise ConfigError(f"{path}: must be a list of objects with an id")
    found: dict[str, Json] = {}
    for number, entry in enumerate(entries):
        name = _id(entry["id"], f"{path}, task {number}: 'id'")
        if name in found:
            raise ConfigError(f"{path}, task {number}: another task has the id {printable(name)!r} too")
        found[name] = entry
    return found


def named_splits(value: Any, path: Path, known: Mapping[str, Json], tasks: Path) -> Named:
    """What ``split_tasks.json`` says, checked against the tasks that there are.

    A set may name tasks that ``tasks.json`` lacks (releases differ in how many of ``full`` it holds), unless it is one
    of ours or is asked for: :func:`dealt` looks at that.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must be an object of lists of task ids")
    found: Named = {}
    for name, ids in value.items():
        if not isinstance(ids, list):
            raise ConfigError(f"{path}: split {printable(name)!r} must be a list of task ids")
        found[name] = [_id(one, f"{path}: a task id of split {printable(name)!r}") for one in ids]
        if name in OURS:
            _check_known(name, found[name], path, known, tasks)
    return found


def dealt(
    named: Named | None, wanted: str | None, path: Path, known: Mapping[str, Json], tasks: Path
) -> dict[Split, list[str]]:
    """Task ids by our splits, in the file's order; ``wanted`` is the option ``split``."""
    if named is not None and wanted is None and not OURS.keys() & named.keys():
        if "base" not in named:
            raise ConfigError(f"{path}: has none of the splits train, dev, validation, test and base")
        wanted = "base"
    if wanted is not None:
        if named is None or wanted not in named:
            have = ", ".join(map(printable, named)) if named else "none, since the folder has no split_tasks.json"
            raise ConfigError(f"environment.options.split: {path} names no split {wanted!r}; it has: {have}")
        _check_known(wanted, named[wanted], path, known, tasks)
        return {"train": [], "validation": [], "test": named[wanted]}
    if named is None:
        return {"train": [], "validation": [], "test": list(known)}
    return _by_our_names(named, path)


def _by_our_names(named: Named, path: Path) -> dict[Split, list[str]]:
    found: dict[Split, list[str]] = {"train": [], "validation": [], "test": []}
    home: dict[str, str] = {}
    for name, split in OURS.items():
        for one in named.get(name, ()):
            if one in home:
                raise ConfigError(f"{path}: task {printable(one)!r} is in the splits {home[one]!r} and {name!r}")
            home[one] = name
            found[split].append(one)
    return found


def _check_known(name: str, ids: Sequence[str], path: Path, known: Mapping[str, Json], tasks: Path) -> None:
    if lost := [one for one in ids if one not in known]:
        raise ConfigError(
            f"{path}: split {printable(name)!r} names task {printable(lost[0])!r}, which {tasks} does not have"
        )
    if len(set(ids)) < len(ids):
        raise ConfigError(f"{path}: split {printable(name)!r} names a task twice")


def _id(value: Any, what: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ConfigError(f"{what} must be a text or a whole number")
    return str(value)
