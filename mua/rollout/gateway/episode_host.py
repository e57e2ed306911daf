"""What the HTTP side needs of an episode."""

from __future__ import annotations

from typing import Protocol

from mua.types import Json, ToolSchema


class EpisodeHost(Protocol):
    """What an episode offers its agent beside the policy. Raises :class:`Refused` for what cannot be served."""

    def task(self) -> Json:
        """``id``, ``domain``, ``instructions``, ``user`` (the first message) and ``tools`` in OpenAI's form."""

    def tools(self) -> list[ToolSchema]:
        """The tools of the domain, as they are now."""

    async def call_tool(self, name: str, arguments: Json) -> Json:
        """``text``, ``error`` and ``ended``: whether the episode is over by this call."""

    async def tell_user(self, text: str) -> Json:
        """The user's ``text``, and ``stop``: whether the conversation is over."""

    def report(self, report: Json) -> None:
        """Take the agent's own verdict."""
