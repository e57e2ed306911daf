"""Replies kept on disk under the whole request that they answer, for repeated evaluations and reproduced runs.

One SQLite file with SQLite's own locks: every write is one transaction, and several processes of a machine may share
it. The first reply to a request stays; whoever asks the same later, or at the same time, is given that one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from mua.errors import ConfigError
from mua.types import Json
from mua.untrusted import read_json
from mua.users.chat import Completion, FunctionCall

P = ParamSpec("P")
T = TypeVar("T")

LOCK_SECONDS = 30.0
"""How long a write waits for another process's."""


class ResponseCache:
    """Replies by request. Works in a thread of its own, so that a lock held elsewhere never holds up the event loop."""

    def __init__(self, path: Path, key: str) -> None:
        """``key`` names the setting in messages. Raises :class:`mua.errors.ConfigError` if the file is no cache."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False, isolation_level=None)
            self._store.execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            self._store.execute("SELECT request, reply FROM replies LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{key}: cannot keep replies in {path}: {error}; name another file, or remove this one"
            ) from error
        self._mend = f"{key}: {path} holds a reply that cannot be read; name another file, or remove this one"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reply cache")

    async def get(self, request: Json) -> Completion | None:
        """The reply kept for ``request``."""
        return await self._in_thread(self._get, _digest(request))

    async def put(self, request: Json, completion: Completion) -> Completion:
        """Keep ``completion`` unless there is a reply already; the one that is kept now."""
        return await self._in_thread(self._put, _digest(request), completion)

    async def close(self) -> None:
        await self._in_thread(self._store.close)
        self._thread.shutdown()

    def _get(self, digest: str) -> Completion | None:
        row = self._store.execute("SELECT reply FROM replies WHERE request = ?", (digest,)).fetchone()
        try:
            return None if row is None else _completion(row[0])
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(self._mend) from error

    def _put(self, digest: str, completion: Completion) -> Completion:
        reply = json.dumps(asdict(completion), ensure_ascii=False)
        self._store.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (digest, reply))
        return self._get(digest) or completion

    async def _in_thread(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(function, *arguments, **named))


def _digest(request: Json) -> str:
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _completion(reply: str) -> Completion:
    fields = read_json(reply)
    return Completion(**fields | {"calls": tuple(FunctionCall(**call) for call in fields["calls"])})
