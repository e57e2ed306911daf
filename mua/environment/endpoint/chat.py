"""What passes between a role and its endpoints: a request, its reply, or why there was none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import responses
from typing import Any, Literal, Self, TypeAlias

from mua.config.environment import EndpointConfig
from mua.environment.blame import Blame, blame, error_codes
from mua.types import Json
from mua.utils.errors import UserFaultKind

Message: TypeAlias = Mapping[str, Any]
"""An OpenAI-style chat message."""
Format: TypeAlias = Literal["json_schema", "json_object", "text"]
Kind: TypeAlias = Literal[
    "timeout", "connection", "rate_limit", "refused", "server", "unreadable", "ended", "empty", "tool_call", "rejected"
]
"""Sorts of trouble, as the metrics ``errors/<kind>`` count them."""

MAX_REPLY_CHARACTERS = 200_000
"""Of one reply of a user or judge, reasoning included; longer ones are not looked into."""
MAX_CALLS = 64
"""Calls of tools in one reply of a user."""

_LONGEST_SAID = 65536
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
    may_be_empty: bool = False
    """Whether no words are an answer too."""

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

    came: Json = field(default_factory=dict)
    """The whole object among the message's ``tool_calls``; empty where it was no such object."""

    def openai(self, call_id: str | None = None, *, readable: bool = True) -> Json:
        """The call as it goes back to the server: as it came, with ``call_id`` if one is given. Where it is not
        ``readable`` it has no arguments, because servers refuse to render such a conversation."""
        function = dict(self.came.get("function") or {"name": self.name, "arguments": self.arguments})
        if not readable:
            function |= {"name": self.name or "unknown", "arguments": "{}"}
        return {"type": "function", **self.came, "id": call_id or self.id, "function": function}


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
    message: Json = field(default_factory=dict)
    """The assistant's message as it came, with whatever else the server put into it (a signature, say)."""
    as_text: tuple[str, ...] = ()
    """What the server did not take out of the text: ``calls``, ``reasoning``."""

    @classmethod
    def of(cls, fields: Json) -> Self:
        """From what ``dataclasses.asdict`` gives."""
        calls = tuple(FunctionCall(**call) for call in fields["calls"])
        return cls(**fields | {"calls": calls, "as_text": tuple(fields.get("as_text", ()))})

    def sent_back(self, calls: Sequence[Json], *, reasoning: bool = True) -> Json:
        """The message for the server that wrote it, as it came, unknown keys included; ``calls`` in the place of its
        own (:meth:`FunctionCall.openai`). Without ``reasoning`` text and calls alone."""
        if not reasoning or not self.message:
            told: Json = {"role": "assistant", "content": self.text or (None if calls else "")}
            return told | ({"tool_calls": list(calls)} if calls else {})
        listed = {"tool_calls": list(calls)} if self.message.get("tool_calls") else {}
        return {**self.message, "role": "assistant", **listed}


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
    blame: Blame = Blame.PASSING

    @property
    def retry(self) -> bool:
        """Whether this request may be sent there again."""
        may = self.kind != "refused" or self.status in _RETRIED_STATUS
        return self.kind == "ended" or (may and self.blame not in (Blame.CONTEXT, Blame.POLICY))


def unreadable(reason: str) -> RequestError:
    """The endpoint answered, but not as a chat endpoint does."""
    fix = "check that {here}.base_url is an OpenAI-compatible chat endpoint"
    return RequestError("unreadable", f"unusable reply: {reason}", fix, UserFaultKind.BROKEN_TEXT)


def too_long(reason: str) -> RequestError:
    """What the model wrote is longer than anybody reads."""
    fix = "try another {here}.model or a lower max_tokens"
    return RequestError("rejected", f"unusable reply: {reason}", fix, UserFaultKind.TOO_LONG)


_FIXES = {
    400: "check {here}.model, temperature and max_tokens",
    401: "check {here}.api_key",
    403: "check that {here}.api_key may use this model",
    404: "check {here}.base_url (it usually ends in /v1) and {here}.model",
    429: "lower {here}.concurrency or raise {role}.max_retries and total_seconds",
}


def read_refusal(status: int, error: Any, text: str, wait_seconds: float = 0.0) -> RequestError:
    """The trouble that an HTTP ``status`` tells of, with the ``error`` of its body, or else its ``text``."""
    said = error.get("message") if isinstance(error, dict) else error
    said = said if isinstance(said, str) and said else text[:_LONGEST_SAID]
    trouble = RequestError(
        "rate_limit" if status == 429 else "server" if status >= 500 else "refused",
        f"HTTP {status} {responses.get(status, '')}: {said}",
        _FIXES.get(status, "look at the server's log" if status >= 500 else "check the section {here}"),
        status=status,
        blame=blame("endpoint", [*error_codes(error), status], said),
    )
    return replace(trouble, wait_seconds=wait_seconds) if trouble.retry else trouble
