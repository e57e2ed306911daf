"""What can go wrong with a database, as errors that a person is meant to read. No password is in any message."""

from __future__ import annotations

import sqlite3

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from mua.utils.errors import MuaError
from mua.utils.masking import mask_secrets

_REFUSED = ("password authentication failed", "no pg_hba.conf entry", "does not exist", "no password supplied")
"""In what libpq says of a connection that was not made, which has no SQLSTATE."""


class StoreError(MuaError):
    """The store cannot be used as it is; the message names it and what to do."""


class NoStore(StoreError):
    """Nobody has made a store there, so far."""


class StoreUnreachable(StoreError):
    """The database does not answer. What was asked may be asked again."""

    passing = True


class StoreFull(StoreError):
    """The disk of the database is full."""


class DamagedData(StoreError):
    """A row or blob is not what was written. The message names it."""


def shown(url: URL | str) -> str:
    """A database's URL without its password; a file's path alone."""
    if isinstance(url, str):
        return mask_secrets(url)
    if url.get_backend_name() == "sqlite":
        return str(url.database)
    return url.set(query={}, drivername=url.get_backend_name()).render_as_string(hide_password=True)


def explained(error: SQLAlchemyError, url: URL) -> StoreError | None:
    """``error`` in words for a person, or None where it is a fault of the program (a constraint, wrong SQL)."""
    if not isinstance(error, DBAPIError):
        return None
    text = " ".join(str(error.orig).split())[:400]
    if url.password:
        text = text.replace(str(url.password), "***")
    kind = _of_sqlite(error.orig) if isinstance(error.orig, sqlite3.Error) else _of_postgres(error, text)
    if kind is None:
        return None
    made, words = kind
    return made(f"store {shown(url)}: {words.format(text)}")


def _of_sqlite(error: sqlite3.Error) -> tuple[type[StoreError], str] | None:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreUnreachable, "another process keeps it locked ({})"
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return StoreFull, "its disk is full, or fails ({}); make room there and give the same command again"
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StoreError, "cannot be opened or written ({}); give this user the right to, for its folder too"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreError, "the file is damaged, or no database ({}); restore it from a copy, or move it away"
    if "decode to UTF-8" in str(error):
        return StoreError, "a text in it is damaged ({}); restore it from a copy"
    return None


def _of_postgres(error: DBAPIError, text: str) -> tuple[type[StoreError], str] | None:
    state = getattr(error.orig, "sqlstate", None) or ""
    if state == "53100":
        return StoreFull, "its disk is full ({}); make room there and give the same command again"
    if state[:2] in ("28", "3D") or (not state and any(part in text for part in _REFUSED)):
        return StoreError, "refused ({}); check user, password and database of store.url"
    if state in ("42501", "25006"):
        return StoreError, "may not be written ({}); give its user the rights of an owner"
    if state in ("XX001", "XX002"):
        return StoreError, "the database is damaged ({}); restore it from a copy"
    if state[:2] == "40":
        return StoreUnreachable, "gave up this transaction for another one ({})"
    passing = ("08", "53", "57", "55")  # connection, resources, shutdown, lock
    # What psycopg says by itself, when there is no connection or it was lost.
    without_server = type(error.orig).__name__ in ("OperationalError", "InterfaceError", "ConnectionTimeout")
    if state[:2] in passing or error.connection_invalidated or without_server:
        return StoreUnreachable, "does not answer: {}"
    return None
