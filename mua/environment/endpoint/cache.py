"""Replies kept on disk under the whole request that they answer, for repeated evaluations and reproduced runs.

One SQLite file with SQLite's own locks: every write is one transaction, and several processes of a machine may share
it. The first reply to a request stays; whoever asks the same later, or at the same time, is given that one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from mua.environment.endpoint.chat import Completion, FunctionCall
from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import read_json

log = logging.getLogger(__name__)

LOCK_SECONDS = 30.0
"""How long a write waits for another process's."""


class JsonCache:
    """Objects by request. Works in a thread of its own, so that a lock held elsewhere never holds up the event loop."""

    def __init__(self, path: Path, key: str, what: str, on_fault: Callable[[], None] = lambda: None) -> None:
        """``key`` names the setting in messages, ``what`` what is kept. Raises :class:`ConfigError` if the
        file is no cache.

        ``on_fault`` is called when the file cannot be read or written later: a disk that is full ends no run, because
        whoever was asked still answers.
        """
        self._named = f"{key}: {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False, isolation_level=None)
            self._store.execute("CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL)")
            self._store.execute("SELECT request, reply FROM replies LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{key}: cannot keep {what} in {path}: {error}; name another file, or remove this one"
            ) from error
        self._on_fault = on_fault
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reply cache")

    async def get(self, request: Json) -> Json | None:
        """The reply kept for ``request``."""
        return await self._ask(request, None)

    async def put(self, request: Json, reply: Json) -> Json:
        """Keep ``reply`` unless there is one already; the one that is kept now."""
        return await self._ask(request, json.dumps(reply, ensure_ascii=False)) or reply

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    def unreadable(self) -> ConfigError:
        """The error of a reply that is not what was written."""
        return ConfigError(f"{self._named} holds a reply that cannot be read; name another file, or remove this one")

    async def _ask(self, request: Json, reply: str | None) -> Json | None:
        text = json.dumps(request, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._kept, digest, reply)
        except sqlite3.Error as error:
            self._on_fault()
            log.warning("%s: %s", self._named, error)
        return None

    def _kept(self, digest: str, reply: str | None) -> Json | None:
        """The reply of that request, which is ``reply`` if there was none."""
        if reply is not None:
            self._store.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (digest, reply))
        row = self._store.execute("SELECT reply FROM replies WHERE request = ?", (digest,)).fetchone()
        if row is None:
            return None
        try:
            kept = read_json(row[0])
        except ValueError as error:
            raise self.unreadable() from error
        if not isinstance(kept, dict):
            raise self.unreadable()
        return kept


class ResponseCache:
    """Completions by request, in a :class:`JsonCache`."""

    def __init__(self, path: Path, key: str, on_fault: Callable[[], None] = lambda: None) -> None:
        self._cache = JsonCache(path, key, "replies", on_fault)

    async def get(self, request: Json) -> Completion | None:
        """The reply kept for ``request``."""
        kept = await self._cache.get(request)
        return None if kept is None else self._completion(kept)

    async def put(self, request: Json, completion: Completion) -> Completion:
        """Keep ``completion`` unless there is a reply already; the one that is kept now."""
        return self._completion(await self._cache.put(request, asdict(completion)))

    async def close(self) -> None:
        await self._cache.close()

    def _completion(self, fields: Json) -> Completion:
        try:
            return Completion(**fields | {"calls": tuple(FunctionCall(**call) for call in fields["calls"])})
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._cache.unreadable() from error
