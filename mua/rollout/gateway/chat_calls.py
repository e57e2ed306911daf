"""What clients send, read into one form: messages, tools, and what they ask of sampling.

What is trained must be of the distribution that the configuration states. A request's own temperature, top_p, seed
and penalties are therefore overridden (or refused: ``agent.sampling``), and what only constrained decoding could give
(``response_format``, ``logit_bias``, several choices) is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mua.types import Json, ToolSchema
from mua.utils.strict_json import JsonError, deeper, read_json, unpaired_surrogate

_OVERRIDDEN = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_REFUSED = ("logit_bias", "logprobs", "top_logprobs", "functions", "function_call", "audio", "prediction")
_MOST_MESSAGES = 4000


class Refused(Exception):
    """A request that is answered with an error of OpenAI's form."""

    def __init__(self, status: int, message: str, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> Json:
        """The error as OpenAI's clients read it."""
        kinds = {401: "authentication_error", 413: "invalid_request_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request for a turn."""

    messages: list[Json]
    """Role, content (a string) and, of assistant messages, ``tool_calls`` in OpenAI's form."""
    tools: tuple[ToolSchema, ...]
    calls_tools: bool
    """False where ``tool_choice`` is none: what the policy writes is then text, a call too."""
    most_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    usage: bool
    """Whether a stream ends with a chunk that tells the usage."""
    model: str
    overridden: tuple[str, ...]
    """Sampling parameters that the request asked for and does not get."""
    digest: str
    """Of the request's whole body."""


def read_chat(raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The body of ``/v1/chat/completions``. Raises :class:`Refused`."""
    return chat_call(read_object(raw), raw, sampling)


def chat_call(body: Json, raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The same from parsed JSON; ``raw`` is what it was parsed from."""
    if body.get("n") not in (None, 1):
        raise Refused(400, "n: one choice a request is served; ask again for another", param="n")
    for key in _REFUSED:
        if body.get(key):
            raise Refused(400, f"{key}: not served, because it would change what is sampled", param=key)
    wanted = body.get("response_format")
    if wanted is not None and wanted != {"type": "text"}:
        raise Refused(400, "response_format: constrained decoding is not served", param="response_format")
    overridden = tuple(key for key in _OVERRIDDEN if body.get(key) is not None)
    if overridden and sampling == "refuse":
        raise Refused(
            400, f"{overridden[0]}: sampling is the run's (agent.sampling is refuse); leave it out", param=overridden[0]
        )
    tools = read_tools(body.get("tools"))
    options = body.get("stream_options") or {}
    return ChatCall(
        messages=read_messages(body.get("messages")),
        tools=tools,
        calls_tools=_calls_tools(body.get("tool_choice"), tools),
        most_tokens=_most_tokens(body),
        stop=_stops(body.get("stop")),
        stream=body.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(body.get("model") or "policy")[:200],
        overridden=overridden,
        digest=hashlib.sha256(raw).hexdigest(),
    )


def read_object(raw: bytes) -> Json:
    """The JSON object that ``raw`` holds. Raises :class:`Refused`."""
    try:
        body = read_json(raw)
    except (JsonError, UnicodeDecodeError) as error:
        raise Refused(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


def read_messages(found: Any) -> list[Json]:
    """Messages in the form of :attr:`ChatCall.messages`. Raises :class:`Refused`, naming the index."""
    if not isinstance(found, list) or not found:
        raise Refused(400, "messages: a list of at least one message", param="messages")
    if len(found) > _MOST_MESSAGES:
        raise Refused(400, f"messages: {len(found)}, and {_MOST_MESSAGES} are the most", param="messages")
    messages = [_message(message, f"messages.[{index}]") for index, message in enumerate(found)]
    if messages[-1]["role"] == "assistant":
        raise Refused(400, "messages: the last is the assistant's; what shall it answer?", param="messages")
    return messages


def _message(found: Any, where: str) -> Json:
    if not isinstance(found, dict):
        raise Refused(400, f"{where}: must be an object", param=where)
    role = {"developer": "system", "function": "tool"}.get(str(found.get("role")), found.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise Refused(400, f"{where}.role: {str(role)[:40]!r} is none of system, user, assistant, tool", param=where)
    message: Json = {"role": role, "content": flattened(found.get("content"), where)}
    if role == "assistant" and (calls := found.get("tool_calls")):
        if not isinstance(calls, list):
            raise Refused(400, f"{where}.tool_calls: must be a list", param=where)
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if role == "tool" and isinstance(found.get("tool_call_id"), str):
        message["tool_call_id"] = found["tool_call_id"]
    return message


def _call(found: Any, where: str) -> Json:
    function = found.get("function") if isinstance(found, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(400, f"{where}: a function with a name", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        raise Refused(400, f"{where}.function.arguments: must be a string of JSON", param=where)
    written = {"name": _text(function["name"], where), "arguments": _text(arguments, where)}
    return {"id": str(found.get("id") or ""), "type": "function", "function": written}


def flattened(content: Any, where: str) -> str:
    """Content as one string: null is empty, text parts are joined. Raises :class:`Refused` for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _text(content, where)
    if not isinstance(content, list):
        raise Refused(400, f"{where}.content: must be a string or a list of parts", param=where)
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Refused(400, f"{where}.content: parts of text only, not {str(kind)[:40]!r}", param=where)
        texts.append(_text(text, where))
    return "".join(texts)


def _text(text: str, where: str) -> str:
    if (at := unpaired_surrogate(text)) is not None:
        raise Refused(400, f"{where}: an unpaired surrogate at character {at}", param=where)
    return text


def read_tools(found: Any) -> tuple[ToolSchema, ...]:
    """Tools as the policy's template shows them; ``strict`` and what else a client adds is left out."""
    if found is None:
        return ()
    if not isinstance(found, list):
        raise Refused(400, "tools: must be a list", param="tools")
    tools = []
    for index, tool in enumerate(found):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else 0
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools.[{index}]: functions with a name are served, no others", param="tools")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or deeper(parameters, 60):
            raise Refused(400, f"tools.[{index}].function.parameters: must be a JSON schema", param="tools")
        tools.append(ToolSchema(function["name"], str(function.get("description") or ""), parameters))
    return tuple(tools)


def _calls_tools(choice: Any, tools: Sequence[ToolSchema]) -> bool:
    """``required`` and a named function are served as auto: a template can offer calls, only constrained decoding
    could force one, and that is another distribution."""
    if choice in (None, "auto", "required", "none"):
        return choice != "none"
    name = choice.get("function", choice).get("name") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return True
    if not any(tool.name == name for tool in tools):
        raise Refused(400, "tool_choice: none, auto, required or a function among tools", param="tool_choice")
    return True


def _most_tokens(body: Json) -> int | None:
    asked = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
    for value in asked:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refused(400, "max_tokens: a whole number from 1 on", param="max_tokens")
    return min(asked, default=None)


def _stops(found: Any) -> tuple[str, ...]:
    stops = [found] if isinstance(found, str) else found or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops) or len(stops) > 16:
        raise Refused(400, "stop: a string or a list of at most 16", param="stop")
    return tuple(stops)
