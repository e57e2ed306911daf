"""ShareGPT records, as LLaMA-Factory and others write them, read into OpenAI form.

::

    {"conversations": [{"from": "human", "value": "Where is W1?"},
                       {"from": "function_call", "value": "{\\"name\\": \\"get_order\\", \\"arguments\\": {...}}"},
                       {"from": "observation", "value": "..."},
                       {"from": "gpt", "value": "It is on its way."}],
     "system": "...", "tools": "[{\\"name\\": ..., \\"parameters\\": {...}}]"}

What the agent did may stand in ``function_call`` values (one call or a list of them) or, as Hermes and Qwen write it,
as ``<tool_call>`` and ``<think>`` blocks inside ``gpt`` values; both become what the chat template of the trained
policy writes. Reading is strict: what is not well-formed is refused, never trained as plain text. An agent's entry with
``"weight": 0`` carries no loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mua.tokens.codec import ConversationError
from mua.tokens.parsing import parse_turn
from mua.types import Json
from mua.utils.strict_json import JsonError, read_json

_OPEN, _CLOSE = "<tool_response>", "</tool_response>"


def openai_messages(record: Json) -> list[Json]:
    """The ``messages`` of a record with ``conversations`` and, perhaps, ``system``.

    An agent's text and the calls that follow it are one message, and so are calls in a row. Raises
    :class:`ConversationError` naming the entry for whatever is not of this form.
    """
    entries = record["conversations"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConversationError('"conversations" must be an array of objects')
    messages: list[Json] = []
    if system := record.get("system"):
        messages.append({"role": "system", "content": system})
    for index, entry in enumerate(entries):
        try:
            who, value = entry.get("from"), entry.get("value")
            reader = _READERS.get(who) if isinstance(who, str) else None
            if reader is None:
                raise ConversationError(f'"from" is {who!r}; it must be one of {", ".join(_READERS)}')
            if not isinstance(value, str):
                raise ConversationError(f'"value" must be a string, not {type(value).__name__}')
            weight = {"weight": entry["weight"]} if "weight" in entry else {}
            for message in reader(value):
                calls_only = "tool_calls" in message and not message["content"] and "reasoning_content" not in message
                # The calls of a message without text belong to the agent's unfinished message before it.
                if not (calls_only and messages and messages[-1]["role"] == "assistant"):
                    messages.append(message | weight)
                elif messages[-1].get("weight") != weight.get("weight"):
                    raise ConversationError(
                        "these calls and the text before them are one message; give both the same weight"
                    )
                else:
                    messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        except ConversationError as error:
            raise ConversationError(f"conversations[{index}]: {error}") from None
    return messages


def _spoken(role: str) -> Callable[[str], list[Json]]:
    return lambda value: [{"role": role, "content": value}]


def _agent(value: str) -> list[Json]:
    """Text, with the ``<think>`` block and the calls it may hold."""
    turn = parse_turn(value, reasoning=True)
    if turn.errors:
        raise ConversationError(turn.errors[0].message)
    message: Json = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call.name, call.arguments) for call in turn.tool_calls]
    return [message]


def _calls(value: str) -> list[Json]:
    """One call or a list of them as JSON, behind a ``<think>`` block perhaps."""
    (message,) = _agent(value)
    try:
        found = read_json(message["content"])
    except JsonError as error:
        raise ConversationError(f"the function call is not valid JSON ({error})") from None
    listed = found if isinstance(found, list) else [found]
    if not listed or not all(isinstance(call, dict) and "name" in call for call in listed):
        raise ConversationError('a function call is an object {"name": ..., "arguments": {...}}, or a list of them')
    return [message | {"content": "", "tool_calls": [_call(c["name"], c.get("arguments", {})) for c in listed]}]


def _call(name: str, arguments: Any) -> Json:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _results(value: str) -> list[Json]:
    """One result, or those that stand in ``<tool_response>`` blocks: the template puts them into blocks again."""
    *blocks, rest = [part.strip() if part.isspace() else part.lstrip() for part in value.split(_CLOSE)]
    whole = blocks and not rest and all(block.startswith(_OPEN) for block in blocks)
    texts = [block.removeprefix(_OPEN).removeprefix("\n").removesuffix("\n") for block in blocks] if whole else [value]
    return [{"role": "tool", "content": text} for text in texts]


_READERS: dict[str, Callable[[str], list[Json]]] = {
    "system": _spoken("system"),
    "human": _spoken("user"),
    "user": _spoken("user"),
    "gpt": _agent,
    "assistant": _agent,
    "function_call": _calls,
    "observation": _results,
    "tool": _results,
}
