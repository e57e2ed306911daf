"""Users by configuration: one factory a run, one user an episode."""

from __future__ import annotations

from mua.config.schema import UserConfig
from mua.environment.protocol import Domain, Task
from mua.errors import ConfigError
from mua.users.endpoint import ChatEndpoint
from mua.users.llm import LlmUser
from mua.users.protocol import User
from mua.users.replay import ReplayedUser, load_recordings


class UserFactory:
    """Makes the users of one run; holds what they share. Belongs to one event loop.

    Raises :class:`mua.errors.ConfigError` when the replay file cannot be read.
    """

    def __init__(self, config: UserConfig, domain: Domain) -> None:
        self._config = config
        self._domain = domain
        # The section that a kind needs is there: UserConfig checks it.
        self._endpoint = ChatEndpoint(config.llm) if config.kind == "llm" and config.llm else None
        self._recordings = load_recordings(config.replay) if config.kind == "replay" and config.replay else {}

    def make(self, task: Task, seed: int) -> User:
        """The user of one episode. ``seed`` varies wording or sampling, or picks among several recordings.

        Raises :class:`mua.errors.ConfigError` when there is no recording of ``task``.
        """
        if self._endpoint is not None:
            return LlmUser(self._endpoint, self._domain.persona(task), seed)
        if self._config.kind == "replay":
            return self._replayed(task, seed)
        return self._domain.scripted_user(task, seed)

    async def close(self) -> None:
        """Close shared connections."""
        if self._endpoint is not None:
            await self._endpoint.close()

    def _replayed(self, task: Task, seed: int) -> User:
        recordings = self._recordings.get(task.id)
        if not recordings:
            raise ConfigError(
                f"user.replay: {self._config.replay} has no recording of task {task.id!r}; "
                "choose the split and tasks that were recorded"
            )
        return ReplayedUser(task.id, recordings[seed % len(recordings)])
