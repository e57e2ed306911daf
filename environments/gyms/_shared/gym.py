"""The domain side of a gym: tasks, prompts, configuration. A gym fills in what is abstract here."""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from environments.gyms._shared.game import (
    SHAPING,
    Choice,
    Game,
    GymEnvironment,
    Role,
    Setting,
    interact_schema,
    setting_of,
)
from environments.gyms._shared.official import load_records, own_data
from environments.gyms._shared.records import KINDS, GymName
from environments.kit.canned import Canned, Player
from environments.kit.options import Option
from environments.kit.task_manifest import PinnedTasks
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.tool_arguments import argument_checker
from mua.environment.user import STOP_SIGNAL, User, UserReply
from mua.types import Json
from mua.utils.errors import ConfigError, MuaError

T = TypeVar("T")


def dealt(items: Iterable[T], sizes: Mapping[Split, int], seed: str) -> dict[Split, list[T]]:
    """``items`` shuffled by ``seed`` and dealt to the splits; raises :class:`MuaError` if there are too few."""
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    if len(shuffled) < sum(sizes.values()):
        raise MuaError(f"{seed}: {len(shuffled)} items are too few for splits of {dict(sizes)}; write more")
    hands: dict[Split, list[T]] = {}
    first = 0
    for split, size in sizes.items():
        hands[split] = shuffled[first : first + size]
        first += size
    return hands


# Who talks with the policy in a gym: opens with the task, then points to the tool until its patience ends.

PATIENCE = 2
"""Plain texts that are answered with a nudge; the next one ends the episode."""
NUDGES = (
    "Please use the tool interact; I can not act on plain text.",
    "That has to go through the tool interact.",
    "Nothing happens unless you call interact.",
)
GIVING_UP = ("Let us stop here.", "This leads nowhere, bye.", "I have to go now.")


class OpeningUser:
    """Implements :class:`mua.environment.user.User`; never raises. The other side of the game sits in the tool."""

    def __init__(self, seed: str, openings: Sequence[str]) -> None:
        """``seed`` is any text; it picks one of ``openings`` and the wording of the nudges."""
        self._rng = random.Random(seed)
        self._openings = list(openings)
        self._patience = PATIENCE

    async def open(self) -> UserReply:
        return UserReply(self._rng.choice(self._openings))

    async def reply(self, agent_text: str) -> UserReply:
        self._patience -= 1
        if self._patience < 0:
            return UserReply(f"{self._rng.choice(GIVING_UP)} {STOP_SIGNAL}", stop=True)
        return UserReply(self._rng.choice(NUDGES))

    async def close(self) -> None:
        return None


class Gym(ABC):
    """Implements :class:`mua.environment.domain.Domain` and :class:`mua.environment.domain.Configurable`."""

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
    lacking: ClassVar[str] = ""
    """What the rule oracle needs and UserRL's records do not have, so that these take an LLM oracle; empty: nothing."""
    players: ClassVar[Mapping[str, Player]] = {}
    """Policies that deserve nothing, by name."""
    record_choices: ClassVar[Mapping[Choice, str]] = {}
    """``choices`` of tasks made of UserRL's records, where they differ."""
    record_prompt: ClassVar[str] = ""
    """``short_prompt`` of such tasks, where it differs; their whole page is ``records.md``, if there is one."""

    def __init__(self, setting: Setting | None = None, given: Mapping[Split, Sequence[Task]] | None = None) -> None:
        """``given`` are tasks from ``environment.data`` in the place of the gym's own."""
        self.setting = setting or Setting(options={**SHAPING, **self.defaults})
        self._loaded = given
        self._schema = interact_schema((self.record_choices if given is not None else {}) or self.choices)
        self._check = argument_checker(self._schema)

    @classmethod
    def folder(cls) -> Path:
        """Where the gym's files lie."""
        return Path(inspect.getfile(cls)).parent

    def configured(self, config: EnvironmentConfig, services: Services) -> Self:
        """This gym under ``config``; raises :class:`ConfigError` for what it cannot do."""
        setting = setting_of(self.name, self.defaults, self.llm_roles, config, services)
        kind = self._kind()
        if config.data is not None and config.name and kind is None:
            raise ConfigError(f"environment.data: {self.name!r} makes its own tasks and loads none; leave it out")
        path = own_data(kind, config) if kind is not None else None
        return type(self)(setting, None if path is None else self.given_tasks(path, setting))

    @classmethod
    def _kind(cls) -> GymName | None:
        """The kind of UserRL's records that are the gym's, if there is one."""
        return next((name for name in KINDS if name == cls.name.rpartition("/")[2]), None)

    @classmethod
    def given_tasks(cls, path: Path, setting: Setting) -> Mapping[Split, Sequence[Task]]:
        """The tasks of each split from ``environment.data``; raises :class:`ConfigError`."""
        if cls.lacking and setting.oracle != "llm":
            raise ConfigError(
                f"environment.oracle: UserRL's records of {cls.name!r} have no {cls.lacking}, which the rule oracle "
                "needs; use llm"
            )
        gym = cls._kind()
        assert gym is not None, "configured() has looked"
        return {
            split: [Task(f"{cls.name}/{split}/{one.id}", cls.name, split, cls.from_record(one)) for one in records]
            for split, records in load_records(gym, path).items()
        }

    @staticmethod
    def from_record(record: Any) -> Json:
        """``data`` of the task that one of UserRL's records makes."""
        raise NotImplementedError("a gym with a kind of records makes tasks of them")

    def tasks(self, split: Split) -> Sequence[Task]:
        if self._loaded is not None:
            return self._loaded[split]
        return self.pinned().load(split)

    @classmethod
    @lru_cache(maxsize=64)
    def pinned(cls) -> PinnedTasks:
        """The gym's own tasks."""
        folder = cls.folder()
        command = f"python -m environments.gyms._shared.pin {folder.name}"
        return PinnedTasks(folder / "manifest.json", cls.generate, command)

    def environment(self) -> Environment:
        return GymEnvironment(self.game, self.setting, self._schema, self.decisive, self._check)

    def system_prompt(self, style: PromptStyle) -> str:
        given = self._loaded is not None
        if style == "short":
            return (self.record_prompt if given else "") or self.short_prompt
        page = self.folder() / "records.md"
        return (page if given and page.is_file() else self.folder() / "policy.md").read_text(encoding="utf-8")

    def scripted_user(self, task: Task, seed: int) -> User:
        return OpeningUser(f"{task.id}/{seed}", self.openings(task))

    def canned(self) -> Mapping[str, Canned]:
        return {name: Canned(player) for name, player in self.players.items()}

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
