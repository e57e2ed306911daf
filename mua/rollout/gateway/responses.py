"""OpenAI's responses as far as agents need them: items in, items out, nothing kept on the server.

What refers to earlier responses by id (``previous_response_id``, ``conversation``) is refused: libraries send the
whole history where they are told to, which is their default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from mua.rollout.gateway.chat_calls import ChatCall, Refused, chat_call, flatten_content, read_object, require
from mua.rollout.gateway.session import ServedTurn
from mua.types import Json

_SAME = ("temperature", "top_p", "seed", "tool_choice", "model", "stream")
PIECE = 512
"""Characters of text in one event of a stream."""


def response_call(raw: bytes, sampling: Literal["override", "refuse"]) -> ChatCall:
    """The body of ``/v1/responses`` as a request for a turn. Raises :class:`Refused`."""
    body = read_object(raw)
    for key in ("previous_response_id", "conversation", "background", "prompt"):
        require(not body.get(key), f"{key}: not served; send the whole history", key)
    text_format = (body.get("text") or {}).get("format") if isinstance(body.get("text"), dict) else None
    plain = text_format is None or text_format.get("type") == "text"
    require(plain, "text.format: constrained decoding is not served", "text")
    chat: Json = {key: body[key] for key in _SAME if key in body}
    chat["messages"] = _messages(body)
    chat["max_tokens"] = body.get("max_output_tokens")
    tools = body.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [
            {"type": tool.get("type"), "function": tool} if isinstance(tool, dict) else tool for tool in tools
        ]
    return chat_call(chat, raw, sampling)


def _messages(body: Json) -> list[Json]:
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
    index = {"output_index": place["output_index"]}
    if item["type"] == "function_call":
        arguments = item["arguments"]
        parts = [
            *_pieces("response.function_call_arguments.delta", arguments, place),
            {"type": "response.function_call_arguments.done", "arguments": arguments, "name": item["name"], **place},
        ]
        empty: Json = {"arguments": ""}
    elif item["type"] == "message":
        (part,) = item["content"]
        at = place | {"content_index": 0}
        logprobs: Json = {"logprobs": []}
        parts = [
            {"type": "response.content_part.added", "part": part | {"text": ""}, **at},
            *_pieces("response.output_text.delta", part["text"], at | logprobs),
            {"type": "response.output_text.done", "text": part["text"], **at, **logprobs},
            {"type": "response.content_part.done", "part": part, **at},
        ]
        empty = {"content": []}
    else:
        (part,), at = item["summary"], place | {"summary_index": 0}
        parts = [
            {"type": "response.reasoning_summary_part.added", "part": part | {"text": ""}, **at},
            *_pieces("response.reasoning_summary_text.delta", part["text"], at),
            {"type": "response.reasoning_summary_text.done", "text": part["text"], **at},
            {"type": "response.reasoning_summary_part.done", "part": part, **at},
        ]
        empty = {"summary": []}
    status = {"status": "in_progress"} if "status" in item else {}
    yield {"type": "response.output_item.added", "item": item | empty | status, **index}
    yield from parts
    yield {"type": "response.output_item.done", "item": item, **index}


def _pieces(kind: str, text: str, place: Json) -> Iterator[Json]:
    return ({"type": kind, "delta": text[at : at + PIECE], **place} for at in range(0, len(text), PIECE))
