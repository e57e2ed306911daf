"""Pages and answers kept on disk under what was asked for, so that a run can be repeated.

One SQLite file with SQLite's own locks, which several processes of a machine may share. The first answer stays; whoever
asks the same later, or at the same time, is given that one.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mua.errors import ConfigError
from mua.types import Json
from mua.untrusted import read_json

log = logging.getLogger(__name__)

LOCK_SECONDS = 30.0


class TextCache:
    """Objects by request. Works in a thread of its own, so that a lock held elsewhere never holds up the event loop."""

    def __init__(self, path: Path, key: str) -> None:
        """``key`` names the setting in messages. Raises :class:`ConfigError` if the file is no cache."""
        self._named = f"{key}: {path}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(path, timeout=LOCK_SECONDS, check_same_thread=False, isolation_level=None)
            self._store.execute("CREATE TABLE IF NOT EXISTS texts (request TEXT PRIMARY KEY, answer TEXT NOT NULL)")
            self._store.execute("SELECT request, answer FROM texts LIMIT 1")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{key}: cannot keep pages in {path}: {error}; name another file, or remove this one"
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page cache")

    async def get(self, request: Json) -> Json | None:
        """What is kept for ``request``."""
        return await self._ask(request, None)

    async def put(self, request: Json, answer: Json) -> Json:
        """Keep ``answer`` unless there is one already; the one that is kept now. A full disk ends no run."""
        return await self._ask(request, json.dumps(answer)) or answer

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    async def _ask(self, request: Json, answer: str | None) -> Json | None:
        text = json.dumps(request, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._kept, digest, answer)
        except sqlite3.Error as error:
            log.warning("%s: %s", self._named, error)
        return None

    def _kept(self, digest: str, answer: str | None) -> Json | None:
        if answer is not None:
            self._store.execute("INSERT OR IGNORE INTO texts VALUES (?, ?)", (digest, answer))
        row = self._store.execute("SELECT answer FROM texts WHERE request = ?", (digest,)).fetchone()
        try:
            kept: Json | None = None if row is None else read_json(row[0])
        except ValueError as error:
            raise ConfigError(
                f"{self._named} holds an answer that cannot be read; name another file, or remove this one"
            ) from error
        return kept
