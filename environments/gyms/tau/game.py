"""One conversation of an inner domain, led through the tool ``interact``.

The inner conversation is kept as the domain's evaluation expects it: what was said to the customer as plain messages,
tool calls as calls. The verdict is asked for once, when the conversation ends: by the customer, by a terminal tool or
by the policy.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from environments.gyms._shared import Choice, Game, GymEnvironment, OpeningUser, Reply, Setting
from mua.environment.domain import Domain
from mua.environment.endpoint.services import ChatClient
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript, UserControlled
from mua.environment.user import STOP_SIGNAL, ToolUser, User, UserReply
from mua.types import Json, ToolSchema
from mua.users.llm import LlmUser
from mua.users.personas import style_of
from mua.utils.strict_json import JsonError, read_json

T = TypeVar("T")
_LEFT = "(The customer has left.)"


def tool_call(name: str, arguments: Json) -> str:
    """A call as the content of ``answer``."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


class TauGame(Game):
    """One customer of the inner domain."""

    def __init__(
        self, setting: Setting, task: Task, seed: int, domain: Domain, inner: Task, endpoint: ChatClient | None
    ) -> None:
        super().__init__(setting, task, seed)
        self._environment = domain.environment()
        self._environment.reset(inner, seed)
        self._user: User = (
            domain.scripted_user(inner, seed)
            if endpoint is None
            else LlmUser(endpoint, domain.persona(inner), seed, style_of(seed))
        )
        self._told_first = endpoint is None
        """Whether the policy has heard the customer's first words outside of the tool."""
        self._messages: list[Json] = []
        self._listed = False
        self._leaks = 0
        self._evaluation: Evaluation | None = None
        if isinstance(self._user, ToolUser) and isinstance(self._environment, UserControlled):
            self._user.take_tools(_UsersTools(self._environment))

    async def search(self, content: str) -> Reply:
        """List the tools of the domain, once."""
        if content.lower().strip(" .\"'") not in ("tools", "help"):
            return Reply("search knows the word tools only", error=True)
        if self._listed:
            return Reply("the tools have been listed already", error=True)
        self._listed = True
        return Reply("\n".join(json.dumps(schema.openai()["function"]) for schema in self._environment.tools()))

    async def action(self, content: str) -> Reply:
        """Say something to the customer."""
        if (first := await self._opened()) and not self._told_first:
            return Reply(first)
        self._messages.append({"role": "assistant", "content": content})
        reply = await self._user.reply(content)
        self._hear(reply)
        text = reply.text.replace(STOP_SIGNAL, "").strip()
        return await self._ended(f"{text} {_LEFT}".strip()) if reply.stop else Reply(text)

    async def answer(self, content: str) -> Reply:
        """Call a tool of the domain."""
        call = _call_in(content)
        if isinstance(call, str):
            return Reply(call, error=True)
        await self._opened()
        name, arguments = call
        result = await _value(self._environment.call(name, arguments))
        function = {"name": name, "arguments": json.dumps(arguments)}
        self._messages += [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": result.text},
        ]
        return await self._ended(result.text) if result.terminal else Reply(result.text)

    async def _opened(self) -> str:
        """Let the customer speak first, whatever the policy does first; empty once it has."""
        if self._messages:
            return ""
        first = await self._user.open()
        self._hear(first)
        return first.text

    async def finish(self) -> Reply:
        """End the conversation and have it judged."""
        return await self._ended("You have ended the conversation.")

    def details(self) -> Json:
        verdict = self._evaluation
        inner = None if verdict is None else {"reward": verdict.reward, **verdict.details}
        return {"inner": inner, "leaks": self._leaks}

    def close(self) -> None:
        """Close the inner environment."""
        self._environment.close()

    async def _ended(self, text: str) -> Reply:
        assert self._evaluation is None, "an episode ends once"
        self._evaluation = await _value(self._environment.evaluate(Transcript(self._messages)))
        self.solved = self._evaluation.success
        await self._user.close()
        return Reply(text, self._evaluation.reward, over=True)

    def _hear(self, reply: UserReply) -> None:
        self._leaks += reply.leak
        self._messages.append({"role": "user", "content": reply.text})


class TauEnvironment(GymEnvironment):
    """A gym's environment whose ``finish`` is the game's, and that closes what the game holds."""

    def close(self) -> None:
        if self._game is not None:
            self._tau.close()
        super().close()

    async def _play(self, choice: Choice, content: str) -> Reply:
        return await self._tau.finish() if choice == "finish" else await super()._play(choice, content)

    @property
    def _tau(self) -> TauGame:
        game = self.game
        assert isinstance(game, TauGame)
        return game


class _UsersTools:
    """The inner user's own tools; implements :class:`mua.environment.user.UserTools`."""

    def __init__(self, environment: UserControlled) -> None:
        self._environment = environment

    def schemas(self) -> Sequence[ToolSchema]:
        return self._environment.user_tools()

    async def call(self, name: str, arguments: Json) -> ToolResult:
        return await _value(self._environment.user_call(name, arguments))


def _call_in(content: str) -> tuple[str, Json] | str:
    """The call that ``content`` writes, or what is wrong with it."""
    try:
        call = read_json(content)
    except JsonError as error:
        return f'answer takes a tool call as JSON, {{"name": ..., "arguments": {{...}}}}: {error}'
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'the JSON must be an object with "name" and "arguments"'
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict) or call.keys() - {"name", "arguments"}:
        return '"arguments" must be a JSON object, and nothing may stand beside "name" and "arguments"'
    return call["name"], arguments


async def _value(given: T | Awaitable[T]) -> T:
    return await given if inspect.isawaitable(given) else given  # type: ignore[return-value]


# Who opens the conversation outside the tool: the customer's first words, the same that the one inside has said.

NeutralUser = OpeningUser
"""Opens without the customer's words, where they cannot be known twice."""


class CustomerUser(OpeningUser):
    """Opens with the first words of ``customer``, whom the seed makes the same inside and outside of the tool."""

    def __init__(self, seed: str, openings: Sequence[str], customer: User) -> None:
        super().__init__(seed, openings)
        self._customer = customer

    async def open(self) -> UserReply:
        return await self._customer.open()

    async def close(self) -> None:
        await self._customer.close()
