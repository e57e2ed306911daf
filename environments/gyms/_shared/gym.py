"""The domain side of a gym: tasks, prompts, configuration. A gym fills in what is abstract here."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

from environments.gyms._shared.game import Game, GymEnvironment, interact_schema
from environments.gyms._shared.pinned import load_pinned
from environments.gyms._shared.settings import Choice, Option, Role, Setting, setting_of
from environments.gyms._shared.shaping import SHAPING
from environments.gyms._shared.user import OpeningUser
from mua.config.schema import EnvironmentConfig
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.schema import argument_checker
from mua.users.protocol import User
from mua.users.services import Services


class Gym(ABC):
    """Implements :class:`mua.environment.protocol.Domain` and :class:`mua.environment.protocol.Configurable`."""

    name: str = ""
    isolation: Isolation = "inline"
    user_in_tools: bool = True
    held_out: bool = False
    """For evaluation by default; a train split exists all the same."""
    choices: ClassVar[Mapping[Choice, str]] = {}
    """The legal choices and what each does with the content, as the tool's schema tells the policy."""
    decisive: ClassVar[Choice] = "answer"
    """The choice that solves the task; with its budget used up the episode is over."""
    defaults: ClassVar[Mapping[str, Option]] = {}
    """Options under ``environment.options`` and their defaults, besides those of every gym."""
    llm_roles: ClassVar[tuple[Role, ...]] = ()
    """Endpoints that ``environment.oracle: llm`` needs; empty: there is no such oracle."""
    short_prompt: ClassVar[str] = ""

    def __init__(self, setting: Setting | None = None) -> None:
        self.setting = setting or Setting(options={**SHAPING, **self.defaults})
        self._schema = interact_schema(self.choices)
        self._check = argument_checker(self._schema)

    @classmethod
    def folder(cls) -> Path:
        """Where the gym's files lie."""
        return Path(inspect.getfile(cls)).parent

    def configured(self, config: EnvironmentConfig, services: Services) -> Self:
        """This gym under ``config``; raises :class:`mua.errors.ConfigError` for what it cannot do."""
        return type(self)(setting_of(self.name, self.defaults, self.llm_roles, config, services))

    def tasks(self, split: Split) -> Sequence[Task]:
        return load_pinned(self.folder(), split, type(self).generate)

    def environment(self) -> Environment:
        return GymEnvironment(self.game, self.setting, self._schema, self.decisive, self._check)

    def system_prompt(self, style: PromptStyle) -> str:
        if style == "short":
            return self.short_prompt
        return (self.folder() / "policy.md").read_text(encoding="utf-8")

    def scripted_user(self, task: Task, seed: int) -> User:
        return OpeningUser(f"{task.id}/{seed}", self.openings(task))

    @classmethod
    @abstractmethod
    def generate(cls, split: Split) -> Iterable[Task]:
        """The tasks of a split, from seeds and data files alone."""

    @abstractmethod
    def game(self, task: Task, seed: int) -> Game:
        """A fresh episode under ``self.setting``."""

    @abstractmethod
    def openings(self, task: Task) -> Sequence[str]:
        """Wordings of the first utterance, at least two."""

    @abstractmethod
    def persona(self, task: Task) -> str:
        """What an LLM that plays the other side is told."""

    @abstractmethod
    def gold(self, task: Task) -> Sequence[Move]:
        """Moves, made by :func:`environments.gyms._shared.act`, that solve ``task`` whatever is answered."""
