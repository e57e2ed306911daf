"""A domain's own agent, played by rules, against its scripted user: demonstrations, and proof that tasks are solvable.

The environment and the user are those of a rollout; only the policy is replaced, by :class:`Expert` moves or, where a
domain has no expert, by its gold moves.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from mua.environment.domain import Domain, Expert, scripted_user
from mua.environment.protocol import (
    Environment,
    Evaluation,
    Move,
    Task,
    ToolResult,
    ToolSchema,
    Transcript,
    UserControlled,
    UserMove,
)
from mua.environment.tool_arguments import fitted
from mua.types import Json
from mua.users.protocol import ToolUser, User, UserReply

T = TypeVar("T")
Agent: TypeAlias = Callable[[str, Sequence[ToolSchema]], Generator[Move, str, None]]
"""Given the user's first words and the tools, the moves."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation and what it was worth."""

    messages: list[Json]
    """OpenAI form, without a system prompt."""
    evaluation: Evaluation
    reward: float
    """Rewards of all calls and the evaluation's, as a rollout sums them."""
    ended: bool
    """Whether the user or a terminal tool ended it, rather than the moves running out."""


def moves_of(domain: Domain, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
    """The expert's moves; the gold ones, whatever is answered, where the domain has no expert."""
    if isinstance(domain, Expert):
        yield from domain.expert(task, seed, loose)
    else:
        yield from _unanswered(domain.gold(task))


async def demonstrate(
    domain: Domain, task: Task, seed: int, loose: float = 0.0, personas: Sequence[str] = ()
) -> Demonstration:
    """Play ``task`` to its end with a user of ``personas``, or of all; the same for the same arguments."""
    environment, user = domain.environment(), scripted_user(domain, task, seed, personas)
    try:
        await value_of(environment.reset(task, seed))
        return await _Play(environment, user).run(moves_of(domain, task, seed, loose))
    finally:
        await user.close()
        await value_of(environment.close())


async def replay_gold(domain: Domain, task: Task) -> Demonstration:
    """The gold moves on a fresh environment, nobody answering."""
    environment = domain.environment()
    try:
        await value_of(environment.reset(task, 0))
        return await _Play(environment, None).run(_unanswered(domain.gold(task)))
    finally:
        await value_of(environment.close())


async def played(environment: Environment, user: User, moves: Generator[Move, str, None]) -> Demonstration:
    """Any agent's moves with any user, on an environment that has been reset; the caller closes both."""
    return await _Play(environment, user).run(moves)


async def played_by(environment: Environment, user: User, agent: Agent) -> Demonstration:
    """As :func:`played`, by an agent that begins once it has heard the user's first words."""
    play = _Play(environment, user)

    def moves() -> Generator[Move, str, None]:
        yield from agent(play.messages[0]["content"], environment.tools())

    return await play.run(moves())


def spoken_text(conversations: Sequence[Sequence[Json]]) -> Iterator[str]:
    """Every text in the conversations, tool calls as they are written: the corpus of a tokenizer."""
    for messages in conversations:
        for message in messages:
            for call in message.get("tool_calls", []):
                function = call["function"]
                yield json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
            yield message["content"]


class _Play:
    """One conversation under way."""

    def __init__(self, environment: Environment, user: User | None) -> None:
        self._environment = environment
        self._user = user
        self.messages: list[Json] = []
        self._reward = 0.0
        self._ended = False
        self._acted: list[Json] = []

    async def run(self, moves: Generator[Move, str, None]) -> Demonstration:
        await self._open()
        answer: str | None = None
        while not self._ended:
            try:
                move = next(moves) if answer is None else moves.send(answer)
            except StopIteration:
                break
            answer = await self._made(move)
        moves.close()
        evaluation: Evaluation = await value_of(self._environment.evaluate(Transcript(self.messages)))
        return Demonstration(self.messages, evaluation, self._reward + evaluation.reward, self._ended)

    async def _made(self, move: Move) -> str:
        """Make one move; what came back."""
        if isinstance(move, str):
            return await self._say(move)
        if isinstance(move, UserMove):
            return await self._act(move)
        return await self._call(*move)

    async def _act(self, move: UserMove) -> str:
        """The user's own call, among gold moves: what stands in the conversation of a user that says nothing."""
        text = (await self.call(*move)).text
        if self._user is None:
            self._hear(UserReply(""))
        return text

    async def _open(self) -> None:
        if self._user is None:
            return
        if isinstance(self._user, ToolUser) and self.schemas():
            self._user.take_tools(self)
        self._hear(await self._user.open())

    async def _say(self, text: str) -> str:
        self.messages.append({"role": "assistant", "content": text})
        if self._user is None:
            return ""
        return self._hear(await self._user.reply(text))

    def _hear(self, reply: UserReply) -> str:
        message: Json = {"role": "user", "content": reply.text}
        if self._acted:
            message["actions"], self._acted = self._acted, []
        self.messages.append(message)
        self._ended |= reply.stop
        return reply.text

    async def _call(self, name: str, arguments: Json) -> str:
        schemas = {schema.name: schema for schema in self._environment.tools()}
        given = fitted(schemas[name], arguments) if name in schemas else arguments
        result: ToolResult = await value_of(self._environment.call(name, given))
        self._reward += result.reward
        self._ended |= result.terminal
        function = {"name": name, "arguments": json.dumps(arguments)}
        call = {"type": "function", "function": function}
        self.messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result.text},
        ]
        return result.text

    # The user's tools, as mua.users.protocol.UserTools.

    def schemas(self) -> Sequence[ToolSchema]:
        environment = self._environment
        return environment.user_tools() if isinstance(environment, UserControlled) else ()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        assert isinstance(self._environment, UserControlled)
        schemas = {schema.name: schema for schema in self._environment.user_tools()}
        given = fitted(schemas[name], arguments) if name in schemas else arguments
        result = await value_of(self._environment.user_call(name, given))
        self._acted.append({"name": name, "arguments": arguments, "answer": result.text})
        return result


def _unanswered(moves: Sequence[Move]) -> Generator[Move, str, None]:
    for move in moves:  # noqa: UP028 - a sequence cannot be sent what came back, as `yield from` would do
        yield move


async def value_of(given: T | Awaitable[T]) -> T:
    return await given if inspect.isawaitable(given) else given  # type: ignore[return-value]
