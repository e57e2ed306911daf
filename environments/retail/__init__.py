"""A shop: users, orders, products with variants, payments; sixteen tools, and customers with one to four wishes.

Tools and database have tau-bench retail's form, so that ``environment.data`` may name a folder with the official data
of tau-bench or tau2-bench instead (:mod:`environments._tau`). On the shop's own data two options are known:
``environment.options.compact: true`` shortens the tools' answers (:mod:`environments.retail.views`), and
``environment.options.practice: N`` is another shop, with a training split only, for demonstrations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from environments._service import ServiceDomain, Sides
from environments._tau import official_domain
from environments.kit.database import DatabaseEnvironment, RewardForm, ServiceDesk
from environments.kit.options import read_options
from environments.retail.canned import CANNED
from environments.retail.expert import Expert
from environments.retail.shop import shop
from environments.retail.tasks import PINNED, customer, gold, part_of, practice_tasks
from environments.retail.tools import TABLES, TOOLS, tools_of
from environments.retail.verdict import code
from environments.retail.views import compact
from mua.config.schema import EnvironmentConfig
from mua.environment.domain import Domain
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Move, Split, Task

SHORT_PROMPT = "You are the shop's desk."


class RetailDomain(ServiceDomain):
    """Implements :class:`mua.environment.domain.Domain`, ``HasPersona`` and ``Attacked`` over the shop's own data."""

    name = "retail"
    short_prompt = SHORT_PROMPT
    sides = Sides(Path(__file__).parent, PINNED.load, customer, part_of, Expert, CANNED)

    def __init__(
        self, reward: RewardForm = "all_or_nothing", *, short_answers: bool = False, practice: int = 0
    ) -> None:
        self._reward: RewardForm = reward
        self._short_answers = short_answers
        self._practice = practice

    def tasks(self, split: Split) -> Sequence[Task]:
        if self._practice:
            return practice_tasks(self._practice) if split == "train" else ()
        return PINNED.load(split)

    def environment(self) -> Environment:
        return DatabaseEnvironment(_desk(self._reward, self._short_answers, self._practice))

    def gold(self, task: Task) -> Sequence[Move]:
        """The customer is found, all is read that has to be, then the gold calls, and what has to be told."""
        return gold(task)

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """With ``reward``, ``data`` and ``options``; raises :class:`ConfigError` for unknown options."""
        if config.data is not None:
            domain = official_domain(self.name, config, services, TABLES, tools_of, short_prompt=SHORT_PROMPT)
            domain.desk.code = code(binding=False)
            return domain
        options = read_options(self.name, {"compact": False, "practice": 0}, config)
        return RetailDomain(config.reward, short_answers=bool(options["compact"]), practice=int(options["practice"]))


@lru_cache(maxsize=8)
def _desk(reward: RewardForm, short_answers: bool, practice: int) -> ServiceDesk:
    """Made once a process: it holds the database and the gold states found so far."""
    tools = [compact(tool) for tool in TOOLS] if short_answers else TOOLS
    return ServiceDesk(shop(practice), tools, reward=reward, code=code())


DOMAIN = RetailDomain()
