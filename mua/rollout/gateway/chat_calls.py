"""What clients send, read into one form: messages, tools, and what they ask of sampling.

What is trained must be of the distribution that the configuration states. A request's own temperature, top_p, seed
and penalties are therefore overridden (or refused: ``agent.sampling``), and what only constrained decoding could give
(``response_format``, ``logit_bias``, several choices) is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Literal, cast

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


def require(so: object, message: str, param: str | None) -> None:
    """Raise :class:`Refused`, which names ``param``, unless it is ``so``."""
    if not so:
        raise Refused(400, message, param=param)


def read_chat(raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The body of ``/v1/chat/completions``. Raises :class:`Refused`."""
    return chat_call(read_object(raw), raw, sampling)


def chat_call(body: Json, raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The same from parsed JSON; ``raw`` is what it was parsed from."""
    require(body.get("n") in (None, 1), "n: one choice a request is served; ask again for another", "n")
    for key in _REFUSED:
        require(not body.get(key), f"{key}: not served, because it would change what is sampled", key)
    plain = body.get("response_format") in (None, {"type": "text"})
    require(plain, "response_format: constrained decoding is not served", "response_format")
    overridden = tuple(key for key in _OVERRIDDEN if body.get(key) is not None)
    if overridden and sampling == "refuse":
        told = f"{overridden[0]}: sampling is the run's (agent.sampling is refuse); leave it out"
        raise Refused(400, told, param=overridden[0])
    limits = [body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None]
    whole = all(isinstance(limit, int) and not isinstance(limit, bool) and limit >= 1 for limit in limits)
    require(whole, "max_tokens: a whole number from 1 on", "max_tokens")
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    few = isinstance(stops, list) and len(stops) <= 16 and all(isinstance(stop, str) and stop for stop in stops)
    require(few, "stop: a string or a list of at most 16", "stop")
    tools = read_tools(body.get("tools"))
    # ``required`` and a named function are served as auto: a template can offer calls, only constrained decoding
    # could force one, and that is another distribution.
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") != "allowed_tools":
        function = choice.get("function", choice)
        named = isinstance(function, dict) and function.get("name") in [tool.name for tool in tools]
    else:
        named = isinstance(choice, dict) or choice in (None, "auto", "required", "none")
    require(named, "tool_choice: none, auto, required or a function among tools", "tool_choice")
    options = body.get("stream_options") or {}
    return ChatCall(
        messages=read_messages(body.get("messages")),
        tools=tools,
        calls_tools=choice != "none",
        most_tokens=min(limits, default=None),
        stop=tuple(stops),
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
    require(isinstance(body, dict), "the body must be a JSON object", None)
    return cast("Json", body)


def read_messages(found: Any) -> list[Json]:
    """Messages in the form of :attr:`ChatCall.messages`. Raises :class:`Refused`, naming the index."""
    require(isinstance(found, list) and found, "messages: a list of at least one message", "messages")
    most = _MOST_MESSAGES
    require(len(found) <= most, f"messages: {len(found)}, and {most} are the most", "messages")
    messages: list[Json] = []
    for index, one in enumerate(found):
        where = f"messages.[{index}]"
        require(isinstance(one, dict), f"{where}: must be an object", where)
        role = {"developer": "system", "function": "tool"}.get(str(one.get("role")), one.get("role"))
        known = role in ("system", "user", "assistant", "tool")
        require(known, f"{where}.role: {str(role)[:40]!r} is none of system, user, assistant, tool", where)
        message: Json = {"role": role, "content": flatten_content(one.get("content"), where)}
        if role == "assistant" and (calls := one.get("tool_calls")):
            require(isinstance(calls, list), f"{where}.tool_calls: must be a list", where)
            message["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(calls)]
        if role == "tool" and isinstance(one.get("tool_call_id"), str):
            message["tool_call_id"] = one["tool_call_id"]
        messages.append(message)
    last = messages[-1]["role"]
    require(last != "assistant", "messages: the last is the assistant's; what shall it answer?", "messages")
    return messages


def _call(found: Any, where: str) -> Json:
    function = found.get("function") if isinstance(found, dict) else None
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    require(named, f"{where}: a function with a name", where)
    assert function is not None
    arguments = function.get("arguments")
    require(isinstance(arguments, str), f"{where}.function.arguments: must be a string of JSON", where)
    written = {"name": _text(function["name"], where), "arguments": _text(arguments, where)}
    return {"id": str(found.get("id") or ""), "type": "function", "function": written}


def flatten_content(content: Any, where: str) -> str:
    """Content as one string: null is empty, text parts are joined. Raises :class:`Refused` for other parts."""
    if content is None or isinstance(content, str):
        return _text(content or "", where)
    require(isinstance(content, list), f"{where}.content: must be a string or a list of parts", where)
    texts = []
    for part in content:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        require(isinstance(text, str), f"{where}.content: parts of text only, not {str(kind)[:40]!r}", where)
        texts.append(_text(str(text), where))
    return "".join(texts)


def _text(text: str, where: str) -> str:
    at = unpaired_surrogate(text)
    require(at is None, f"{where}: an unpaired surrogate at character {at}", where)
    return text


def read_tools(found: Any) -> tuple[ToolSchema, ...]:
    """Tools as the policy's template shows them; ``strict`` and what else a client adds is left out."""
    require(found is None or isinstance(found, list), "tools: must be a list", "tools")
    tools = []
    for index, tool in enumerate(found or ()):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else 0
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refused(400, f"tools.[{index}]: functions with a name are served, no others", param="tools")
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        schema = isinstance(parameters, dict) and not deeper(parameters, 60)
        require(schema, f"tools.[{index}].function.parameters: must be a JSON schema", "tools")
        tools.append(ToolSchema(function["name"], str(function.get("description") or ""), parameters))
    return tuple(tools)
