"""What clients send, read into one form: messages, tools, and what they ask of sampling.

What is trained must be of the distribution that the configuration states. A request's own temperature, top_p, seed
and penalties are therefore overridden (or refused: ``agent.sampling``), and what only constrained decoding could give
(``response_format``, ``logit_bias``, several choices) is refused.

Also OpenAI's responses as far as agents need them: items in, items out, nothing kept on the server. What refers to
earlier responses by id (``previous_response_id``, ``conversation``) is refused: libraries send the whole history where
they are told to, which is their default.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from mua.types import Json, ToolSchema
from mua.utils.strict_json import JsonError, deeper, read_json, unpaired_surrogate

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed")
_SERVED = frozenset(
    (
        "messages", "input", "instructions", "model", "tools", "tool_choice", "parallel_tool_calls", "stream",
        "stream_options", "n", "max_tokens", "max_completion_tokens", "max_output_tokens", "response_format", "text",
        "user", "metadata", "store", "include",
    )
)  # fmt: skip
"""Keys of a request that are done as it asks, or looked at one by one; what else it sets is told as overridden."""
_REFUSED = ("logit_bias", "logprobs", "top_logprobs", "functions", "function_call", "audio", "prediction")
_MOST_MESSAGES = 4000
_NOT_SAME = ("input", "instructions", "tools", "text", "max_output_tokens", "include")
_LONGEST_KEY, _MOST_KEYS = 64, 32
PIECE = 512
"""Characters of text in one event of a stream."""


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
    """Keys whose wish the request does not get, or not as it was meant: sampling, ``parallel_tool_calls: false``, a
    ``tool_choice`` that forces a call, ``stop`` (the turn is cut there, but was not sampled with it)."""
    digest: str
    """Of the request's whole body."""


@dataclass(frozen=True, slots=True)
class ServedTurn:
    """What a client is answered."""

    message: Json
    finish: str
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int
    number: int
    created: int
    placed: str
    """appended, forked, rewritten, or started: a conversation without an assistant's turn yet."""


def require(so: object, message: str, param: str | None) -> None:
    """Raise :class:`Refused`, which names ``param``, unless it is ``so``."""
    if not so:
        raise Refused(400, message, param=param)


def chat_call(body: Json, raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The body of ``/v1/chat/completions``; ``raw`` is what it was parsed from. Raises :class:`Refused`."""
    require(body.get("n") in (None, 1), "n: one choice a request is served; ask again for another", "n")
    for key in _REFUSED:
        require(not body.get(key), f"{key}: not served, because it would change what is sampled", key)
    plain = body.get("response_format") in (None, {"type": "text"})
    require(plain, "response_format: constrained decoding is not served", "response_format")
    set_there = [key for key in _SAMPLING if body.get(key) is not None]
    if set_there and sampling == "refuse":
        told = f"{set_there[0]}: sampling is the run's (agent.sampling is refuse); leave it out"
        raise Refused(400, told, param=set_there[0])
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
    overridden = [*set_there, *sorted(key for key in body.keys() - _SERVED - {*_SAMPLING} if body[key])]
    overridden += ["parallel_tool_calls"] if body.get("parallel_tool_calls") is False else []
    overridden += ["tool_choice"] if choice not in (None, "auto", "none") else []
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
        overridden=tuple(key[:_LONGEST_KEY] for key in overridden[:_MOST_KEYS]),
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
            message["tool_calls"] = []
            for at, call in enumerate(calls):
                here = f"{where}.tool_calls[{at}]"
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    raise Refused(400, f"{here}: a function with a name", param=here)
                arguments = function.get("arguments")
                require(isinstance(arguments, str), f"{here}.function.arguments: must be a string of JSON", here)
                written = {"name": _text(function["name"], here), "arguments": _text(str(arguments), here)}
                message["tool_calls"].append({"id": str(call.get("id") or ""), "type": "function", "function": written})
        if role == "tool" and isinstance(one.get("tool_call_id"), str):
            message["tool_call_id"] = one["tool_call_id"]
        messages.append(message)
    last = messages[-1]["role"]
    require(last != "assistant", "messages: the last is the assistant's; what shall it answer?", "messages")
    return messages


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


def response_call(raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The body of ``/v1/responses`` as a request for a turn. Raises :class:`Refused`."""
    body = read_object(raw)
    for key in ("previous_response_id", "conversation", "background", "prompt"):
        require(not body.get(key), f"{key}: not served; send the whole history", key)
    text = body.get("text")
    text_format = text.get("format") if isinstance(text, dict) else None
    plain = text_format is None or (isinstance(text_format, dict) and text_format.get("type") == "text")
    require(plain, "text.format: constrained decoding is not served", "text")
    chat: Json = {key: value for key, value in body.items() if key not in _NOT_SAME}
    chat["messages"] = _messages_of_items(body)
    chat["max_tokens"] = body.get("max_output_tokens")
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [
            {"type": tool.get("type"), "function": tool} if isinstance(tool, dict) else tool for tool in tools
        ]
    return chat_call(chat, raw, sampling)


def _messages_of_items(body: Json) -> list[Json]:
    """The items as messages. Calls join the assistant's message before them, as chat completions have it."""
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    items = body.get("input")
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise Refused(400, "input: a string or a list of items", param="input")
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": flatten_content(item.get("content"), where)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = flatten_content(item.get("output"), where)
            messages.append({"role": "tool", "content": output, "tool_call_id": item.get("call_id")})
        else:
            told = f"{where}: items of the type {str(kind)[:40]!r} are not served"
            require(kind == "reasoning", told, "input")
    return messages


def response_body(turn: ServedTurn, call: ChatCall) -> Json:
    """The response that tells ``turn``."""
    output: list[Json] = []
    if thoughts := turn.message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thoughts}]
        output.append({"type": "reasoning", "id": f"rs_{turn.number}", "summary": summary})
    calls = turn.message.get("tool_calls", [])
    if turn.message["content"] or not calls:
        part = {"type": "output_text", "text": turn.message["content"], "annotations": [], "logprobs": []}
        said = {"type": "message", "id": f"msg_{turn.number}", "role": "assistant", "status": "completed"}
        output.append(said | {"content": [part]})
    for one in calls:
        named = {"type": "function_call", "id": f"fc_{one['id']}", "call_id": one["id"], "status": "completed"}
        output.append(named | one["function"])
    cut = turn.finish == "length"
    return {
        "id": f"resp_{turn.number}",
        "object": "response",
        "created_at": turn.created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "instructions": None,
        "metadata": {},
        "model": call.model,
        "output": output,
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens},
            "output_tokens": turn.sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.sampled_tokens,
        },
    }


def response_events(turn: ServedTurn, call: ChatCall) -> Iterator[Json]:
    """The same as the events of a stream, in order. The turn is sampled whole before the first."""
    whole = response_body(turn, call)
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[Json] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        events += _item_events(item, {"item_id": item["id"], "output_index": index})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    for number, event in enumerate(events):
        yield event | {"sequence_number": number}


def _item_events(item: Json, place: Json) -> Iterator[Json]:
    """One item of the output: added, its text piece by piece, done."""
    index, part, logprobs = {"output_index": place["output_index"]}, None, dict[str, Any]()
    if item["type"] == "function_call":
        name, at, text = "function_call_arguments", place, item["arguments"]
        empty: Json = {"arguments": ""}
        done: Json = {"arguments": text, "name": item["name"]}
    else:
        field, block, name = "summary", "reasoning_summary_part", "reasoning_summary_text"
        if item["type"] == "message":
            field, block, name, logprobs = "content", "content_part", "output_text", {"logprobs": []}
        (part,), at, empty = item[field], place | {f"{field}_index": 0}, {field: []}
        text, done = part["text"], {"text": part["text"]}
    status = {"status": "in_progress"} if "status" in item else {}
    yield {"type": "response.output_item.added", "item": item | empty | status, **index}
    if part is not None:
        yield {"type": f"response.{block}.added", "part": part | {"text": ""}, **at}
    for start in range(0, len(text), PIECE):
        yield {"type": f"response.{name}.delta", "delta": text[start : start + PIECE], **at, **logprobs}
    yield {"type": f"response.{name}.done", **done, **at, **logprobs}
    if part is not None:
        yield {"type": f"response.{block}.done", "part": part, **at}
    yield {"type": "response.output_item.done", "item": item, **index}
