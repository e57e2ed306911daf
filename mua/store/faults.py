"""What can go wrong with a database, as errors that a person is meant to read. No password is in any message."""

from __future__ import annotations

import re

from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from mua.errors import MuaError

_FULL = ("disk is full", "No space left", "could not extend file", "disk I/O error", "53100")
_READ_ONLY = ("readonly database", "read-only transaction", "unable to open database file")
_DAMAGED = ("malformed", "not a database", "invalid page", "could not read block")
_BUSY = ("database is locked", "database table is locked")
_REFUSED = ("password authentication failed", "no pg_hba.conf entry", "does not exist", "permission denied")
_PASSWORD = re.compile(r"(://[^\s/:@]*:)[^\s@]*(@)")


class StoreError(MuaError):
    """The store cannot be used as it is; the message names it and what to do."""


class StoreUnreachable(StoreError):
    """The database does not answer. What was asked may be asked again."""

    passing = True


class StoreFull(StoreError):
    """The disk of the database is full."""


class DamagedRecord(StoreError):
    """A record is not what was written. The message names it."""


def shown(url: URL | str) -> str:
    """A database's URL without its password; a file's path alone."""
    if isinstance(url, str):
        return _PASSWORD.sub(r"\1***\2", url)
    if url.get_backend_name() == "sqlite":
        return url.database or "a database in memory"
    return url.set(query={}).render_as_string(hide_password=True)


def explained(error: SQLAlchemyError, url: URL) -> StoreError | None:
    """``error`` in words for a person, or None where it is a fault of the program (a constraint, wrong SQL)."""
    text = _first_line(error, url)
    name = f"store {shown(url)}"
    if any(part in text for part in _FULL):
        return StoreFull(f"{name}: its disk is full ({text}); make room there and give the same command again")
    if any(part in text for part in _DAMAGED):
        return StoreError(f"{name}: the database is damaged ({text}); restore it from a backup or move it away")
    if any(part in text for part in _READ_ONLY):
        return StoreError(f"{name}: cannot be written ({text}); give this user the right to write there")
    if any(part in text for part in _BUSY):
        return StoreUnreachable(f"{name}: another process keeps it locked ({text})")
    if any(part in text for part in _REFUSED) and not isinstance(error, DBAPIError):
        return StoreError(f"{name}: refused: {text}")
    if not isinstance(error, DBAPIError):
        return None
    if error.connection_invalidated or _lost(error):
        if any(part in text for part in _REFUSED):
            return StoreError(f"{name}: refused: {text}; check user, password and database in store.url")
        return StoreUnreachable(f"{name}: does not answer: {text}")
    return None


def _lost(error: DBAPIError) -> bool:
    """Whether the connection is gone, or could not be made: psycopg then has no SQLSTATE of a statement."""
    if not isinstance(error, OperationalError) and type(error).__name__ != "InterfaceError":
        return False
    state = getattr(error.orig, "sqlstate", None)
    return state is None or state[:2] in ("08", "57", "53", "28", "3D")


def _first_line(error: SQLAlchemyError, url: URL) -> str:
    origin = getattr(error, "orig", None) or error
    text = " ".join(str(origin).split())[:400]
    if url.password:
        text = text.replace(str(url.password), "***")
    return text
