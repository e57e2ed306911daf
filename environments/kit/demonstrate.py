"""Episodes whose agent is no policy: an expert by rules, gold moves, canned ones, a person's.

They are episodes like any other (:class:`mua.rollout.episode.Episode`): the environment in an instance of the manager,
the domain's user, schema checks and the verdict. Budgets are out of reach, and environments run on the event loop,
because they are played by the thousand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from mua.config.schema import EnvironmentConfig, RolloutConfig
from mua.environment.domain import Domain, moves_of, scripted_user, unanswered
from mua.environment.manager import EnvironmentManager, InstanceUserTools
from mua.environment.protocol import Move, Task, UserMove
from mua.environment.user import User, UserReply
from mua.rollout.agent import EpisodeSetting
from mua.rollout.episode import Episode, EpisodeResult
from mua.tokens.parsing import AssistantTurn, ToolCall
from mua.types import Json, Segment, ToolSchema

Moves: TypeAlias = Generator[Move, str, None]
"""Yields a move and is sent what came back: the tool's result, or the user's words."""
Player: TypeAlias = Callable[[str, Sequence[ToolSchema]], Moves]
"""Given the user's first words and the tools, the moves."""

_UNBOUNDED = 10**9
_SETTING = EpisodeSetting(
    RolloutConfig(
        max_turns=_UNBOUNDED, max_tool_calls=_UNBOUNDED, max_malformed=_UNBOUNDED, user_seconds=float(_UNBOUNDED)
    ),
    temperature=1.0,
    system_prompt=lambda task: "",
    show_tools=True,
    deterministic=True,
)


class ScriptedAgent:
    """Makes a player's moves. Implements :class:`mua.rollout.agent.Agent`.

    Its messages hold no system prompt, and calls have no id: each is answered before anything else is said.
    """

    def __init__(self, player: Player, user_tools: InstanceUserTools, *, hears: bool = True) -> None:
        """``user_tools`` make the moves that are the user's; ``hears``: whether there is a user with words to keep."""
        self.messages: list[Json] = []
        self.turns = 0
        self._player = player
        self._user_tools = user_tools
        self._hears = hears
        self._moves: Moves | None = None
        self._answer: str | None = None

    def begin(self, system: str, tools: Sequence[ToolSchema], user: str) -> None:
        self.add_user(user)
        self._moves, self._answer = self._player(user, tools), None

    async def turn(self) -> AssistantTurn | None:
        """The next move; None where there is none left."""
        assert self._moves is not None, "begin comes first"
        try:
            move = self._moves.send(self._answer)  # type: ignore[arg-type]
            while isinstance(move, UserMove):
                result = await self._user_tools.call(*move)
                if not self._hears:
                    self.messages.append({"role": "user", "content": "", "actions": self._user_tools.taken()})
                move = self._moves.send(result.text)
        except StopIteration:
            return None
        self.turns += 1
        if isinstance(move, str):
            self.messages.append({"role": "assistant", "content": move})
            return AssistantTurn(move)
        name, arguments = move
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        self.messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return AssistantTurn("", tool_calls=[ToolCall("", name, arguments)])

    def add_tool_results(self, results: Sequence[str]) -> None:
        (self._answer,) = results
        self.messages.append({"role": "tool", "content": self._answer})

    def add_user(self, text: str) -> None:
        self._answer = text
        if self._hears:
            self.messages.append({"role": "user", "content": text})

    def add_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Nothing: moves are made without schemas, and the message describes them."""

    def segments(self) -> list[Segment]:
        return []

    def counts(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Let the player's generator end."""
        if self._moves is not None:
            self._moves.close()


class _NobodyThere:
    """A user that answers nothing; what it says is kept by nobody."""

    async def open(self) -> UserReply:
        return UserReply("(nobody answers)")

    async def reply(self, agent_text: str) -> UserReply:
        return UserReply("(nobody answers)")

    async def close(self) -> None:
        return None


async def play(domain: Domain, task: Task, seed: int, player: Player, user: User | None = None) -> EpisodeResult:
    """One episode of any player with any user, or with nobody who answers; the same for the same arguments.

    The user is closed. Raises as :meth:`mua.rollout.episode.Episode.run` does, and what the player raises.
    """
    manager = EnvironmentManager(domain, EnvironmentConfig(name=domain.name, isolation="inline"))
    other: User = user or _NobodyThere()
    try:
        async with manager.instance(task, seed) as environment:
            agent = ScriptedAgent(player, environment.user_tools, hears=user is not None)
            try:
                return await Episode(_SETTING, environment, other, agent, guarded=False).run()
            finally:
                agent.close()
    finally:
        await other.close()
        await manager.close()


async def demonstrate(
    domain: Domain, task: Task, seed: int, loose: float = 0.0, personas: Sequence[str] = ()
) -> EpisodeResult:
    """Have the domain's expert play ``task``, or its gold moves where it has none, with a user of ``personas``."""
    user = scripted_user(domain, task, seed, personas)
    return await play(domain, task, seed, lambda opening, tools: moves_of(domain, task, seed, loose), user)


async def replay_gold(domain: Domain, task: Task) -> EpisodeResult:
    """The gold moves, nobody answering."""
    return await replay(domain, task, domain.gold(task))


async def replay(domain: Domain, task: Task, moves: Sequence[Move]) -> EpisodeResult:
    """These moves whatever comes back, nobody answering."""
    return await play(domain, task, 0, lambda opening, tools: unanswered(moves))


def spoken_text(conversations: Sequence[Sequence[Json]]) -> Iterator[str]:
    """Every text in the conversations, tool calls as they are written: the corpus of a tokenizer."""
    for messages in conversations:
        for message in messages:
            for call in message.get("tool_calls", []):
                function = call["function"]
                yield json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
            yield message["content"]


def write_conversations(file: Path, conversations: Iterable[Sequence[Json]]) -> None:
    """One JSON object per line, as ``sft.data`` reads it; what has been written is not held."""
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps({"messages": messages}) + "\n" for messages in conversations)
