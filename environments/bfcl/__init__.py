"""BFCL's multi-turn sets as a domain, for evaluation: fixed user turns, simulated services, gold calls.

Needs ``environment.data`` (:mod:`environments.bfcl.episode`). ``environment.options.categories`` chooses among base,
miss_func, miss_param and long_context, separated by commas. All tasks are of the split test; ``kind`` is the category,
``difficulty`` counts gold calls (up to 3, up to 6, more).

Two things differ from the leaderboard's own harness: arguments that do not fit a tool's schema are refused instead of
tried, and calls are JSON, never Python text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from environments.bfcl.episode import CATEGORIES, BfclEnvironment, Package, gold_move, load, schemas, withheld
from environments.kit.options import choices_in, read_options
from mua.environment.domain import Domain
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.user import STOP_SIGNAL, User, UserReply
from mua.types import ToolSchema
from mua.utils.errors import ConfigError

if TYPE_CHECKING:
    from mua.config.schema import EnvironmentConfig
    from mua.environment.endpoint.services import Services

_PROMPT = "You act for a user by calling tools. Do what the user asks, then tell the user what came of it."
_FULL = """\
{short}

- Do everything that a message asks for before you answer it; the user takes an answer without a call as the end of
  that request.
- Where a detail is missing that no tool can find, or no tool fits, say so and call nothing.
"""
_NEW_TOOLS = "From now on these functions are there too:\n{}\nTry again with them."
_THANKS = f"That was all. {STOP_SIGNAL}"


class FixedTurns:
    """Says the task's questions one after the other, whatever is answered. A :class:`mua.environment.user.User`."""

    def __init__(self, questions: Sequence[str], later: dict[int, list[ToolSchema]]) -> None:
        self._turns = iter([self._turn(text, later.get(number, [])) for number, text in enumerate(questions)])

    async def open(self) -> UserReply:
        return next(self._turns)

    async def reply(self, agent_text: str) -> UserReply:
        return next(self._turns, UserReply(_THANKS, stop=True))

    async def close(self) -> None:
        """Holds nothing."""

    def _turn(self, text: str, tools: Sequence[ToolSchema]) -> UserReply:
        if not tools:
            return UserReply(text)
        shown = "\n".join(json.dumps(tool.openai()["function"]) for tool in tools)
        return UserReply("\n\n".join(filter(None, [text, _NEW_TOOLS.format(shown)])), tools=tuple(tools))


class BfclDomain:
    """Implements :class:`mua.environment.domain.Domain`."""

    name = "bfcl"
    needs_data = True
    held_out = True
    user_in_tools = True  # the turns are fixed: no language model plays this user
    isolation: Isolation = "thread"

    def __init__(self, package: Package | None = None) -> None:
        self._package = package

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """With the data of ``environment.data``."""
        if config.data is None:
            raise ConfigError(
                "environment.data: domain 'bfcl' has no tasks of its own; give the folder that the package bfcl-eval "
                "was unpacked into"
            )
        options = read_options(self.name, {"categories": ",".join(CATEGORIES)}, config)
        return BfclDomain(load(config.data, choices_in("categories", options["categories"], CATEGORIES)))

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._package.tasks if self._package is not None and split == "test" else ()

    def environment(self) -> Environment:
        return BfclEnvironment(self._loaded)

    def system_prompt(self, style: PromptStyle) -> str:
        return _PROMPT if style == "short" else _FULL.format(short=_PROMPT)

    def persona(self, task: Task) -> str:
        return "You say these messages, one after the other:\n" + "\n".join(task.data["questions"])

    def scripted_user(self, task: Task, seed: int) -> User:
        tools = {tool.name: tool for tool in schemas(self._loaded, task)}
        later = {turn: [tools[name] for name in names] for turn, names in withheld(task).items()}
        return FixedTurns(task.data["questions"], later)

    def gold(self, task: Task) -> Sequence[Move]:
        """The gold calls of each turn, then an answer."""
        tools = {tool.name: tool for tool in schemas(self._loaded, task)}
        moves: list[Move] = []
        for turn in task.data["gold"]:
            moves += [gold_move(text, tools) for text in turn]
            moves.append("Done.")
        return moves

    @property
    def _loaded(self) -> Package:
        if self._package is None:
            raise ConfigError("environment.data: domain 'bfcl' needs its data; see its documentation")
        return self._package


DOMAIN = BfclDomain()
