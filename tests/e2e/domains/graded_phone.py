"""Telecom with a graded reward, so that barely trained policies earn different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graded_desk import Graded

from environments.kit.database import DatabaseEnvironment
from environments.telecom import TelecomDomain
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Split, Task, ToolResult, UserControlled
from mua.types import Json, ToolSchema


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


DOMAIN = GradedPhoneDomain()
