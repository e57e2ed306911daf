"""What a tool server does wrong, as one episode meets it and as the start of a run does."""

from __future__ import annotations

from enum import StrEnum

from mua.environment.extras import ExtraToolFault, ExtraToolsNotStarted


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
    """It answers, and refuses: 401, 403, or no session."""


class ToolServerFault(ExtraToolFault):
    """A server failed in an episode, which is tried again with another session. The message names the server."""

    def __init__(self, message: str, kind: ServerFaultKind, *, passing: bool | None = None) -> None:
        super().__init__(message, passing=passing)
        self.kind = kind


class ServerNotStarted(ExtraToolsNotStarted):
    """A server gave no first session."""
