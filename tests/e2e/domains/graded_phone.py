"""Telecom with a graded reward, so that barely trained policies earn different ones; and users who act for sure.

A small random model never chooses to call one of the phone's tools, and says nothing that is text. :func:`guided` makes
it: the server is asked for a call, which the model fills in, and then for one of some sentences, which it chooses.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from graded_desk import Graded

from environments.kit.database import DatabaseEnvironment
from environments.telecom import TelecomDomain
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Split, Task, ToolResult, UserControlled
from mua.environment.user import UserReply
from mua.types import Json, ToolSchema
from mua.users.factory import Placement
from mua.users.llm import LlmUser


class GradedPhone(Graded):
    """Telecom's environment, with the user's phone."""

    def __init__(self, inner: Environment) -> None:
        assert isinstance(inner, DatabaseEnvironment)
        super().__init__(inner)

    def user_tools(self) -> Sequence[ToolSchema]:
        assert isinstance(self._inner, UserControlled)
        return self._inner.user_tools()

    def user_call(self, name: str, arguments: Json) -> ToolResult:
        assert isinstance(self._inner, UserControlled)
        return self._inner.user_call(name, arguments)


class GradedPhoneDomain(TelecomDomain):
    """Telecom's tasks and customers with :class:`GradedPhone`."""

    name = "graded_phone"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, domain=self.name) for task in super().tasks(split)[:8]]

    def environment(self) -> Environment:
        return GradedPhone(super().environment())

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        return self


SENTENCES = [
    "My phone has no service.", "It says no service.", "Yes, I did that.", "No, I am at home.", "I see no bars.",
]  # fmt: skip
SAYS = {
    "type": "object", "properties": {"say": {"enum": SENTENCES}}, "required": ["say"], "additionalProperties": False,
}  # fmt: skip


class GuidedUser(LlmUser):
    """Calls a tool and then says one of :data:`SENTENCES`: the model chooses which, the server that it does."""

    async def _answer(self, text: str) -> UserReply:
        assert self._tools is not None, "it has a phone"
        self._history.append({"role": "user", "content": text})
        seed, offered = self._seed + 1000 * len(self._history), [schema.openai() for schema in self._tools.schemas()]
        await self._act(await self._endpoint.chat(self._history, seed=seed, tools=offered, tool_choice="required"))
        reply = await self._endpoint.chat(self._history, seed=seed, response_format=SAYS)
        said = json.loads(reply.text)["say"]
        self._history.append({"role": "assistant", "content": said})
        return UserReply(said)


def guided(placement: Placement) -> GuidedUser:
    """``user.kind: graded_phone:guided``."""
    assert placement.endpoint is not None, "user.llm is needed"
    return GuidedUser(placement.endpoint, placement.domain.persona(placement.task), placement.seed)


DOMAIN = GradedPhoneDomain()
