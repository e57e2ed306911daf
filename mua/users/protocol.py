"""What a simulated user looks like to the episode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

STOP_SIGNAL = "###STOP###"
"""A user message that contains this ends the conversation (tau-bench's convention)."""


@dataclass(frozen=True, slots=True)
class UserReply:
    """One utterance of the user. ``stop`` says that the user considers the conversation over."""

    text: str
    stop: bool = False


@runtime_checkable
class User(Protocol):
    """The other side of the conversation.

    Any fault that is the user's own (endpoint down, empty reply) is raised as
    :class:`mua.errors.UserFault`; the episode then ends as ``user_error`` and is retried, never scored.
    """

    async def open(self) -> UserReply:
        """The first utterance."""

    async def reply(self, agent_text: str) -> UserReply:
        """Answer what the agent just said to the user."""

    async def close(self) -> None:
        """Give back connections. Called exactly once."""
