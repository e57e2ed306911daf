"""Whether a session can still be used, why not, and how much a server may say without being asked."""

from __future__ import annotations

import asyncio
from time import monotonic

from mua.environment.mcp.server_faults import ServerFaultKind

BURST = 1000
"""Messages that a server may send at once beyond one for each request."""
PER_SECOND = 200
"""Of these, what comes back each second."""


class Flood(Exception):
    """More than a server may say."""


class SpeechBudget:
    """A bucket of messages and one of bytes; each request that is sent pays for one answer."""

    def __init__(self, message_bytes: int) -> None:
        self._longest = message_bytes
        self._messages, self._bytes = float(BURST), 4.0 * message_bytes
        self._filled = monotonic()

    def asked(self) -> None:
        """A request leaves."""
        self._messages += 1
        self._bytes += self._longest

    def spend(self, messages: int, size: int) -> None:
        """So much has come. Raises :class:`Flood`."""
        now = monotonic()
        passed, self._filled = now - self._filled, now
        if self._messages < BURST:
            self._messages = min(self._messages + PER_SECOND * passed, BURST)
        if self._bytes < 4 * self._longest:
            self._bytes = min(self._bytes + self._longest * passed, 4 * self._longest)
        self._messages -= messages
        self._bytes -= size
        if self._messages < 0:
            raise Flood(f"it sends messages without end, more than {PER_SECOND} per second that nothing asked for")
        if self._bytes < 0:
            raise Flood("it sends bytes without end that nothing asked for")


class Health:
    """The first thing that went wrong with a session, and the end of what its server said on standard error."""

    def __init__(self, message_bytes: int) -> None:
        self.over = asyncio.Event()
        """The session is lost, or is to be closed."""
        self.budget = SpeechBudget(message_bytes)
        self.kind: ServerFaultKind | None = None
        self.reason = ""
        self.passing: bool | None = None
        self.said = ""
        self.status = 0
        """Last HTTP status that was an error."""
        self.session_id = ""
        """Of a server behind a URL that keeps sessions."""
        self.stray = ""
        """The last line on standard output that is no message."""

    @property
    def lost(self) -> bool:
        """Whether something went wrong that no further call survives."""
        return self.kind is not None

    def lose(self, kind: ServerFaultKind, reason: str, *, passing: bool | None = None) -> None:
        """Note what went wrong, if it is the first thing."""
        if self.kind is None:
            self.kind, self.reason, self.passing = kind, reason, passing
        self.over.set()

    def told(self) -> str:
        """Why it is lost, with what the server said."""
        told = self.reason
        if self.stray:
            told += f"; on standard output it said {self.stray!r}, which is no message"
        return told + (f"; on standard error it last said: {self.said}" if self.said else "")
