"""What passes between a role and its endpoints: a request, its reply, or why there was none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mua.errors import UserFaultKind
from mua.types import Json
from mua.untrusted import JsonError, read_json, unpaired_surrogate

Message: TypeAlias = Mapping[str, Any]
"""An OpenAI-style chat message."""
Format: TypeAlias = Literal["json_schema", "json_object", "text"]
Kind: TypeAlias = Literal[
    "timeout", "connection", "rate_limit", "refused", "server", "unreadable", "empty", "tool_call", "rejected"
]
"""Sorts of trouble, as the metrics ``errors/<kind>`` count them."""

MAX_REPLY_CHARACTERS = 200_000
"""Of one reply, reasoning included; longer ones are not looked into."""
MAX_CALLS = 64
"""Calls of tools in one reply."""

_THINKING = re.compile(r"<think>.*?(</think>|\Z)|\A((?!<think>).)*?</think>", re.DOTALL)
"""Reasoning, cut short too; templates that open it in the prompt leave only its end in the reply."""
_BREAKING = frozenset({"timeout", "connection", "server", "unreadable"})
_PASSING = frozenset({"timeout", "connection", "rate_limit", "server"})
_AT_ONCE = frozenset({"empty", "tool_call", "rejected"})


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One question to a model, whichever endpoint answers it."""

    messages: Sequence[Message]
    seed: int
    temperature: float
    max_tokens: int
    tools: Sequence[Json] = ()
    """OpenAI tool schemas."""
    tool_choice: str | None = None
    schema: Json | None = None
    """The JSON Schema that the reply must follow; asked for as far as the endpoint can."""

    def body(self, model: str, form: Format, extra: Json) -> Json:
        """The JSON body of a request to ``/chat/completions``."""
        body: Json = {
            "model": model,
            "messages": list(self.messages),
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed & 0x7FFFFFFF,
        }
        if self.tools:
            body["tools"] = list(self.tools)
            body["tool_choice"] = self.tool_choice or "auto"
        if self.schema is not None and form == "json_schema":
            named = {"name": "answer", "strict": True, "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif self.schema is not None and form == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body | extra

    def estimated_tokens(self) -> int:
        """Tokens read and written at most, at four characters a token."""
        characters = sum(len(str(message.get("content") or "")) for message in self.messages)
        return characters // 4 + self.max_tokens


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a tool, as the model wrote it."""

    id: str
    name: str
    arguments: str
    """JSON, if the model kept to it."""

    def openai(self) -> Json:
        """The form it has in an assistant's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply that can be used: text, or calls of offered tools, or both."""

    text: str
    calls: tuple[FunctionCall, ...] = ()
    tokens_in: int = 0
    """As the endpoint counts them; 0 where it does not say."""
    tokens_out: int = 0
    truncated: bool = False
    """Whether the reply was cut at ``max_tokens``."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why one request gave no reply. ``mend`` names keys below the endpoint's section, such as ``{here}.api_key``."""

    kind: Kind
    reason: str
    mend: str
    retry: bool = True
    wait_seconds: float = 0.0
    """What the endpoint asked for by Retry-After."""
    breaking: bool = False
    """Whether it speaks against the endpoint itself; else only against this request."""
    status: int = 0
    """HTTP status, where there was one."""
    fault: UserFaultKind = UserFaultKind.UNREACHABLE
    """What it is a user's fault of, should nothing better come."""

    @property
    def passing(self) -> bool:
        """Whether the endpoint may answer later with nothing changed; what it refuses or garbles, somebody mends."""
        return self.kind in _PASSING

    @property
    def pause(self) -> bool:
        """Whether to back off. What the model wrote wrongly can be asked again at once, under another seed."""
        return self.kind not in _AT_ONCE


def trouble(kind: Kind, reason: str, mend: str, fault: UserFaultKind = UserFaultKind.UNREACHABLE) -> Trouble:
    """Trouble that may pass."""
    return Trouble(kind, reason, mend, breaking=kind in _BREAKING, fault=fault)


def unreadable(reason: str) -> Trouble:
    """The endpoint answered, but not as a chat endpoint does."""
    mend = "check that {here}.base_url is an OpenAI-compatible chat endpoint"
    return trouble("unreadable", f"unusable reply: {reason}", mend, UserFaultKind.BROKEN_TEXT)


def too_long(reason: str) -> Trouble:
    """What the model wrote is longer than anybody reads."""
    mend = "try another {here}.model or a lower max_tokens"
    return trouble("rejected", f"unusable reply: {reason}", mend, UserFaultKind.TOO_LONG)


def read_completion(body: bytes, request: ChatRequest) -> Completion | Trouble:
    """The reply in a body of status 200, reasoning blocks removed."""
    try:
        answer = read_json(body, strict=False)
    except JsonError as error:
        return unreadable(f"no JSON ({error})")
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        content, listed = message.get("content"), message.get("tool_calls") or []
        calls = tuple(_call(one, place) for place, one in enumerate(listed))
    except (KeyError, IndexError, TypeError, AttributeError):
        return unreadable("no choices[0].message.content")
    if content is not None and not isinstance(content, str):
        return unreadable(f"message content is {type(content).__name__}, not text")
    if content is None and not calls:
        return unreadable("message content is NoneType, not text")
    if calls and not request.tools:
        called = "unusable reply: it calls a tool, and none was offered"
        return trouble("tool_call", called, "try another {here}.model", UserFaultKind.TOOL_CALL_IN_TEXT)
    if content is not None and len(content) > MAX_REPLY_CHARACTERS:
        return too_long(f"{len(content)} characters")
    if len(calls) > MAX_CALLS or any(len(call.arguments) > MAX_REPLY_CHARACTERS for call in calls):
        return too_long(f"{len(calls)} calls with {sum(len(call.arguments) for call in calls)} characters")
    text = _THINKING.sub("", content or "").strip()
    if not text and not calls:
        mend = "try another {here}.model or more max_tokens"
        return trouble("empty", "unusable reply: the reply is empty", mend, UserFaultKind.NO_TEXT)
    if unpaired_surrogate("".join((text, *(call.id + call.name + call.arguments for call in calls)))) is not None:
        broken = "unusable reply: it holds an unpaired surrogate"
        return trouble("rejected", broken, "try another {here}.model", UserFaultKind.BROKEN_TEXT)
    usage = answer.get("usage")
    return Completion(
        text,
        calls,
        _count(usage, "prompt_tokens"),
        _count(usage, "completion_tokens"),
        truncated=choice.get("finish_reason") == "length",
    )


def _call(listed: Any, place: int) -> FunctionCall:
    function = listed["function"]
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return FunctionCall(str(listed.get("id") or f"call_{place}"), str(function["name"]), text)


def _count(usage: Any, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value > 0 else 0
