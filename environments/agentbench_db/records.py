"""Records of AgentBench's ``data/dbbench/*.jsonl`` as tasks.

One object a line:

===================  ====================================================================================
``description``      the question
``table``            an object, or a list of them: ``table_name`` and ``table_info`` with ``columns`` (each has a
                     ``name``; all are text, whatever their ``type``) and ``rows`` (lists of values)
``type``             a list whose first value is INSERT, UPDATE or DELETE, or else the kind of question
``label``            the values of the answer; of a write, the statement that makes it
``answer_md5``       of a write: the digest of the tables afterwards, as MySQL gave it
``sql``              optional; its ``query`` answers the question, or makes the write
``add_description``  optional; what the agent is told of the table
``evidence``         optional; what else it is told
===================  ====================================================================================

``create``, ``evaluation``, ``example``, ``heads`` and ``source`` say nothing that the task needs. Records with
``user_sqlite`` keep their tables in files that AgentBench does not publish; they are refused.

A folder is read by the names of its files, see :data:`FILES`; a single file is the test split.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from environments._tau.folder import read_lines
from environments.agentbench_db.episode import made_digest, untouched_digest
from environments.agentbench_db.sandbox import SqlError
from environments.agentbench_db.scoring import WRITES
from environments.kit.overlay import digest_of
from mua.environment.protocol import Split, Task
from mua.types import Json
from mua.utils.errors import ConfigError

NAME = "agentbench_db"
FILES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "db_out_new"),
    "validation": ("validation", "dev"),
    "test": ("test", "standard"),
}
"""Files of each split, with ``.jsonl`` or ``.jsonl.gz``; the second is AgentBench's name."""
_EASY_ROWS, _MEDIUM_ROWS = 15, 30


def load(place: Path) -> dict[Split, tuple[Task, ...]]:
    """The tasks of a folder or a file; :class:`ConfigError` names file, line and key of what is wrong."""
    files: dict[Split, list[Path]] = {split: [] for split in FILES}
    if place.is_dir():
        for split, names in FILES.items():
            files[split] = [path for name in names for path in _present(place, name)]
    elif place.exists():
        files["test"] = [place]
    if not any(files.values()):
        known = ", ".join(f"{name}.jsonl" for names in FILES.values() for name in names)
        raise ConfigError(f"environment.data: {place} is no file and no folder with any of {known}")
    return {split: tuple(task for path in paths for task in _tasks(path, split)) for split, paths in files.items()}


def task_of(record: Json, split: Split, name: str, where: str) -> Task:
    """One record; ``where`` names its file and line."""
    kind = _texts(record, "type", where)[0]
    tables = [_table(table, where) for table in _listed(record.get("table"))]
    if record.get("user_sqlite"):
        raise ConfigError(f"{where}: 'user_sqlite': its tables are in a file of their own, which is not supported")
    if not tables:
        raise ConfigError(f"{where}: 'table' must be a table or a list of them")
    data: Json = {
        "kind": kind,
        "difficulty": _difficulty(sum(len(table["rows"]) for table in tables)),
        "question": _text(record, "description", where),
        "about": _text(record, "add_description", where, ""),
        "evidence": _text(record, "evidence", where, ""),
        "tables": tables,
        **_wanted(record, kind, where),
    }
    return Task(name, NAME, split, data)


def _present(folder: Path, name: str) -> list[Path]:
    return [path for path in (folder / f"{name}.jsonl", folder / f"{name}.jsonl.gz") if path.exists()][:1]


def _tasks(path: Path, split: Split) -> list[Task]:
    stem = path.name.removesuffix(".gz").removesuffix(".jsonl")
    records = read_lines(path)
    made = [task_of(one, split, f"{NAME}/{stem}/{n:04d}", f"{path}, record {n}") for n, one in enumerate(records, 1)]
    for task in made:
        if not task.data.get("digest", "given"):
            _check_gold(task, f"{path}, record {int(task.id[-4:])}")
    seen: dict[str, str] = {}
    for task in made:
        digest = digest_of(task.data)
        if digest in seen:
            raise ConfigError(f"{path}: the records of {seen[digest]} and {task.id} are the same")
        seen[digest] = task.id
    return made


def _check_gold(task: Task, where: str) -> None:
    """The tables are compared with what the record's statement makes of them: it has to make something."""
    try:
        changes = made_digest(task) != untouched_digest(task)
    except SqlError as error:
        raise ConfigError(f"{where}: the statement of the write cannot be run: {error}") from error
    if not changes:
        raise ConfigError(f"{where}: the statement of the write changes nothing, so that doing nothing would be right")


def _wanted(record: Json, kind: str, where: str) -> Json:
    """``gold``, the statement that does or answers it, if known; ``digest`` or ``label``, what is compared."""
    sql: Any = record.get("sql") or {}
    query = sql.get("query") if isinstance(sql, dict) else None
    if query is not None and not isinstance(query, str):
        raise ConfigError(f"{where}: 'sql': its 'query' must be a text")
    label = _texts(record, "label", where) if kind not in WRITES or "label" in record else []
    if kind not in WRITES:
        return {"gold": query or "", "label": label}
    gold, digest = query or "".join(label[:1]), _text(record, "answer_md5", where, "")
    if not gold and not digest:
        raise ConfigError(f"{where}: a write needs 'answer_md5', or its statement in 'sql' or 'label'")
    return {"gold": gold, "digest": digest}


def _table(value: Any, where: str) -> Json:
    if not isinstance(value, dict) or not isinstance(value.get("table_info"), dict):
        raise ConfigError(f"{where}: 'table' must have 'table_name' and 'table_info'")
    name, info = _text(value, "table_name", where), value["table_info"]
    columns, rows = info.get("columns"), info.get("rows")
    if not isinstance(columns, list) or not all(
        isinstance(c, dict) and isinstance(c.get("name"), str) for c in columns
    ):
        raise ConfigError(f"{where}: 'table_info': 'columns' must be a list of objects with a 'name'")
    if not columns:
        raise ConfigError(f"{where}: 'table_info': table {name!r} has no columns")
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        raise ConfigError(f"{where}: 'table_info': 'rows' must be lists of {len(columns)} values")
    names = [column["name"] for column in columns]
    if len({one.lower() for one in names}) < len(names):
        raise ConfigError(f"{where}: 'table_info': table {name!r} has two columns of one name")
    return {"name": name, "columns": names, "rows": [[str(value) for value in row] for row in rows]}


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _text(record: Json, key: str, where: str, default: str | None = None) -> str:
    value = record.get(key, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {key!r} must be a text")
    return value


def _texts(record: Json, key: str, where: str) -> list[str]:
    value = record.get(key)
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(one, str | int | float) for one in values):
        raise ConfigError(f"{where}: {key!r} must be a list of texts")
    return [str(one) for one in values]


def _difficulty(rows: int) -> str:
    return "easy" if rows <= _EASY_ROWS else "medium" if rows <= _MEDIUM_ROWS else "hard"
