"""The token stream of one episode: append-only, every token with its origin.

Only what is new is rendered, and sampled ids are kept as they came. The stream therefore never holds a token the
engine did not see, and the loss mask is what the policy sampled. The price is stated, not hidden: the stream of a
policy that samples unusual tokenizations differs from the ids a full render of the same text would give.

Where the chat template rewrites history (Qwen3 drops earlier reasoning when a new user message arrives) the stream
ends and a new segment starts from the rewritten history, so that the next request is what the template prescribes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from mua.tokens.chat_family import ChatFamily
from mua.tokens.codec import ConversationError, TextSpan
from mua.tokens.parsing import AssistantTurn, ToolCall
from mua.types import (
    ExpertArray,
    Float32Array,
    Generation,
    Int32Array,
    Json,
    Provenance,
    Segment,
    ToolSchema,
    UInt8Array,
)
from mua.utils.errors import EngineError
from mua.utils.strict_json import JsonError, read_json

NO_VERSION = -1
"""Version of tokens no policy sampled."""
_ROOM = 256
"""Tokens that a new stream has room for."""
_COLUMNS = ("ids", "provenance", "turn", "logprobs", "version")
_TOKEN = np.dtype(list(zip(_COLUMNS, ("i4", "u1", "i4", "f4", "i4"), strict=True)))


class _TokenStream:
    """The tokens of one segment, in an array that grows."""

    def __init__(self) -> None:
        self._tokens = np.empty(_ROOM, _TOKEN)
        self.experts: list[ExpertArray] = []
        self.length = 0

    def extend(
        self,
        ids: Int32Array,
        provenance: UInt8Array | Provenance,
        turn: Int32Array | int,
        logprobs: Float32Array | float = 0.0,
        version: Int32Array | int = NO_VERSION,
    ) -> None:
        """Append ``ids``; what is one number is so for all of them."""
        end = self.length + len(ids)
        if end > len(self._tokens):  # as many again, so that growing costs a constant time per token
            self._tokens = np.resize(self._tokens, 2 * end)
        for name, column in zip(_COLUMNS, (ids, provenance, turn, logprobs, version), strict=True):
            self._tokens[name][self.length : end] = column
        self.length = end

    def column(self, name: str) -> npt.NDArray[Any]:
        """One field of all tokens so far, ``[T]``."""
        return self._tokens[name][: self.length].copy()

    @property
    def routed(self) -> int:
        """Tokens whose experts are known; they come first."""
        return sum(map(len, self.experts))

    def segment(self) -> Segment:
        """All so far; tokens whose experts are not known have 0."""
        experts = None
        if self.experts:
            unrouted = np.zeros((self.length - self.routed, self.experts[0].shape[1]), np.uint8)
            experts = np.concatenate([*self.experts, unrouted])
        return Segment(**{name: self.column(name) for name in _COLUMNS}, experts=experts)


@dataclass(frozen=True, slots=True)
class Mark:
    """A place behind an assistant turn, from which :meth:`Conversation.fork` goes on otherwise."""

    messages: int
    stream: int
    tokens: int
    owed: tuple[TextSpan, ...]
    as_sampled_since: int
    turns: int


class Conversation:
    """Messages and tokens of one episode.

    The order of calls is ``begin``, then any number of ``prompt_ids``, ``add_sampled`` and one of
    ``add_tool_results`` or ``add_user``. Anything else is a fault of the caller and raises ``RuntimeError``.
    """

    def __init__(self, family: ChatFamily, tools: Sequence[ToolSchema]) -> None:
        """Make an empty conversation; use :meth:`begin` or :meth:`from_messages`."""
        self.family = family
        self.messages: list[Json] = []
        """OpenAI-style messages: ``content`` is a string, ``arguments`` are JSON strings, reasoning is in
        ``reasoning_content``, what could not be read in ``tool_call_errors``."""
        self._tools = tuple(tools)
        self._streams = [_TokenStream()]
        self.turns = 0
        """Assistant turns so far, over all segments."""
        self._prompted = False
        self._owed: list[TextSpan] = []
        """What the template puts behind the last assistant turn; appended with the next message."""
        self._as_sampled_since = 0
        """Index of the first message whose reasoning the current segment may hold."""

    @classmethod
    def begin(cls, family: ChatFamily, *, system: str | None, tools: Sequence[ToolSchema], user: str | None) -> Self:
        """Start a conversation with the system prompt, the tools and the user's first message; without one the agent
        speaks first."""
        conversation = cls(family, tools)
        if system is not None:
            conversation.messages.append({"role": "system", "content": system})
        if user is not None:
            conversation.messages.append({"role": "user", "content": user})
        conversation._append([*family.system(system, tools), *([] if user is None else family.user(user))])
        return conversation

    @classmethod
    def from_history(cls, family: ChatFamily, messages: Sequence[Json], tools: Sequence[ToolSchema]) -> Self:
        """Start from a conversation that somebody else tells, as the template writes it; assistant turns are TEMPLATE.

        Raises :class:`mua.tokens.codec.ConversationError` for a message of a wrong shape (its index is named).
        """
        conversation = cls(family, tools)
        conversation.messages = [
            _checked(message, index, system_anywhere=True) for index, message in enumerate(messages)
        ]
        conversation._append(family.history(conversation.messages, tools))
        conversation._as_sampled_since = len(messages)
        return conversation

    def mark(self) -> Mark:
        """This place, to be called right after :meth:`add_sampled`."""
        self._require(prompted=False)
        return Mark(
            len(self.messages),
            len(self._streams) - 1,
            self.length,
            tuple(self._owed),
            self._as_sampled_since,
            self.turns,
        )

    def fork(self, mark: Mark) -> Self:
        """A conversation that goes on from ``mark``; what it shares with this one carries no loss a second time.

        Its tokens are those that were sampled, never a rendering of their text; their provenance is TEMPLATE.
        """
        other = type(self)(self.family, self._tools)
        other.messages = [dict(message) for message in self.messages[: mark.messages]]
        shared = self._streams[mark.stream]
        provenance = shared.column("provenance")[: mark.tokens]
        provenance[provenance == Provenance.SAMPLED] = Provenance.TEMPLATE
        turn = shared.column("turn")[: mark.tokens]
        other._streams[0].extend(shared.column("ids")[: mark.tokens], provenance, turn)
        other._owed, other.turns = list(mark.owed), mark.turns
        other._as_sampled_since = mark.as_sampled_since
        return other

    @classmethod
    def from_messages(
        cls,
        family: ChatFamily,
        messages: Sequence[Json],
        tools: Sequence[ToolSchema],
        *,
        train_on: Literal["all", "last"],
        find_error: Callable[[AssistantTurn], str | None] = lambda turn: None,
    ) -> Self:
        """Encode a demonstration for supervised training.

        Assistant messages (text, tool calls, ``reasoning_content``) become the tokens a policy would have sampled
        behind the generation prompt, end-of-turn token included: provenance SAMPLED, version -1, log-probability
        0. Assistant messages with ``"weight": 0`` are TEMPLATE, and with ``train_on="last"`` all but the last of the
        others.

        Args:
            family: the policy's chat family.
            messages: OpenAI-style; an optional system message, one of the user or the assistant, then anything.
            tools: schemas of the tools in the system prompt.
            train_on: which assistant messages carry loss.
            find_error: what is wrong with a turn that carries loss, if anything is.

        Raises:
            ConversationError: a message has a wrong role, order or shape, or ``find_error`` finds one that carries loss
                wrong (the message's index is named), or nothing carries loss.
        """
        demonstration = [_checked(message, index) for index, message in enumerate(messages)]
        roles = [message["role"] for message in demonstration]
        head = 1 if roles[:1] == ["system"] else 0
        if "tool" in roles[head : head + 1] or "assistant" not in roles:
            raise ConversationError(
                "a demonstration is an optional system message, one of the user or the assistant, and others, at least "
                f"one of the assistant; the roles are {', '.join(roles[:6]) or 'none'}"
            )
        system = demonstration[0]["content"] if head else None
        user = demonstration[head]["content"] if roles[head] == "user" else None
        conversation = cls.begin(family, system=system, tools=tools, user=user)
        trained = [i for i, role in enumerate(roles) if role == "assistant" and messages[i].get("weight") != 0]
        if not trained:
            raise ConversationError("every assistant message has weight 0: nothing carries loss")
        if train_on == "last":
            trained = trained[-1:]
        for index in range(head + (user is not None), len(demonstration)):
            try:
                conversation._demonstrate(demonstration, index, find_error if index in trained else None)
            except (ConversationError, RuntimeError) as error:
                raise ConversationError(f"messages[{index}]: {error}") from error
        return conversation

    @property
    def length(self) -> int:
        """Tokens of the current segment."""
        return self._streams[-1].length

    @property
    def routed(self) -> int:
        """Tokens of the current segment whose experts are known: where the next request should ask from."""
        return self._streams[-1].routed

    @property
    def trained_segments(self) -> int:
        """Segments before the current one that :meth:`segments` will hold; the number there of the current one, if
        anything is sampled in it."""
        return sum(bool((stream.column("provenance") == Provenance.SAMPLED).any()) for stream in self._streams[:-1])

    def prompt_ids(self) -> Int32Array:
        """Ids to send to the engine now, ``[T]``; opens the assistant's turn at the first call."""
        if not self._prompted:
            if self.messages and self.messages[-1]["role"] == "assistant":
                raise RuntimeError("the assistant's turn is over: add a user message or tool results first")
            self._append(self.family.generation_prompt())
            self._prompted = True
        return self._streams[-1].column("ids")

    def add_sampled(self, generation: Generation, number: int | None = None) -> AssistantTurn:
        """Append what the engine sampled for :meth:`prompt_ids`, exactly as it came, and read it.

        A turn cut by length gets no end-of-turn token here; the template's follows with the next message. ``number``
        is the turn's in a trajectory of several conversations; without it turns are counted here.

        Raises:
            EngineError: the generation was aborted, its arrays differ in length, or it stopped without a stop
                token (the end of a turn would then never be trained).
        """
        self._require(prompted=True)
        n = len(generation.ids)
        if generation.finish == "abort":
            raise EngineError("the engine aborted the turn; an aborted generation cannot become a message")
        if len(generation.logprobs) != n or len(generation.versions) != n:
            raise EngineError(
                f"the engine returned {n} ids, {len(generation.logprobs)} log-probabilities and "
                f"{len(generation.versions)} versions for one turn"
            )
        missing = self.length + n - 1 - self.routed
        if generation.experts is not None and len(generation.experts) != missing:
            raise EngineError(
                f"the engine returned the experts of {len(generation.experts)} tokens, {missing} have none yet"
            )
        if generation.finish == "stop" and not self.family.ended(generation.ids):
            raise EngineError(
                f"the engine stopped without a stop token of the family {self.family.name} "
                f"{self.family.stop_token_ids}; request them as stop_token_ids and keep them in the output"
            )
        self.turns = self.turns if number is None else number
        turn = self.family.parse(generation.ids, turn=self.turns)
        stream = self._streams[-1]
        stream.extend(generation.ids, Provenance.SAMPLED, self.turns, generation.logprobs, generation.versions)
        if generation.experts is not None:
            stream.experts.append(generation.experts)
        self._close_turn(turn.message(), generation.ids)
        return turn

    def add_tool_results(self, results: Sequence[str]) -> None:
        """Append all results of the last assistant turn; templates fold them into one block.

        The first results answer the turn's tool calls in order; further ones (of its errors) have no call id.
        """
        self._require(prompted=False)
        if not results or self.messages[-1]["role"] != "assistant":
            raise RuntimeError("tool results follow an assistant turn, all of them in one call")
        calls = self.messages[-1].get("tool_calls", [])
        self._append_after_turn(self.family.tool_results(results))
        for index, result in enumerate(results):
            answered = {"tool_call_id": calls[index]["id"]} if index < len(calls) else {}
            self.messages.append({"role": "tool", "content": result, **answered})

    def add_user(self, text: str) -> None:
        """Append a user message; starts a new segment where the template rewrites history because of it."""
        self._require(prompted=False)
        message = {"role": "user", "content": text}
        messages = [*self.messages, message]
        if self.family.rewrites(messages, self._as_sampled_since):
            self.rewrite(messages)
        else:
            self._append_after_turn(self.family.user(text))
            self.messages.append(message)

    def add_aside(self, generation: Generation) -> AssistantTurn:
        """:meth:`add_sampled` for what is not counted as a turn: its tokens belong to the turn that comes next, or to
        the last where none comes.

        What follows is :meth:`rewrite`.
        """
        turn = self.add_sampled(generation)
        self.turns -= 1
        return turn

    def rewrite(self, messages: Sequence[Json]) -> None:
        """Go on from ``messages`` instead of those so far: a new segment, as the template writes it.

        Nothing in it was sampled; what was stays in the segments before.
        """
        self._require(prompted=False)
        ids, provenance = self.family.codec.encode(self.family.history(messages, self._tools))
        self._streams.append(_TokenStream())
        self._streams[-1].extend(ids, provenance, self.turns)
        self._owed = []
        # Turns behind the last user message keep their reasoning in it, which the user's next message takes away.
        self._as_sampled_since = 1 + max((i for i, one in enumerate(messages) if one["role"] == "user"), default=-1)
        self.messages = list(messages)

    def add_system(self, text: str) -> None:
        """Append instructions that come in the middle of a conversation."""
        self._require(prompted=False)
        self._append_after_turn(self.family.instruction(text))
        self.messages.append({"role": "system", "content": text})

    def segments(self) -> list[Segment]:
        """The token streams in order; those without a sampled token are left out unless there is no other.

        What was said aside and no turn has followed counts as part of the last turn.
        """
        segments = [stream.segment() for stream in self._streams]
        for segment in segments:
            segment.turn[segment.loss_mask & (segment.turn >= self.turns)] = self.turns - 1
        return [segment for segment in segments if segment.loss_mask.any()] or segments[-1:]

    def _append(self, spans: Sequence[TextSpan]) -> None:
        self._streams[-1].extend(*self.family.codec.encode(spans), self.turns)

    def _append_after_turn(self, spans: Sequence[TextSpan]) -> None:
        self._append([*self._owed, *spans])
        self._owed = []

    def _close_turn(self, message: Json, ids: Int32Array) -> None:
        self.messages.append(message)
        self._owed = self.family.closing(ids)
        self.turns += 1
        self._prompted = False

    def _require(self, *, prompted: bool) -> None:
        if self._prompted != prompted:
            raise RuntimeError(
                "call prompt_ids before add_sampled" if prompted else "the assistant's turn is open: add_sampled first"
            )

    def _demonstrate(
        self, messages: Sequence[Json], index: int, find_error: Callable[[AssistantTurn], str | None] | None
    ) -> None:
        """Add message ``index``, which carries loss if there is ``find_error``; the first of several tool messages
        stands for all of them."""
        message = messages[index]
        if message["role"] == "assistant":
            self.prompt_ids()
            ids, provenance = self.family.codec.encode(self.family.demonstration(message))
            # Calls or reasoning written into the text would be trained as plain characters, never as control tokens.
            turn, calls = self.family.parse(ids), len(message.get("tool_calls", []))
            thoughts = message.get("reasoning_content", "").strip("\n")
            as_told = len(turn.tool_calls) == calls and bool(turn.reasoning) == bool(thoughts)
            if find_error is not None and (turn.errors or not as_told):
                counted = f"{len(turn.tool_calls)} tool calls instead of {calls}"
                raise ConversationError(
                    "this assistant message does not read back as itself "
                    f"({turn.errors[0].message if turn.errors else counted}); calls belong into tool_calls, reasoning "
                    "into reasoning_content, and a malformed turn is no demonstration"
                )
            if find_error is not None and (error := find_error(turn)) is not None:
                raise ConversationError(f"this turn is no demonstration: {error}")
            self._streams[-1].extend(ids, Provenance.TEMPLATE if find_error is None else provenance, self.turns)
            self._close_turn(message, ids)
        elif message["role"] == "user":
            self.add_user(message["content"])
        elif messages[index - 1]["role"] != "tool":
            results = takewhile(lambda result: result["role"] == "tool", messages[index:])
            self.add_tool_results([result["content"] for result in results])


def _checked(message: Json, index: int, *, system_anywhere: bool = False) -> Json:
    """A message in the form this module writes itself: string content, arguments as canonical JSON strings."""
    role = message.get("role")
    text = message.get("content")
    where = f"messages[{index}]"
    if role not in ("system", "user", "assistant", "tool") or (role == "system" and index > 0 and not system_anywhere):
        raise ConversationError(f"{where}: role {role!r}; roles are system (first only), user, assistant and tool")
    if not isinstance(text, str) and not (text is None and role == "assistant"):
        raise ConversationError(f"{where}: content must be a string, not {type(text).__name__}")
    checked = {**message, "content": text or ""}
    if role == "assistant":
        checked.pop("tool_calls", None)
        checked.pop("weight", None)
        if message.get("reasoning_content") is None:
            checked.pop("reasoning_content", None)
        for i, call in enumerate(message.get("tool_calls") or ()):
            function, here = call.get("function", call), f"{where}.tool_calls[{i}]"
            name, arguments = function.get("name"), function.get("arguments")
            if isinstance(arguments, str):
                try:
                    arguments = read_json(arguments)
                except JsonError as error:
                    raise ConversationError(f"{here}: arguments are not valid JSON ({error})") from error
            if not isinstance(name, str) or not isinstance(arguments, dict):
                raise ConversationError(f"{here}: a call needs a name (a string) and arguments (an object)")
            written = ToolCall(call.get("id") or f"call_{index}_{i}", name, arguments)
            checked.setdefault("tool_calls", []).append(written.openai())
    return checked
