"""One episode's database: SQLite in memory, for statements that somebody else wrote.

AgentBench runs MySQL 8 with every column ``TEXT``. What that means for the statements of a policy is kept where SQLite
can: texts, names and comments are read as MySQL reads them (:mod:`environments.agentbench_db.dialect`), text compares
without case and accents (collation :data:`COLLATION`), ``SHOW TABLES`` and ``DESCRIBE`` are answered, and the functions
of :data:`FUNCTIONS` are there. It differs in these, which docs/official_data.md repeats:

* a column compared with a number compares as text (``'9' > 10``): write ``col + 0 > 10`` or ``CAST(col AS DECIMAL)``;
* whole numbers divide to whole numbers, and ``||`` joins texts;
* there is no ``REGEXP`` (Python's would have no bound), no ``LIMIT`` in ``UPDATE`` and ``DELETE``, no stored procedure.

Bounds: each statement has :data:`MAX_STEPS` steps of SQLite's machine, comparisons of texts included, so that what is
too much is the same everywhere; :data:`MAX_SECONDS` and the limits on memory and sizes are for what steps do not
measure. Nothing outside the database can be reached: attaching, pragmas, extensions, virtual tables and ``VACUUM`` are
refused.
"""

from __future__ import annotations

import hashlib
import random
import re
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

from environments.agentbench_db.dialect import for_sqlite

MAX_STEPS = 5_000_000
"""Of one statement."""
MAX_SECONDS = 5.0
"""Of one statement."""
MAX_ROWS = 5_000
"""Of one result."""
MAX_TEXT = 100_000
"""Bytes of one value, one row or one statement."""
MAX_PAGES = 4_096
"""Of 4 KiB, of one database."""
MAX_HEAP = 1 << 29
"""Bytes that SQLite holds in a process, all its databases together."""
COLLATION = "mysql"
Rows: TypeAlias = list[tuple[Any, ...]]

_CHECKED_EVERY = 1_000
_REFUSED = frozenset(
    {
        sqlite3.SQLITE_ATTACH,
        sqlite3.SQLITE_DETACH,
        sqlite3.SQLITE_PRAGMA,
        sqlite3.SQLITE_CREATE_VTABLE,
        sqlite3.SQLITE_DROP_VTABLE,
    }
)
_REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"})
_SHOW_TABLES = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)
_DESCRIBE = re.compile(
    r"\s*(?:describe|desc|show\s+(?:full\s+)?columns\s+(?:from|in))\s+(`[^`]+`|\"[^\"]+\"|\w+)\s*;?\s*", re.IGNORECASE
)
_VACUUM = re.compile(r"[\s;]*(?:explain\s+(?:query\s+plan\s+)?)?vacuum\b", re.IGNORECASE)


class SqlError(Exception):
    """What the database refuses, in words for the policy."""


class Sandbox:
    """A database of its own, with statements bounded."""

    def __init__(self, seed: str) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._steps, self._until, self._spent = 0, 0.0, False
        self._rng = random.Random(seed)
        self._prepare()

    def create(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Make a table whose columns are all text, as AgentBench does; SqlError where SQLite cannot."""
        shape = ", ".join(f"{quoted(column)} TEXT COLLATE {COLLATION}" for column in columns)
        places = ", ".join("?" * len(columns))
        self._start()
        try:
            self._connection.execute(f"CREATE TABLE {quoted(name)} ({shape})")
            self._connection.executemany(
                f"INSERT INTO {quoted(name)} VALUES ({places})", [tuple(map(str, row)) for row in rows]
            )
        except sqlite3.Error as error:
            raise SqlError(str(error)) from error

    def execute(self, sql: str) -> Rows:
        """The rows that one statement gives; SqlError for one that fails, is refused, or takes too much."""
        if _SHOW_TABLES.fullmatch(sql):
            return self._run("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid")
        if (described := _DESCRIBE.fullmatch(sql)) is not None:
            return self._described(described[1].strip('`"'))
        if len(sql) > MAX_TEXT:
            raise SqlError(f"the statement is longer than {MAX_TEXT:,} characters")
        written = for_sqlite(sql)
        if _VACUUM.match(written):
            raise SqlError("VACUUM is not allowed")
        return self._run(written)

    def texts(self, name: str, columns: Sequence[str]) -> Rows:
        """What stands in these columns of a table, in no order; SqlError where it or one of them is gone."""
        chosen = ", ".join(quoted(column) for column in columns)
        known = {row[0].lower() for row in self._described(name)}
        if lost := [column for column in columns if column.lower() not in known]:
            raise SqlError(f"table {name} has no column {lost[0]}")
        return self._run(f"SELECT {chosen} FROM {quoted(name)}")

    def close(self) -> None:
        self._connection.close()

    def _prepare(self) -> None:
        run = self._connection
        for pragma in (f"max_page_count = {MAX_PAGES}", "temp_store = MEMORY", f"hard_heap_limit = {MAX_HEAP}"):
            run.execute(f"PRAGMA {pragma}")
        run.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT)
        run.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_TEXT)
        run.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        run.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 200)
        run.create_collation(COLLATION, self._compare)
        for name, count, function in FUNCTIONS:
            run.create_function(name, count, function, deterministic=True)
        run.create_function("random", 0, lambda: self._rng.randint(-(2**63), 2**63 - 1))
        run.create_function("rand", 0, self._rng.random)
        run.create_function("randomblob", 1, lambda count: self._rng.randbytes(min(max(int(count), 1), MAX_TEXT)))
        run.set_progress_handler(self._tick, _CHECKED_EVERY)
        run.set_authorizer(_allowed)

    def _run(self, sql: str) -> Rows:
        self._start()
        try:
            cursor = self._connection.execute(sql)
            rows = cursor.fetchmany(MAX_ROWS + 1)
            cursor.close()
        except (sqlite3.Error, sqlite3.Warning, MemoryError, OverflowError, ValueError) as error:
            raise SqlError(self._reason(error)) from error
        if self._spent:
            raise SqlError(self._reason(None))
        if len(rows) > MAX_ROWS:
            raise SqlError(f"the result has more than {MAX_ROWS:,} rows")
        return rows

    def _described(self, name: str) -> Rows:
        """As MySQL describes a table: name, type, whether it may be null, key, default, extra."""
        found = self._run(
            f"SELECT sql FROM sqlite_master WHERE type = 'table' AND lower(name) = {_literal(name.lower())}"
        )
        if not found:
            raise SqlError(f"Table {name!r} does not exist")
        cursor = self._connection.execute(f"SELECT * FROM {quoted(name)} LIMIT 0")
        return [(column[0], "text", "YES", "", None, "") for column in cursor.description]

    def _start(self) -> None:
        self._steps, self._spent, self._until = 0, False, time.monotonic() + MAX_SECONDS

    def _tick(self) -> int:
        self._steps += _CHECKED_EVERY
        if self._steps > MAX_STEPS or time.monotonic() > self._until:
            self._spent = True
        return int(self._spent)

    def _compare(self, one: str, other: str) -> int:
        """Called by SQLite, also while it sorts, where :meth:`_tick` is not."""
        self._steps += 1
        if self._spent:
            return 0
        if self._steps > MAX_STEPS or (self._steps % _CHECKED_EVERY == 0 and time.monotonic() > self._until):
            self._spent = True
            self._connection.interrupt()
            return 0
        first, second = _plain(one), _plain(other)
        return (first > second) - (first < second)

    def _reason(self, error: BaseException | None) -> str:
        if self._spent:
            return f"the statement took more than {MAX_STEPS:,} steps or {MAX_SECONDS:g} seconds"
        return "the statement took too much memory" if isinstance(error, MemoryError) else str(error)


def quoted(name: str) -> str:
    """An identifier that is read as nothing else."""
    return '"' + name.replace('"', '""') + '"'


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _allowed(action: int, first: str | None, second: str | None, database: str | None, trigger: str | None) -> int:
    if action in _REFUSED or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _REFUSED_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


@lru_cache(maxsize=4096)
def _plain(text: str) -> str:
    """Without case and accents; trailing spaces count, as in MySQL 8's collation."""
    return "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char)).casefold()


# ---- functions that MySQL has and SQLite lacks, on what a column of text or a number gives


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _known(function: Callable[..., Any]) -> Callable[..., Any]:
    """NULL where any argument is."""

    def run(*values: Any) -> Any:
        return None if any(value is None for value in values) else function(*values)

    return run


def _concat_ws(separator: Any, *values: Any) -> Any:
    return None if separator is None else _text(separator).join(_text(one) for one in values if one is not None)


def _substring_index(text: Any, delimiter: Any, count: Any) -> str:
    parts, number, mark = [_text(text)], int(count), _text(delimiter)
    if not mark or not number:
        return ""
    parts = _text(text).split(mark)
    return mark.join(parts[:number] if number > 0 else parts[number:])


def _locate(wanted: Any, text: Any, start: Any = 1) -> int:
    return _plain(_text(text)).find(_plain(_text(wanted)), max(int(start) - 1, 0)) + 1


FUNCTIONS: tuple[tuple[str, int, Callable[..., Any]], ...] = (
    ("concat", -1, _known(lambda *values: "".join(map(_text, values)))),
    ("concat_ws", -1, _concat_ws),
    ("if", 3, lambda condition, yes, no: yes if condition not in (None, 0, "0", "") else no),
    ("left", 2, _known(lambda text, count: _text(text)[: max(int(count), 0)])),
    ("right", 2, _known(lambda text, count: _text(text)[-int(count) :] if int(count) > 0 else "")),
    ("substring_index", 3, _known(_substring_index)),
    ("locate", 2, _known(_locate)),
    ("locate", 3, _known(_locate)),
    ("char_length", 1, _known(lambda text: len(_text(text)))),
    ("lcase", 1, _known(lambda text: _text(text).lower())),
    ("ucase", 1, _known(lambda text: _text(text).upper())),
    ("reverse", 1, _known(lambda text: _text(text)[::-1])),
    ("md5", 1, _known(lambda text: hashlib.md5(_text(text).encode(), usedforsecurity=False).hexdigest())),
    ("greatest", -1, _known(max)),
    ("least", -1, _known(min)),
)
"""Name, number of arguments (-1: any), function."""
