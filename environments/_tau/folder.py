"""Read a folder of official data.

tau-bench: one file a table (``users.json.gz``), ``policy.md`` and ``tasks_{train,dev,test}.jsonl``, one task a line
with ``id``, ``instruction``, ``actions`` and ``outputs``; ``dev`` is our validation split. A file may be plain or end
in ``.gz``, and missing task files are empty splits.

tau2-bench: ``db.json`` with all tables, ``tasks.json``, ``policy.md`` and, if there, ``split_tasks.json`` with task ids
by split; without it all tasks are in the test split.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from environments._tau.tasks import task_of
from environments._tau.tau2 import task_of_tau2
from mua.environment.overlay import Base
from mua.environment.protocol import Split, Task
from mua.errors import ConfigError
from mua.types import Json
from mua.untrusted import MAX_FILE_DEPTH, JsonError, read_file
from mua.untrusted import read_json as read_json_text

Form = Literal["tau", "tau2"]
"""Which benchmark a folder is of."""
_FILES: dict[Split, str] = {"train": "tasks_train", "validation": "tasks_dev", "test": "tasks_test"}
_NAMES: dict[str, Split] = {"train": "train", "dev": "validation", "validation": "validation", "test": "test"}


@dataclass(frozen=True, slots=True)
class OfficialData:
    """What a folder holds."""

    folder: Path
    form: Form
    base: Base
    policy: str
    tasks: dict[Split, tuple[Task, ...]]
    """In the file's order; ids are the file's."""


def load_official(domain: str, folder: Path, tables: Sequence[str]) -> OfficialData:
    """Read ``folder``; raises :class:`mua.errors.ConfigError` that names the file and what is wrong with it."""
    if not folder.is_dir():
        raise ConfigError(f"environment.data: {folder} is no folder; give the one that holds {domain}'s official data")
    policy = _found(folder, "policy.md")
    form: Form = "tau2" if _find(folder, "db.json") is not None else "tau"
    if form == "tau2":
        database, tasks = read_json(_found(folder, "db.json")), _tau2_tasks(domain, folder)
    else:
        database, tasks = {name: read_json(_found(folder, f"{name}.json")) for name in tables}, _tasks(domain, folder)
    for name in tables:
        if not isinstance(database.get(name), dict):
            raise ConfigError(f"{folder}: table {name!r} must be a JSON object of records by id")
    if not any(tasks.values()):
        raise ConfigError(f"{folder}: holds no tasks; expected tasks_test.jsonl (tau-bench) or tasks.json (tau2-bench)")
    return OfficialData(folder, form, Base({name: database[name] for name in tables}), read_text(policy), tasks)


def read_text(path: Path) -> str:
    """The text of a file, unpacked if its name ends in ``.gz``. ConfigError for one that cannot be unpacked."""
    data = read_file(path)
    try:
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error


def read_json(path: Path) -> Any:
    """The JSON in a file; ConfigError for a text that is none."""
    try:
        return read_json_text(read_text(path), strict=False, depth=MAX_FILE_DEPTH)
    except JsonError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error


def read_lines(path: Path) -> list[Json]:
    """One JSON object a line; ConfigError that names the line that is none."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = read_json_text(line, strict=False, depth=MAX_FILE_DEPTH)
        except JsonError as error:
            raise ConfigError(f"{path}, line {number}: is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object")
        found.append(value)
    return found


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def _found(folder: Path, name: str) -> Path:
    path = _find(folder, name)
    if path is None:
        raise ConfigError(f"{folder}: has no {name} (or {name}.gz), which official data needs")
    return path


def _tasks(domain: str, folder: Path) -> dict[Split, tuple[Task, ...]]:
    tasks: dict[Split, tuple[Task, ...]] = {}
    for split, name in _FILES.items():
        path = _find(folder, f"{name}.jsonl")
        lines = read_lines(path) if path is not None else []
        tasks[split] = tuple(_made(task_of, domain, split, line, f"{path}, task {n}") for n, line in enumerate(lines))
    return tasks


def _tau2_tasks(domain: str, folder: Path) -> dict[Split, tuple[Task, ...]]:
    path = _found(folder, "tasks.json")
    listed = read_json(path)
    if not isinstance(listed, list) or not all(isinstance(entry, dict) and "id" in entry for entry in listed):
        raise ConfigError(f"{path}: must be a list of objects with an id")
    entries = {str(entry["id"]): entry for entry in listed}
    splits = _find(folder, "split_tasks.json")
    named: dict[str, list[str]] = read_json(splits) if splits is not None else {"test": list(entries)}
    tasks: dict[Split, list[Task]] = {"train": [], "validation": [], "test": []}
    for name, ids in named.items():
        if (split := _NAMES.get(name)) is None:
            continue  # "base" and "train+test" are unions of the others
        if lost := [one for one in ids if one not in entries]:
            raise ConfigError(f"{splits}: split {name!r} names task {lost[0]!r}, which {path} does not have")
        tasks[split] += [_made(task_of_tau2, domain, split, entries[one], f"{path}, task {one}") for one in ids]
    return {split: tuple(found) for split, found in tasks.items()}


def _made(make: Callable[..., Task], domain: str, split: Split, entry: Json, where: str) -> Task:
    try:
        return make(domain, split, entry, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: is not of the form of a task: {type(error).__name__}: {error}") from error
