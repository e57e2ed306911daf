"""Which of UserRL's records a gym gets from ``environment.data``, and in which split each is.

``environment.data`` may name

- a clone of UserRL: the records in ``gyms/<Gym>Gym/<gym>gym/data``, dealt by the tables in ``data/<...>_multiturn``;
- a folder with record files, and the tables that deal them if there are any (``train.parquet``, ``test.jsonl``); tables
  alone where the folder lies in a clone, which has the records;
- a record file (:mod:`environments.gyms._shared.records` names them);
- a table: ``.parquet`` or its rows as ``.jsonl``. The records are those beside it, or of the clone that it lies in.

Where there are tables, a record is in the split that its row names, and records that no row names are no tasks. Where
there are none, the file's name tells (``tau_train.json``); a file that names no split is the test split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, get_args

from environments.gyms._shared.records import (
    GymName,
    PersuadeRecord,
    Record,
    Row,
    of_rows,
    read_record,
    read_records,
    read_rows,
)
from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Split
from mua.utils.errors import ConfigError
from mua.utils.strict_json import printable

Dealt: TypeAlias = Mapping[Split, Sequence[Record]]
NAMED: Mapping[str, Split] = {
    "train": "train", "dev": "validation", "val": "validation", "validation": "validation", "test": "test",
}  # fmt: skip
"""Splits as UserRL's files and rows may name them."""
_TABLES = (".parquet", ".jsonl", ".jsonl.gz")
_HEIGHT = 3
"""Folders above that of a table in which its clone is looked for."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where UserRL keeps a gym's data."""

    stems: tuple[str, ...]
    """How the names of record files begin: UserRL's own, then the gym's."""
    tables: str
    """The folder of the gym's tables under ``data``."""


LAYOUTS: Mapping[GymName, Layout] = {
    "function": Layout(("functions", "function"), "function_multiturn"),
    "telepathy": Layout(("all_entities_refined", "telepathy"), "telepathy_multiturn"),
    "turtle": Layout(("all_stories_refined", "turtle"), "turtle_multiturn"),
    "intention": Layout(("all_intentions", "intention"), "intention_multiturn"),
    "travel": Layout(("travelgym_data", "travel"), "travel_multiturn_onechoice"),
    "search": Layout(("questions", "search"), "bamboogle_multiturn"),
    "persuade": Layout(("all_statements_refined", "persuade"), "persuasion_multiturn"),
    "tau": Layout(("tau",), "tau_multiturn"),
}


def own_data(gym: GymName, config: EnvironmentConfig) -> Path | None:
    """What of ``environment.data`` is the gym's; None: it keeps its own tasks.

    In a mix (and so among ``evaluation.domains``) it reads the folder of its name under ``environment.data``, or a
    clone or table, which is for all gyms. It keeps its own tasks where that is a folder without one of its name, or the
    record file of another gym. ConfigError for a path that is not there, or a file of no gym's name.
    """
    path = config.data
    if path is None:
        return None
    if not path.exists():
        raise ConfigError(f"environment.data: {path}: there is no such file or folder")
    if config.name or path.name == gym or is_clone(path) or _is_table(path):
        return path
    if path.is_dir():
        return None
    owners = [name for name in LAYOUTS if _is_named(name, path)]
    if not owners:
        raise ConfigError(
            f"environment.data: {path}: whose records these are its name does not tell; in a mix name a folder with a "
            "folder for each gym, a clone of UserRL, or a table"
        )
    return path if gym in owners else None


def is_clone(path: Path) -> bool:
    """Whether ``path`` is the root of a clone of UserRL."""
    return any(_in_clone(path, gym).is_dir() for gym in LAYOUTS)


def has_records(gym: GymName, path: Path) -> bool:
    """Whether there are records or tables of them at ``path``, or it is one itself."""
    return bool(_found(gym, path)[0]) or not path.is_dir()


def load_records(gym: GymName, path: Path) -> Dealt:
    """The records of each split; :class:`ConfigError` that names the file and what is wrong with it."""
    files, tables = _found(gym, path)
    read = {file: read_records(gym, file) for file in files}
    _check_apart(read)
    every = [record for records in read.values() for record in records]
    if tables:
        return _by_rows(gym, tables, every)
    if not every:
        names = " or ".join(f"{stem}.json" for stem in LAYOUTS[gym].stems)
        raise ConfigError(
            f"environment.data: {path}: no records of gyms/{gym} there; expected {names}, a clone of UserRL, or a "
            "table beside such a file"
        )
    dealt: dict[Split, list[Record]] = {split: [] for split in get_args(Split)}
    for file, records in read.items():
        dealt[_split_of(file)] += records
    return dealt


def _found(gym: GymName, path: Path) -> tuple[list[Path], list[Path]]:
    """Record files and tables."""
    if path.is_dir():
        if is_clone(path):
            return _record_files(gym, _in_clone(path, gym)), _tables(path / "data" / LAYOUTS[gym].tables)
        tables = _tables(path)
        return (_near(gym, path) if tables else _record_files(gym, path)), tables
    return (_near(gym, path.parent), [path]) if _is_table(path) else ([path], [])


def _near(gym: GymName, folder: Path) -> list[Path]:
    """The record files in a folder of tables, or in the clone that it lies in."""
    if files := _record_files(gym, folder):
        return files
    clones = (_in_clone(above, gym) for above in list(folder.absolute().parents)[:_HEIGHT])
    return next((_record_files(gym, home) for home in clones if home.is_dir()), [])


def _in_clone(root: Path, gym: GymName) -> Path:
    return root / "gyms" / f"{gym.capitalize()}Gym" / f"{gym}gym" / "data"


def _record_files(gym: GymName, folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if _is_named(gym, file))


def _is_named(gym: GymName, file: Path) -> bool:
    """Whether a file is called as the gym's records are."""
    stems = "|".join(LAYOUTS[gym].stems)
    return re.fullmatch(rf"(?:{stems})(?:_\w+)?\.json(?:\.gz)?", file.name) is not None


def _tables(folder: Path) -> list[Path]:
    """Tables by the names of splits; ConfigError where one is there in two forms."""
    tables = []
    for name in NAMED:
        forms = [file for ending in _TABLES if (file := folder / f"{name}{ending}").is_file()]
        if len(forms) > 1:
            raise ConfigError(f"environment.data: {forms[0]} and {forms[1].name} are one table twice; keep one of them")
        tables += forms
    return tables


def _is_table(path: Path) -> bool:
    return path.is_file() and path.name.endswith(_TABLES)


def _split_of(file: Path) -> Split:
    words = file.name.partition(".")[0].split("_")
    return NAMED.get(words[-1], "test")


def _check_apart(read: Mapping[Path, Sequence[Record]]) -> None:
    """ConfigError where two files have a record of one id."""
    homes: dict[str, Path] = {}
    for file, records in read.items():
        for record in records:
            if (other := homes.setdefault(record.id, file)) != file:
                raise ConfigError(f"{file}: the record {printable(record.id)!r} stands in {other} too")


def _by_rows(gym: GymName, tables: Sequence[Path], records: Sequence[Record]) -> Dealt:
    dealt: dict[Split, list[Record]] = {split: [] for split in get_args(Split)}
    taken: dict[str, str] = {}
    for table in tables:
        for where, row, record in _named(gym, table, records):
            if row.split not in NAMED:
                raise ConfigError(f"{where}: 'extra_info.split' must be one of {', '.join(NAMED)}")
            if record.id in taken:
                raise ConfigError(f"{where}: the record {printable(record.id)!r} is named by {taken[record.id]} too")
            taken[record.id] = where
            dealt[NAMED[row.split]].append(record)
    if not taken:
        raise ConfigError(f"environment.data: {', '.join(map(str, tables))}: no row is of gyms/{gym}")
    return dealt


def _named(gym: GymName, table: Path, records: Sequence[Record]) -> Iterator[tuple[str, Row, Record]]:
    """The gym's rows with their records; those of persuade bring all there is of theirs."""
    rows = read_rows(table)
    if not records and gym != "persuade" and any(row.gym == gym for row in rows):
        raise ConfigError(
            f"environment.data: {table}: its rows name records and do not hold them; put "
            f"{LAYOUTS[gym].stems[0]}.json beside it, or leave it in its clone of UserRL"
        )
    if records or gym != "persuade":
        for number, row, record in of_rows(rows, {gym: records}, str(table)):
            yield f"{table}, row {number}", row, record
        return
    for number, row in enumerate(rows):
        if row.gym == gym:
            where = f"{table}, row {number}"
            yield where, row, read_record(PersuadeRecord, row.given, where)
