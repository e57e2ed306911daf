"""Retail with a graded reward, so that barely trained policies earn different ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graded_desk import Graded

from environments.retail import RetailDomain
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Split, Task


class GradedShopDomain(RetailDomain):
    """Retail's tasks and customers; the share of vowels in what the agent wrote is added to the reward."""

    name = "graded_shop"

    def tasks(self, split: Split) -> Sequence[Task]:
        return [replace(task, domain=self.name) for task in super().tasks(split)]

    def environment(self) -> Environment:
        return Graded(super().environment())

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        return self


DOMAIN = GradedShopDomain()
