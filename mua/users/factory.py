"""Users by configuration: one factory a run, one user an episode."""

from __future__ import annotations

from mua.config.schema import UserConfig
from mua.environment.protocol import Peopled, Task
from mua.environment.selection import Selection
from mua.errors import ConfigError
from mua.users.endpoint import ChatEndpoint
from mua.users.llm import LlmUser
from mua.users.personas import checked
from mua.users.prompts import style_of
from mua.users.protocol import User
from mua.users.replay import ReplayedUser, load_recordings
from mua.users.services import Services


class UserFactory:
    """Makes the users of one run; holds what they share. Belongs to one event loop.

    Raises :class:`mua.errors.ConfigError` when the replay file cannot be read, or for a persona that there is not.
    """

    def __init__(self, config: UserConfig, selection: Selection, services: Services) -> None:
        checked(config.personas)
        self._config = config
        self._selection = selection
        self._endpoint = services.user
        self._recordings = load_recordings(config.replay) if config.kind == "replay" and config.replay else {}

    def make(self, task: Task, seed: int) -> User:
        """The user of one episode. ``seed`` varies wording or sampling, or picks among several recordings.

        Raises :class:`mua.errors.ConfigError` when there is no recording of ``task``.
        """
        domain = self._selection.domain(task)
        if self._config.kind == "replay":
            return self._replayed(task, seed)
        if self._endpoint is not None and not getattr(domain, "user_in_tools", False):
            return self._talking(self._endpoint, domain.persona(task), seed)
        if isinstance(domain, Peopled):
            return domain.scripted_user(task, seed, self._config.personas)
        return domain.scripted_user(task, seed)

    def _talking(self, endpoint: ChatEndpoint, persona: str, seed: int) -> LlmUser:
        config = self._config
        style = style_of(seed, manners=config.manners, temperatures=config.temperatures)
        return LlmUser(endpoint, persona, seed, style, leak_words=config.leak_words, tool_rounds=config.tool_rounds)

    def _replayed(self, task: Task, seed: int) -> User:
        recordings = self._recordings.get(task.id)
        if not recordings:
            raise ConfigError(
                f"user.replay: {self._config.replay} has no recording of task {task.id!r}; "
                "choose the split and tasks that were recorded"
            )
        return ReplayedUser(task.id, recordings[seed % len(recordings)])
