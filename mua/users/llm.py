"""A user played by a language model, with the roles turned round.

::

    agent's conversation          simulator's conversation
    --------------------          ------------------------
                                  system     rules, persona and manner
                                  user       a greeting
    user       first utterance ◄─ assistant  (generated)
    assistant  plain text      ─► user
                                  assistant  calls of the user's own tools, if it has any (generated)
                                  tool       what they answered
    user       reply           ◄─ assistant  (generated)
"""

from __future__ import annotations

import json
from dataclasses import replace

from mua.environment.schema import validate_arguments
from mua.errors import UserFault
from mua.types import Json
from mua.untrusted import JsonError, read_json
from mua.users.chat import Completion, FunctionCall
from mua.users.endpoint import ChatEndpoint
from mua.users.guards import LeakCheck, unusable, without_label
from mua.users.prompts import SILENCE, Style, user_system_prompt
from mua.users.protocol import STOP_SIGNAL, UserReply, UserTools

_PLAIN = Style()


class LlmUser:
    """One simulated user of one episode; a :class:`mua.users.protocol.User` and ``ToolUser``.

    ``seed`` goes into every request, so that the members of a group hear different first utterances where the
    endpoint samples; ``style`` makes them differ where it does not. The endpoint is shared and stays open when the
    user is closed.
    """

    def __init__(
        self,
        endpoint: ChatEndpoint,
        persona: str,
        seed: int,
        style: Style = _PLAIN,
        *,
        leak_words: int = 12,
        tool_rounds: int = 8,
    ) -> None:
        """``leak_words`` and ``tool_rounds`` as in :class:`mua.config.schema.UserConfig`."""
        self._endpoint = endpoint
        self._persona = persona
        self._seed = seed
        self._style = style
        self._leak = LeakCheck(leak_words, user_system_prompt(""), persona, style.manner)
        self._rounds = tool_rounds
        self._tools: UserTools | None = None
        self._history: list[Json] = [self._system(tools=False)]

    def take_tools(self, tools: UserTools) -> None:
        """What the user can do besides talking; called before :meth:`open`."""
        self._tools = tools
        self._history = [self._system(tools=True)]

    async def open(self) -> UserReply:
        """The first utterance, generated. One that already stops is a :class:`mua.errors.UserFault`."""
        reply = await self._answer(self._style.greeting)
        if reply.stop:
            raise UserFault(f"{self._endpoint!r}: the simulated user ended the conversation before it began")
        return reply

    async def reply(self, agent_text: str) -> UserReply:
        """Answer the agent's plain text; see :meth:`ChatEndpoint.chat` for the faults."""
        return await self._answer(agent_text if agent_text.strip() else SILENCE)

    async def close(self) -> None:
        """Nothing to give back: connections belong to the endpoint."""

    def _system(self, tools: bool) -> Json:
        return {"role": "system", "content": user_system_prompt(self._persona, self._style.manner, tools)}

    async def _answer(self, text: str) -> UserReply:
        self._history.append({"role": "user", "content": text})
        for left in range(self._rounds if self._tools else 0, -1, -1):
            reply = await self._ask(speak=left == 0)
            if not reply.calls:
                break
            await self._act(reply)
        answer, leak = await self._without_leak(without_label(reply.text))
        self._history.append({"role": "assistant", "content": answer})
        return UserReply(answer, stop=STOP_SIGNAL in answer, leak=leak)

    async def _ask(self, *, speak: bool, again: int = 0) -> Completion:
        """What the model does next. ``speak``: it must say something; ``again`` gives another sample."""

        def accept(reply: Completion) -> str | None:
            if reply.calls:
                return "the user acts on and on and says nothing" if speak else None
            return unusable(reply.text) or (None if without_label(reply.text) else "the user says nothing")

        schemas = [schema.openai() for schema in self._tools.schemas()] if self._tools else []
        # Requests of one user differ by 1000, so that their retries (seed + attempt) never coincide.
        return await self._endpoint.chat(
            self._history,
            seed=self._seed + 1000 * len(self._history) + again,
            temperature=self._style.temperature,
            tools=schemas,
            tool_choice="none" if schemas and speak else None,
            accept=accept,
        )

    async def _without_leak(self, text: str) -> tuple[str, bool]:
        """``text``, or another sample if it quotes the instructions; whether what is said still does."""
        if not self._leak.leaks(text):
            return text, False
        self._endpoint.count("leak_retries")
        other = without_label((await self._ask(speak=True, again=500)).text)
        if not self._leak.leaks(other):
            return other, False
        self._endpoint.count("leaks")
        return other, True

    async def _act(self, reply: Completion) -> None:
        """Run the calls; mistakes are answers that the model can act on."""
        calls = [replace(call, arguments=json.dumps(_arguments(call) or {})).openai() for call in reply.calls]
        self._history.append({"role": "assistant", "content": reply.text or None, "tool_calls": calls})
        for call in reply.calls:
            self._history.append({"role": "tool", "tool_call_id": call.id, "content": await self._call(call)})

    async def _call(self, call: FunctionCall) -> str:
        assert self._tools is not None, "no calls come without tools"
        schema = next((schema for schema in self._tools.schemas() if schema.name == call.name), None)
        if schema is None:
            return f"error: there is no tool {call.name!r}"
        arguments = _arguments(call)
        if arguments is None:
            return f"error: the arguments of {call.name} must be a JSON object, not {call.arguments[:200]}"
        if fault := validate_arguments(schema, arguments):
            return f"error: {fault}"
        return (await self._tools.call(call.name, arguments)).text


def _arguments(call: FunctionCall) -> Json | None:
    """The arguments, if they are a JSON object. Servers refuse a conversation in which those of any call are not."""
    try:
        arguments = read_json(call.arguments)
    except JsonError:
        return None
    return arguments if isinstance(arguments, dict) else None
