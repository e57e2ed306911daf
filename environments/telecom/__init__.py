"""Vela Mobile, a carrier whose users have tools too: a phone, and an agent's advice to act on.

``environment.data`` may name a folder of tau2-bench's telecom instead (:mod:`environments.telecom.official`).

Options (``environment.options``): ``compact`` (true or false): tools answer without spaces and without empty fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from environments._service import ServiceDomain, Sides
from environments.kit.database import RewardForm, ServiceDesk
from environments.kit.options import read_options
from environments.telecom.canned import CANNED
from environments.telecom.environment import TelecomEnvironment, desk
from environments.telecom.expert import Expert
from environments.telecom.official import official_telecom
from environments.telecom.tasks import PINNED, gold_moves
from environments.telecom.user import GONE, customer, describe_person, part_of
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Move, Task
from mua.utils.errors import ConfigError


class TelecomDomain(ServiceDomain):
    """Implements :class:`mua.environment.domain.Domain`, ``Expert``, ``HasPersona``, ``Attacked`` and
    ``Configurable``."""

    name = "telecom"
    short_prompt = "You are the support of Vela Mobile."
    sides = Sides(Path(__file__).parent, PINNED.load, customer, part_of, Expert, CANNED)

    def __init__(self, reward: RewardForm = "all_or_nothing", *, compact: bool = False) -> None:
        self._reward: RewardForm = reward
        self._compact = compact
        self._desk: ServiceDesk | None = None

    def environment(self) -> Environment:
        if self._desk is None:
            self._desk = desk(self._reward, compact=self._compact)
        return TelecomEnvironment(self._desk)

    def persona(self, task: Task) -> str:
        return describe_person(task)

    def wishes(self, task: Task) -> Sequence[Mapping[str, Sequence[str]]]:
        wanted = zip(task.data["wishes"], part_of(task).wanted(), strict=True)
        return [texts | {"shown": [GONE[wish["about"]]]} if wish["about"] in GONE else texts for wish, texts in wanted]

    def gold(self, task: Task) -> Sequence[Move]:
        return gold_moves(task)

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """Takes ``reward`` and the option ``compact``; in a mix, other domains' settings are left to them."""
        if config.data is not None and self.name in (config.name, config.data.name):  # a mix gives PATH/telecom
            return official_telecom(config, services)
        if config.oracle != "rule" or config.show_reward:
            key = "oracle" if config.oracle != "rule" else "show_reward"
            raise ConfigError(f"environment.{key}: domain {self.name!r} has nothing to set there; leave it out")
        options = read_options(self.name, {"compact": False}, config)
        return TelecomDomain(config.reward, compact=bool(options["compact"]))


DOMAIN = TelecomDomain()
