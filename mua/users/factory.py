"""Users by configuration: one factory a run, one user an episode.

A kind of user of your own is a hook (:mod:`mua.utils.hooks`). It gets a :class:`Placement` and gives a
:class:`mua.environment.user.User`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mua.config.schema import UserConfig
from mua.environment.domain import Domain, scripted_user
from mua.environment.endpoint.services import ChatClient, Services
from mua.environment.protocol import Task
from mua.environment.selection import Selection
from mua.environment.user import User
from mua.users.llm import LlmUser
from mua.users.personas import load_prompt, personas_named, style_of
from mua.users.recorded import ReplayedUser, load_recordings
from mua.users.task_check import Vocabulary
from mua.utils.errors import ConfigError
from mua.utils.hooks import call_hook, check_attributes, is_hook, load_hook


@dataclass(frozen=True, slots=True)
class Placement:
    """What a factory of users is told of one episode."""

    domain: Domain
    task: Task
    seed: int
    """Varies wording or sampling; the same for the same episode."""
    options: Mapping[str, Any]
    """``user.options``, as they are written."""
    endpoint: ChatClient | None
    """The pool of ``user.llm``, shared and kept open by the run; None where the section is absent."""


class UserFactory:
    """Makes the users of one run; holds what they share. Belongs to one event loop.

    Raises :class:`ConfigError` when the replay file, the prompt or a factory of your own cannot be had, or
    for a persona that there is not.
    """

    def __init__(self, config: UserConfig, selection: Selection, services: Services) -> None:
        personas_named(config.personas)
        self._config = config
        self._selection = selection
        self._endpoint = services.user
        self._recordings = load_recordings(config.replay) if config.kind == "replay" and config.replay else {}
        self._prompt = load_prompt(config.prompt)
        if is_hook(config.kind):
            load_hook("user.kind", config.kind)
        self._vocabularies: dict[str, Vocabulary] = {}

    def make(self, task: Task, seed: int) -> User:
        """The user of one episode. ``seed`` varies wording or sampling, or picks among several recordings.

        Raises :class:`ConfigError` when there is no recording of ``task``.
        """
        domain, config = self._selection.domain(task), self._config
        if config.kind == "replay":
            if not (recordings := self._recordings.get(task.id)):
                raise ConfigError(
                    f"user.replay: {config.replay} has no recording of task {task.id!r}; "
                    "choose the split and tasks that were recorded"
                )
            return ReplayedUser(task.id, recordings[seed % len(recordings)])
        if getattr(domain, "user_in_tools", False):
            return scripted_user(domain, task, seed, config.personas)
        if is_hook(config.kind):
            placement = Placement(domain, task, seed, config.options, self._endpoint)
            user: User = call_hook("user.kind", config.kind, placement)
            check_attributes("user.kind", config.kind, user)
            return user
        if self._endpoint is None:
            return scripted_user(domain, task, seed, config.personas)
        if config.check != "off" and domain.name not in self._vocabularies:
            self._vocabularies[domain.name] = Vocabulary(domain)
        return LlmUser(
            self._endpoint,
            domain.persona(task),
            seed,
            style_of(seed, manners=config.manners, temperatures=config.temperatures),
            leak_words=config.leak_words,
            tool_rounds=config.tool_rounds,
            check=config.check,
            facts=None if config.check == "off" else self._vocabularies[domain.name].of(task),
            prompt=self._prompt,
        )

    def recites_data(self, task: Task) -> bool:
        """Whether the user of ``task`` says what a data set holds, code or calls perhaps: its words are no fault."""
        domain = self._selection.domain(task)
        scripted = self._config.kind == "scripted" or getattr(domain, "user_in_tools", False)
        return scripted and (getattr(domain, "needs_data", False) or self._selection.config.data is not None)
