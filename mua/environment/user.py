"""What a simulated user looks like to the episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mua.environment.protocol import ToolResult
from mua.types import Json, ToolSchema
from mua.utils.errors import Refusal, UserFaultKind

STOP_SIGNAL = "###STOP###"
"""A user message that contains this ends the conversation (tau-bench's convention)."""


@dataclass(frozen=True, slots=True)
class UserReply:
    """One utterance of the user. ``stop`` says that the user considers the conversation over."""

    text: str
    stop: bool = False
    tools: Sequence[ToolSchema] = ()
    """Tools that the policy has from now on. ``text`` describes them, for policies whose instructions cannot change."""
    flags: Sequence[Refusal] = ()
    """What is wrong with it, where it is said all the same (``user.check: flag``)."""

    @property
    def leak(self) -> bool:
        """Whether it quotes the user's hidden instructions word for word."""
        return any(flag.kind is UserFaultKind.LEAKS_INSTRUCTION for flag in self.flags)


@runtime_checkable
class User(Protocol):
    """The other side of the conversation.

    Any fault that is the user's own (endpoint down, empty reply) is a :class:`UserFault` of some
    :class:`UserFaultKind`; whatever else it raises becomes one. The episode then ends as ``user_error``, is
    retried with a fresh environment and user, and never scored. What cannot be a user's words
    (:mod:`mua.users.utterance_check`) is such a fault too, whoever said it.
    """

    async def open(self) -> UserReply:
        """The first utterance."""

    async def reply(self, agent_text: str) -> UserReply:
        """Answer what the agent just said to the user."""

    async def close(self) -> None:
        """Give back connections. Called exactly once."""


class UserTools(Protocol):
    """The user's own tools in one episode (dual control). What is called through it is kept in the trajectory."""

    def schemas(self) -> Sequence[ToolSchema]:
        """The tools; none where the environment gives the user none."""

    async def call(self, name: str, arguments: Json) -> ToolResult:
        """Run one of them under ``environment.call_seconds``. Mistakes are results with ``error`` set."""


@runtime_checkable
class ToolUser(Protocol):
    """A user that acts as well as talks."""

    def take_tools(self, tools: UserTools) -> None:
        """Called once, before :meth:`User.open`, where the environment has tools for the user."""
