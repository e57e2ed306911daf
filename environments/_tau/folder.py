"""Read a folder of official data.

tau-bench: one file a table (``users.json.gz``), ``policy.md`` and ``tasks_{train,dev,test}.jsonl``, one task a line
with ``id``, ``instruction``, ``actions`` and ``outputs``; ``dev`` is our validation split. A file may be plain or end
in ``.gz``, and missing task files are empty splits.

tau2-bench: ``db.json`` with all tables, ``tasks.json``, ``policy.md`` and, if there, ``split_tasks.json`` with task ids
by split (:mod:`environments._tau.splits`). Telecom has a reader of its own for its database and policies
(:mod:`environments.telecom.official`).

Files are read up to :data:`MAX_BYTES`, unpacked or not, and JSON up to the depth that other files of this project have.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import Any, Literal

from environments._tau.splits import dealt, listed_tasks, named_splits
from environments._tau.tasks import task_of
from environments._tau.tau2 import task_of_tau2
from environments.kit.overlay import Base
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, open_file
from mua.utils.strict_json import read_json as read_json_text

Form = Literal["tau", "tau2"]
"""Which benchmark a folder is of."""
_FILES: dict[Split, str] = {"train": "tasks_train", "validation": "tasks_dev", "test": "tasks_test"}
MAX_BYTES = 1 << 28
"""Of one file, unpacked; the largest official one has 14 million."""


@dataclass(frozen=True, slots=True)
class OfficialData:
    """What a folder holds."""

    folder: Path
    form: Form
    base: Base
    policy: str
    tasks: dict[Split, tuple[Task, ...]]
    """In the file's order; ids are the file's."""


def load_official(domain: str, folder: Path, tables: Sequence[str], split: str | None = None) -> OfficialData:
    """Read ``folder``; raises :class:`ConfigError` that names the file and what is wrong with it.

    ``split``: the set of tau2-bench's tasks to take as test split; None for the splits that the folder has.
    """
    check_folder(domain, folder)
    policy = found(folder, "policy.md")
    form: Form = "tau2" if find(folder, "db.json") is not None else "tau"
    if form == "tau2":
        database, tasks = read_json(found(folder, "db.json")), tau2_tasks(domain, folder, split)
    else:
        if split is not None:
            raise ConfigError(f"environment.options.split: {folder} is tau-bench's, which has train, dev and test only")
        database, tasks = {name: read_json(found(folder, f"{name}.json")) for name in tables}, _tasks(domain, folder)
    for name in tables:
        if not isinstance(database, dict) or not isinstance(database.get(name), dict):
            raise ConfigError(f"{folder}: table {name!r} must be a JSON object of records by id")
    if not any(tasks.values()):
        raise ConfigError(f"{folder}: holds no tasks; expected tasks_test.jsonl (tau-bench) or tasks.json (tau2-bench)")
    return OfficialData(folder, form, Base({name: database[name] for name in tables}), read_text(policy), tasks)


def check_folder(domain: str, folder: Path) -> None:
    """ConfigError where ``environment.data`` is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"environment.data: {folder} is no folder; give the one that holds {domain}'s official data")


def read_text(path: Path) -> str:
    """The text of a file, unpacked if its name ends in ``.gz``.

    ConfigError for one that cannot be read or unpacked, is no text, or is larger than :data:`MAX_BYTES`.
    """
    try:
        with open_file(path) as file:
            packed = file if path.suffix != ".gz" else io.BufferedReader(GzipFile(fileobj=file))
            data = packed.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path}: has more than {MAX_BYTES:,} bytes")
        return data.decode()
    except (BadGzipFile, zlib.error, EOFError, ValueError, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error


def read_json(path: Path) -> Any:
    """The JSON in a file; ConfigError for a text that is none."""
    try:
        return read_json_text(read_text(path), depth=MAX_FILE_DEPTH)
    except JsonError as error:
        raise ConfigError(f"{path}: is no JSON: {error}") from error


def read_lines(path: Path) -> list[Json]:
    """One JSON object a line; ConfigError that names the line that is none."""
    found = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = read_json_text(line, depth=MAX_FILE_DEPTH)
        except JsonError as error:
            raise ConfigError(f"{path}, line {number}: is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object")
        found.append(value)
    return found


def find(folder: Path, name: str) -> Path | None:
    """The file of that name, plain or packed, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def found(folder: Path, name: str) -> Path:
    """The file of that name, plain or packed; ConfigError where there is neither."""
    path = find(folder, name)
    if path is None:
        raise ConfigError(f"{folder}: has no {name} (or {name}.gz), which official data needs")
    return path


def tau2_tasks(
    domain: str, folder: Path, split: str | None, task_of: Callable[..., Task] = task_of_tau2
) -> dict[Split, tuple[Task, ...]]:
    """The tasks of tau2-bench's ``tasks.json`` by our splits, each made by ``task_of``."""
    path, splits = found(folder, "tasks.json"), find(folder, "split_tasks.json")
    entries = listed_tasks(read_json(path), path)
    where = splits or folder
    named = named_splits(read_json(splits), splits, entries, path) if splits is not None else None
    return {
        ours: tuple(_made(task_of, domain, ours, entries[one], f"{path}, task {one}") for one in ids)
        for ours, ids in dealt(named, split, where, entries, path).items()
    }


def _tasks(domain: str, folder: Path) -> dict[Split, tuple[Task, ...]]:
    tasks: dict[Split, tuple[Task, ...]] = {}
    for split, name in _FILES.items():
        path = find(folder, f"{name}.jsonl")
        lines = read_lines(path) if path is not None else []
        tasks[split] = tuple(_made(task_of, domain, split, line, f"{path}, task {n}") for n, line in enumerate(lines))
    return tasks


def _made(make: Callable[..., Task], domain: str, split: Split, entry: Json, where: str) -> Task:
    try:
        return make(domain, split, entry, where)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: is not of the form of a task: {type(error).__name__}: {error}") from error
