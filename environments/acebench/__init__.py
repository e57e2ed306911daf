"""ACEBench's agent part as a domain, for evaluation: a phone with apps, or a travel desk, judged by its final state.

Needs ``environment.data``, a checkout of its repository (:mod:`environments.acebench.episode`).
``environment.options.language`` is en or zh, ``environment.options.categories`` multi_turn, multi_step or both,
separated by a comma. All tasks are of the split test; ``kind`` is the category.

multi_turn wants a user played by a language model (``user.kind: llm``): the scripted one says its whole instruction at
once, which is easier than meant. In multi_step the user asks once and waits. There is no gold trajectory; ``gold``
replays the milestones, which solves some tasks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from environments.acebench.episode import CATEGORIES, LANGUAGES, AceEnvironment, Package, load, milestones
from environments.kit.options import choices_in, read_options
from mua.environment.domain import Domain
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.user import STOP_SIGNAL, User, UserReply
from mua.utils.errors import ConfigError

if TYPE_CHECKING:
    from mua.config.schema import EnvironmentConfig
    from mua.environment.endpoint.services import Services

_PROMPT = "You act for a user with the tools of a phone or a travel desk. Do what the user asks, then say so."
_FULL = """\
{short}

- Where a tool refuses because Wi-Fi is off or nobody is logged in, mend that with the tools first.
- Never make up a value that a tool needs: look it up, or ask the user.
- Where a tool says that the user has to decide, ask the user.
- Once everything is done, tell the user so without calling a tool.
"""
_NOTHING_MORE = "That is all I can tell you. Please go on with it."
_PATIENCE = 4


class OneRequest:
    """Says everything at once, then waits for the end. A :class:`mua.environment.user.User`."""

    def __init__(self, request: str, answers: int) -> None:
        self._request = request
        self._answers = answers

    async def open(self) -> UserReply:
        return UserReply(self._request)

    async def reply(self, agent_text: str) -> UserReply:
        """Questions are answered with that there is nothing more to say, a few times; anything else is the end."""
        if "?" in agent_text.replace("？", "?") and self._answers > 0:
            self._answers -= 1
            return UserReply(_NOTHING_MORE)
        return UserReply(f"Thank you. {STOP_SIGNAL}", stop=True)

    async def close(self) -> None:
        """Holds nothing."""


class AceDomain:
    """Implements :class:`mua.environment.domain.Domain`."""

    name = "acebench"
    needs_data = True
    held_out = True
    isolation: Isolation = "thread"

    def __init__(self, package: Package | None = None) -> None:
        self._package = package

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """With the data of ``environment.data``."""
        if config.data is None:
            raise ConfigError(
                "environment.data: domain 'acebench' has no tasks of its own; give the folder of a checkout of ACEBench"
            )
        options = read_options(self.name, {"categories": ",".join(CATEGORIES), "language": LANGUAGES[0]}, config)
        language, *_ = choices_in("language", options["language"], LANGUAGES)
        return AceDomain(load(config.data, language, choices_in("categories", options["categories"], CATEGORIES)))

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._package.tasks if self._package is not None and split == "test" else ()

    def environment(self) -> Environment:
        if self._package is None:
            raise ConfigError("environment.data: domain 'acebench' needs its data; see its documentation")
        return AceEnvironment(self._package)

    def system_prompt(self, style: PromptStyle) -> str:
        return _PROMPT if style == "short" else _FULL.format(short=_PROMPT)

    def persona(self, task: Task) -> str:
        if task.data["kind"] == "multi_step":
            return f"You ask for all of this at once, and add nothing to it afterwards:\n{task.data['question']}"
        return str(task.data["question"])

    def scripted_user(self, task: Task, seed: int) -> User:
        return OneRequest(task.data["question"], _PATIENCE if task.data["kind"] == "multi_turn" else 0)

    def gold(self, task: Task) -> Sequence[Move]:
        """The readable milestones of the first way, then an answer. No gold: it solves some tasks only."""
        return [*[stone for stone in milestones(task)[0] if stone is not None], "It is done."]


DOMAIN = AceDomain()
