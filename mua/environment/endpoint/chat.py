"""What passes between a role and its endpoints: a request, its reply, or why there was none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias

from mua.config.environment import EndpointConfig
from mua.types import Json
from mua.utils.errors import UserFaultKind
from mua.utils.strict_json import JsonError, read_json, unpaired_surrogate

Message: TypeAlias = Mapping[str, Any]
"""An OpenAI-style chat message."""
Format: TypeAlias = Literal["json_schema", "json_object", "text"]
Kind: TypeAlias = Literal[
    "timeout", "connection", "rate_limit", "refused", "server", "unreadable", "empty", "tool_call", "rejected"
]
"""Sorts of trouble, as the metrics ``errors/<kind>`` count them."""

MAX_REPLY_CHARACTERS = 200_000
"""Of one reply of a user or judge, reasoning included; longer ones are not looked into."""
MAX_CALLS = 64
"""Calls of tools in one reply of a user."""

_THINKING = re.compile(r"<think>.*?(</think>|\Z)|\A((?!<think>).)*?</think>", re.DOTALL)
"""Reasoning, cut short too; templates that open it in the prompt leave only its end in the reply."""
_THOUGHT_FIRST = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_RETRIED_STATUS = frozenset({408, 409, 425})


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
    sampling: Json = field(default_factory=dict)
    """Further fields of sampling, such as ``top_p``."""
    verbatim: bool = False
    """Whether the reply is wanted as it was written, empty perhaps, its reasoning apart: it is the policy's. Else
    reasoning is left out, and what is no answer is asked for again."""

    def body(self, config: EndpointConfig, form: Format) -> Json:
        """The JSON body of a request to ``/chat/completions``."""
        body: Json = {
            "model": config.model,
            "messages": list(self.messages),
            "temperature": self.temperature,
            config.tokens_parameter: self.max_tokens,
            **self.sampling,
        }
        if config.send_seed:
            body["seed"] = self.seed & 0x7FFFFFFF
        if self.tools:
            body |= {"tools": list(self.tools), "tool_choice": self.tool_choice or "auto"}
        if self.schema is not None and form == "json_schema":
            named = {"name": "answer", "strict": True, "schema": self.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        elif self.schema is not None and form == "json_object":
            body["response_format"] = {"type": "json_object"}
        return body | config.extra

    def estimated_tokens(self) -> int:
        """Tokens read and written at most, at four characters per token."""
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
    """A reply: text, or calls of tools, or both."""

    text: str
    calls: tuple[FunctionCall, ...] = ()
    usage: dict[str, int] = field(default_factory=dict)
    """``prompt_tokens``, ``completion_tokens``, ``cached_tokens`` and ``reasoning_tokens``, where they are told."""
    truncated: bool = False
    """Whether the reply was cut at ``max_tokens``."""
    reasoning: str | None = None
    """Of a verbatim reply."""
    cost: float = 0.0
    """By the prices of the endpoint that answered."""

    @classmethod
    def of(cls, fields: Json) -> Self:
        """From what ``dataclasses.asdict`` gives."""
        return cls(**fields | {"calls": tuple(FunctionCall(**call) for call in fields["calls"])})


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request gave no reply. ``fix`` names keys below the endpoint's section, such as ``{here}.api_key``."""

    kind: Kind
    reason: str
    fix: str
    fault: UserFaultKind = UserFaultKind.UNREACHABLE
    """What it is a user's fault of, should nothing better come."""
    status: int = 0
    """HTTP status, where there was one."""
    wait_seconds: float = 0.0
    """What the endpoint asked for by Retry-After."""

    @property
    def retry(self) -> bool:
        """Whether this request may be sent there again."""
        return self.kind != "refused" or self.status in _RETRIED_STATUS


def unreadable(reason: str) -> RequestError:
    """The endpoint answered, but not as a chat endpoint does."""
    fix = "check that {here}.base_url is an OpenAI-compatible chat endpoint"
    return RequestError("unreadable", f"unusable reply: {reason}", fix, UserFaultKind.BROKEN_TEXT)


def too_long(reason: str) -> RequestError:
    """What the model wrote is longer than anybody reads."""
    fix = "try another {here}.model or a lower max_tokens"
    return RequestError("rejected", f"unusable reply: {reason}", fix, UserFaultKind.TOO_LONG)


def read_completion(body: bytes, request: ChatRequest) -> Completion | RequestError:
    """The reply to ``request`` in a body of status 200."""
    try:
        answer = read_json(body, strict=False)
        choice = answer["choices"][0]
        message = choice["message"]
        content = message.get("content")
        calls = []
        for place, listed in enumerate(message.get("tool_calls") or ()):
            function = listed["function"]
            arguments = function.get("arguments") or "{}"
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            name, number = str(function["name"] or ""), str(listed.get("id") or f"call_{place}")
            calls.append(FunctionCall(number, name, arguments))
    except JsonError as error:
        return unreadable(f"no JSON ({error})")
    except (KeyError, IndexError, TypeError, AttributeError):
        return unreadable("no choices[0].message.content")
    if not (isinstance(content, str) or (content is None and (calls or request.verbatim))):
        return unreadable(f"message content is {type(content).__name__}, not text")
    text, reasoning = content or "", None
    if request.verbatim:
        # In a field, on whose name servers disagree, or before the text.
        given = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(given, str):
            reasoning = given
        elif thought := _THOUGHT_FIRST.match(text):
            text, reasoning = text[thought.end() :], thought[1].strip("\n")
    elif calls and not request.tools:
        reason = "unusable reply: it calls a tool, and none was offered"
        return RequestError("tool_call", reason, "try another {here}.model", UserFaultKind.TOOL_CALL_IN_TEXT)
    elif len(text) > MAX_REPLY_CHARACTERS:
        return too_long(f"{len(text)} characters")
    elif len(calls) > MAX_CALLS or any(len(call.arguments) > MAX_REPLY_CHARACTERS for call in calls):
        return too_long(f"{len(calls)} calls with {sum(len(call.arguments) for call in calls)} characters")
    else:
        text = _THINKING.sub("", text).strip()
        if not text and not calls:
            fix = "try another {here}.model or more max_tokens"
            return RequestError("empty", "unusable reply: the reply is empty", fix, UserFaultKind.NO_TEXT)
    written = (text, reasoning or "", *(call.id + call.name + call.arguments for call in calls))
    if unpaired_surrogate("".join(written)) is not None:
        reason = "unusable reply: it holds an unpaired surrogate"
        return RequestError("rejected", reason, "try another {here}.model", UserFaultKind.BROKEN_TEXT)
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    for side, name in (("prompt", "cached_tokens"), ("completion", "reasoning_tokens")):
        details = usage.get(f"{side}_tokens_details")
        counts[name] = details.get(name) if isinstance(details, dict) else None
    used = {name: count for name, count in counts.items() if isinstance(count, int) and count >= 0}
    return Completion(text, tuple(calls), used, choice.get("finish_reason") == "length", reasoning)
