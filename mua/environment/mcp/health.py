"""What a tool server does wrong, as an episode and the start of a run meet it, and how much it may say unasked."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from time import monotonic

from mua.utils.errors import EnvironmentFault, MuaError

FAULT_KEY = "mua.fault"
"""In ``_meta`` of a result with an error: no policy is to blame. Holds ``kind`` (``environment`` or ``judge``, whose
endpoint failed) and ``passing``, whether another try may help."""
BURST = 1000
"""Messages that a server may send at once beyond one for each request."""
PER_SECOND = 200
"""Of these, what comes back each second."""


class ServerFaultKind(StrEnum):
    """What went wrong with a server."""

    CRASHED = "crashed"
    """Its process ended, or its connection."""
    HUNG = "hung"
    """No answer within a deadline."""
    FLOODED = "flooded"
    """A message beyond ``message_bytes``, or messages without end."""
    GARBAGE = "garbage"
    """What it answered is no JSON-RPC, or no result of a tool."""
    TOOLS_CHANGED = "tools_changed"
    """Its tools are others than when the rollout began."""
    REFUSED = "refused"
    """It answers, and refuses: 401, 403."""
    FORGOTTEN = "forgotten"
    """It no longer knows the session, as after a restart: nothing was done."""
    TOLD = "told"
    """It says itself that a call failed by no doing of the policy (:data:`FAULT_KEY`)."""


class ToolServerFault(EnvironmentFault):
    """A server failed in an episode, which is tried again with another session. The message names the server.

    ``by_policy`` where a call brought it about and another session opens as if nothing had happened.
    """

    passing = True

    def __init__(self, message: str, kind: ServerFaultKind, *, passing: bool | None = None) -> None:
        super().__init__(message, passing=passing)
        self.kind = kind


class ServerNotStarted(MuaError):
    """A server gave no first session. No episode's fault to be retried: it ends the run."""


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
        self.session_id = ""
        """Of a server behind a URL that keeps sessions."""
        self.stray = ""
        """The last line on standard output that is no message."""

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
