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

from typing import Literal, TypeAlias

from mua.environment.endpoint.chat import Completion, FunctionCall
from mua.environment.endpoint.services import ChatClient
from mua.environment.requests import checked_text
from mua.environment.tool_arguments import validate_arguments
from mua.environment.user import STOP_SIGNAL, UserReply, UserTools
from mua.types import Json
from mua.users.personas import DEFAULT_PROMPT, SILENCE, Prompt, Style
from mua.users.task_check import TaskCheck
from mua.users.utterance_check import LeakCheck, ReplyCheck, with_signal, without_label
from mua.utils.errors import Refusal, UserFaultKind
from mua.utils.seeds import derived_seed
from mua.utils.strict_json import JsonError, read_json

CheckMode: TypeAlias = Literal["off", "flag", "refuse"]
_PLAIN = Style()


class LlmUser:
    """One simulated user of one episode; a :class:`mua.environment.user.User` and ``ToolUser``.

    ``seed`` goes into every request, so that the members of a group hear different first utterances where the
    endpoint samples; ``style`` makes them differ where it does not. The endpoint is shared and stays open when the
    user is closed.
    """

    def __init__(
        self,
        endpoint: ChatClient,
        persona: str,
        seed: int,
        style: Style = _PLAIN,
        *,
        leak_words: int = 12,
        tool_rounds: int = 8,
        check: CheckMode = "refuse",
        facts: TaskCheck | None = None,
        prompt: Prompt = DEFAULT_PROMPT,
    ) -> None:
        """``leak_words``, ``tool_rounds`` and ``check`` as in :class:`mua.config.schema.UserConfig`.

        ``facts`` is the check against the task, if there is one; it belongs to this user.
        """
        self._endpoint = endpoint
        self._persona = persona
        self._seed = seed
        self._style = style
        self._prompt = prompt
        self._rounds = tool_rounds
        stated = facts.stated if facts is not None else ()
        leak = LeakCheck(leak_words, persona, style.manner, rules=prompt.text("", "", tools=True), stated=stated)
        self._check = ReplyCheck(leak, None if check == "off" else facts)
        self._mode = check
        self._tools: UserTools | None = None
        self._history: list[Json] = [self._system(tools=False)]

    def take_tools(self, tools: UserTools) -> None:
        """What the user can do besides talking; called before :meth:`open`."""
        self._tools = tools
        self._history = [self._system(tools=True)]

    async def open(self) -> UserReply:
        """The first utterance, generated."""
        return await self._answer(self._style.greeting)

    async def reply(self, agent_text: str) -> UserReply:
        """Answer the agent's plain text; see :meth:`ChatClient.chat` for the faults."""
        self._check.heard(agent_text)
        return await self._answer(agent_text if agent_text.strip() else SILENCE)

    async def close(self) -> None:
        """Nothing to give back: connections belong to the endpoint."""

    def _system(self, tools: bool) -> Json:
        return {"role": "system", "content": self._prompt.text(self._persona, self._style.manner, tools=tools)}

    async def _answer(self, text: str) -> UserReply:
        first = len(self._history) == 1
        self._history.append({"role": "user", "content": text})
        words, acted = list[str](), False
        for left in range(self._rounds if self._tools else 0, -1, -1):
            reply = await self._ask(speak=left == 0, first=first, acted=acted, silent=bool(words))
            words += [said] if (said := _words_of(reply)) else []  # what is said beside a call is said, too
            if not reply.calls:
                break
            await self._act(reply)
            acted = True
        answer = "\n".join(words)
        flag = self._check.content(answer, acted=acted) if self._mode == "flag" else None
        if flag is not None:
            self._endpoint.count(f"flags/{flag.kind}")
        self._check.said(answer)
        if last := _words_of(reply):
            self._history.append({"role": "assistant", "content": last})
        return UserReply(answer, stop=STOP_SIGNAL in answer, flags=() if flag is None else (flag,))

    async def _ask(self, *, speak: bool, first: bool, acted: bool, silent: bool) -> Completion:
        """What the model does next. ``speak``: it must say something, or be ``silent``, having spoken beside a call;
        ``first``: it has said nothing before."""

        def accept(reply: Completion) -> Refusal | None:
            if reply.calls and speak:
                return Refusal(UserFaultKind.ACTS_ON_AND_ON, "the user acts on and on and says nothing")
            text = _words_of(reply)
            if not text and (reply.calls or silent):
                return None
            refusal = self._check.form(text, first=first)
            return refusal or (self._check.content(text, acted=acted) if self._mode == "refuse" else None)

        schemas = [schema.openai() for schema in self._tools.schemas()] if self._tools else []
        return await self._endpoint.chat(
            self._history,
            seed=derived_seed(self._seed, len(self._history)),
            temperature=self._style.temperature,
            tools=schemas,
            tool_choice="none" if schemas and speak else None,
            may_be_empty=silent,
            accept=accept,
        )

    async def _act(self, reply: Completion) -> None:
        """Run the calls; mistakes are answers that the model can act on."""
        calls = [call.openai(readable=_arguments(call) is not None) for call in reply.calls]
        self._history.append(reply.sent_back(calls))
        assert self._tools is not None, "no calls come without tools"
        known = {schema.name: schema for schema in self._tools.schemas()}
        for call in reply.calls:
            arguments = _arguments(call)
            if (schema := known.get(call.name)) is None:
                answer = f"error: there is no tool {call.name!r}"
            elif arguments is None:
                answer = f"error: the arguments of {call.name} must be a JSON object, not {call.arguments[:200]}"
            elif fault := validate_arguments(schema, arguments):
                answer = f"error: {fault}"
            else:
                answer = checked_text(call.name, (await self._tools.call(call.name, arguments)).text)
            self._check.saw(answer)
            self._history.append({"role": "tool", "tool_call_id": call.id, "content": answer})


def _words_of(reply: Completion) -> str:
    """What is said, as it is meant: without a speaker's name before it, the signal to stop as it is written here."""
    return with_signal(without_label(reply.text))


def _arguments(call: FunctionCall) -> Json | None:
    """The arguments, if they are a JSON object. Servers refuse a conversation in which those of any call are not."""
    try:
        arguments = read_json(call.arguments)
    except JsonError:
        return None
    return arguments if isinstance(arguments, dict) else None
