"""A record of conversations, in any of the forms people have, as OpenAI messages and tools.

================== ===================================================================================================
form               record
================== ===================================================================================================
OpenAI             ``{"messages": [{"role": ..., "content": ...}], "tools": [...]}``; content is text or text parts
ShareGPT           ``{"conversations": [{"from": ..., "value": ...}], "system": ..., "tools": ...}``
prompt, completion ``{"prompt": ..., "completion": ...}``, each a text or messages, as TRL and OpenAI's files have them
instruction        ``{"instruction": ..., "input": ..., "output": ..., "system": ...}`` (Alpaca)
================== ===================================================================================================

A message of role ``developer`` is the system message; one of ``function`` with ``function_call`` is a tool's. Of a
prompt nothing carries loss.

ShareGPT records are read as LLaMA-Factory and others write them::

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
from mua.types import Json, ToolSchema
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


_ANSWERS = ("completion", "response", "answer", "output")
"""What stands beside ``prompt`` as that which is to be learned."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_FORMS = (
    'a record has "messages" (OpenAI form), "conversations" (ShareGPT form), "prompt" and "completion", or '
    '"instruction" and "output"; its keys are '
)


def messages_and_tools(record: Any) -> tuple[list[Json], list[ToolSchema]]:
    """Raises :class:`ConversationError` (or what a wrong shape raises) for a record of no such form."""
    if not isinstance(record, dict):
        raise ConversationError(f"a record is an object, not {type(record).__name__}")
    return _plain([dict(message) for message in _messages(record)]), _tools(record)


def _tools(record: Json) -> list[ToolSchema]:
    """Wrapped as OpenAI does or not; MUA-RL's data wraps them all at once."""
    tools = []
    for tool in _listed(record, "tools" if "tools" in record else "functions"):
        inner = tool.get("function", tool)
        for f in inner if isinstance(inner, list) else [inner]:
            parameters = f.get("parameters", {})
            if isinstance(parameters, str):  # as tables of strings keep what has no one shape
                parameters = _json("parameters", parameters)
            tools.append(ToolSchema(f["name"], f.get("description", ""), parameters))
    return tools


def _messages(record: Json) -> list[Json]:
    for key in ("messages", "conversations"):
        if key not in record:
            continue
        entries = _listed(record, key)
        if any("from" in entry for entry in entries) and not any("role" in entry for entry in entries):
            return openai_messages(record | {"conversations": entries})
        if key == "conversations" and not any("role" in entry for entry in entries):
            return openai_messages(record | {"conversations": entries})
        return _with_system(record, entries)
    if "prompt" in record:
        return _of_prompt(record)
    if "instruction" in record and "output" in record:
        asked = "\n".join(_text(record, key) for key in ("instruction", "input") if record.get(key))
        told = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(record, "output")}]
        return _with_system(record, _history(record) + told)
    hint = ""
    if "chosen" in record:
        hint = "; of preference pairs only one side can be imitated: write it as messages"
    elif list(record) == ["text"]:
        hint = "; plain text has no turns to tell apart"
    raise ConversationError(f"{_FORMS}{', '.join(map(str, record)) or 'none'}{hint}")


def _of_prompt(record: Json) -> list[Json]:
    key = next((key for key in _ANSWERS if record.get(key) is not None), None)
    if key is None:
        raise ConversationError('"prompt" without "completion": there is nothing to learn')
    prompt, answer = _said(record, "prompt", "user"), _said(record, key, "assistant")
    # What stands in the prompt was said before: it carries no loss.
    prompt = [{**one, "weight": 0} if one.get("role") == "assistant" else one for one in prompt]
    if not any(message.get("role") == "assistant" for message in answer):
        raise ConversationError(f'"{key}" holds no message of the assistant')
    return _with_system(record, prompt + answer)


def _said(record: Json, key: str, role: str) -> list[Json]:
    """A text as one message of ``role``; messages as they are."""
    value = record[key]
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list):
        return _listed(record, key)
    return [{"role": role, "content": _text(record, key)}]


def _history(record: Json) -> list[Json]:
    """Earlier turns of an Alpaca record, as LLaMA-Factory has them: pairs of question and answer."""
    turns: list[Json] = []
    for pair in record.get("history") or []:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ConversationError('"history" must be pairs of texts')
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _with_system(record: Json, messages: list[Json]) -> list[Json]:
    if record.get("system") and messages and messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": _text(record, "system")}, *messages]
    return messages


def _text(record: Json, key: str) -> str:
    if not isinstance(record[key], str):
        raise ConversationError(f'"{key}" must be a text, not {type(record[key]).__name__}')
    return str(record[key])


def _plain(messages: list[Json]) -> list[Json]:
    """Roles and contents as a chat template takes them."""
    for index, message in enumerate(messages):
        role = message.get("role")
        if isinstance(message.get("content"), list):
            message["content"] = _joined(message["content"], index)
        if role == "developer":
            message["role"] = "system"
        elif role == "function":
            message["role"] = "tool"
        if role == "assistant" and message.get("function_call") and not message.get("tool_calls"):
            message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    while len(messages) > 1 and messages[0].get("role") == messages[1].get("role") == "system":
        texts = [str(message.get("content") or "") for message in messages[:2]]
        messages[:2] = [{"role": "system", "content": "\n\n".join(filter(None, texts))}]
    return messages


def _joined(parts: list[Any], index: int) -> str:
    """The texts of OpenAI's content parts, one after the other."""
    texts = []
    for place, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise ConversationError(
                f"messages[{index}].content[{place}] is a part of type {kind!r}; only text is trained: leave out such "
                "parts, or the record"
            )
        texts.append(text)
    return "".join(texts)


def _listed(record: Json, key: str) -> list[Json]:
    """An array of objects; tables of strings (Parquet, CSV) keep it as JSON text."""
    value = record.get(key) or []
    if isinstance(value, str):
        value = _json(key, value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConversationError(f'"{key}" must be an array of objects')
    return value


def _json(key: str, text: str) -> Any:
    try:
        return read_json(text)
    except JsonError as error:
        raise ConversationError(f'"{key}" is text that is not valid JSON ({error})') from None
