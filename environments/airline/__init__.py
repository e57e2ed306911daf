"""An airline: flights by day and cabin, reservations, customers with payment methods; tau-bench's tools and schema.

Without further settings the database and the tasks are this project's own, made by a seeded generator
(:mod:`environments.airline.world`, :mod:`environments.airline.tasks`). ``environment.data`` names a folder with
tau-bench's or tau2-bench's airline instead (:mod:`environments._tau`).

``environment.options.compact: true`` shortens the tools' answers (:mod:`environments.airline.tools`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from environments._service import ServiceDomain, Sides
from environments._tau import official_domain
from environments._tau.folder import Form
from environments.airline.canned import CANNED
from environments.airline.expert import Expert
from environments.airline.rules import OWN, TAU, TAU2
from environments.airline.tasks import PINNED, customer, part_of
from environments.airline.telling import first_of, wording
from environments.airline.tools import airline_tools, compact
from environments.airline.verdict import code
from environments.airline.world import world
from environments.kit.database import DatabaseEnvironment, RewardForm, ServiceDesk, Tool
from environments.kit.options import read_options
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Move, Task
from mua.utils.errors import ConfigError

TABLES = ("flights", "reservations", "users")
_SHORT_PROMPT = "You are the agent of an airline."


class AirlineDomain(ServiceDomain):
    """Implements :class:`mua.environment.domain.Domain` over the generated airline."""

    name = "airline"
    short_prompt = _SHORT_PROMPT
    sides = Sides(Path(__file__).parent, PINNED.load, customer, part_of, Expert, CANNED)

    def __init__(self, reward: RewardForm = "all_or_nothing", short_answers: bool = False) -> None:
        self._reward: RewardForm = reward
        self._short_answers = short_answers

    @cached_property
    def desk(self) -> ServiceDesk:
        """Made when it is first needed: listing domains should not build airlines."""
        tools = airline_tools(OWN)
        shown = list(map(compact, tools)) if self._short_answers else tools
        return ServiceDesk(world(), shown, reward=self._reward, code=code())

    def environment(self) -> Environment:
        return DatabaseEnvironment(self.desk)

    def gold(self, task: Task) -> Sequence[Move]:
        """The look-ups, the writes, then what has to be said."""
        looked: list[Move] = [first_of(demand) for demand in task.data["demands"]]
        written: list[Move] = [(action["name"], action["arguments"]) for action in task.data["actions"]]
        return [*looked, *written, *map(wording, task.data["facts"])]

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """Official data, the form of reward, short answers; ConfigError for anything else."""
        if config.oracle != "rule" or config.show_reward:
            key = "oracle" if config.oracle != "rule" else "show_reward"
            raise ConfigError(f"environment.{key}: domain {self.name!r} has nothing to set there; leave it out")
        if config.data is not None:
            return official_domain(self.name, config, services, TABLES, official_tools, short_prompt=_SHORT_PROMPT)
        options = read_options(self.name, {"compact": False}, config)
        return AirlineDomain(config.reward, bool(options["compact"]))


def official_tools(form: Form) -> list[Tool]:
    """The tools over official data."""
    return airline_tools(TAU if form == "tau" else TAU2)


DOMAIN = AirlineDomain()
