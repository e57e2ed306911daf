"""Reading what the policy wrote: reasoning, text for the user, tool calls of the Hermes/Qwen form.

    <think>
    reasoning
    </think>

    text
    <tool_call>
    {"name": "find_order", "arguments": {"order": "W1"}}
    </tool_call>

Reading is strict. Whatever is not a well-formed call is a :class:`ToolCallError`, which the episode turns into an
observation, and its text stays in ``content``: nothing is dropped and nothing is guessed. Tags inside JSON strings
are text, because the JSON is read first and the closing tag is looked for behind it. The time it takes is linear in
the length of the turn, whatever the turn holds: it is spent on the event loop of all episodes.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mua.types import Json
from mua.utils.strict_json import JsonError, read_json_at, skip_space

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# What a JSON value may reach over: whole strings, and nothing that cannot stand outside of one. An error then costs
# this stretch at most, and no two calls can both reach over a third: what is a string to the one is none to the other.
_REACH = re.compile(r'(?:[^"<\\]++|"(?:[^"\\]++|\\.)*+"?+)*+', re.DOTALL)


class ErrorKind(StrEnum):
    """What is wrong with a turn."""

    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    MISSING_NAME = "missing_name"
    BAD_ARGUMENTS = "bad_arguments"
    UNEXPECTED_KEY = "unexpected_key"
    UNCLOSED_CALL = "unclosed_call"
    UNOPENED_CALL = "unopened_call"
    STRAY_TEXT = "stray_text"
    UNCLOSED_REASONING = "unclosed_reasoning"
    STRAY_REASONING_TAG = "stray_reasoning_tag"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One well-formed call. ``id`` is unique in the conversation."""

    id: str
    name: str
    arguments: Json

    def openai(self) -> Json:
        """The OpenAI form, arguments as a JSON string."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": dump_json(self.arguments)},
        }


@dataclass(frozen=True, slots=True)
class ToolCallError:
    """Something in a turn that is neither text nor a well-formed call. ``message`` is fit to show the policy."""

    kind: ErrorKind
    message: str
    raw: str
    """The offending text as it was written."""


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """What one assistant turn says."""

    content: str
    """Everything outside reasoning and well-formed calls."""
    reasoning: str | None = None
    """None where there is no think block, empty where the block is."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[ToolCallError] = field(default_factory=list)
    truncated: bool = False
    """The turn was cut before the policy ended it."""

    @property
    def empty(self) -> bool:
        """Whether it says nothing to anybody."""
        return not (self.tool_calls or self.errors or self.content.strip())

    def message(self) -> Json:
        """The OpenAI-style message. Errors are under ``tool_call_errors``; a cut turn has ``truncated``."""
        message: Json = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.openai() for call in self.tool_calls]
        if self.errors:
            message["tool_call_errors"] = [{"kind": str(e.kind), "message": e.message} for e in self.errors]
        if self.truncated:
            message["truncated"] = True
        return message


def dump_json(value: Any) -> str:
    """JSON as chat templates write it: one line, ``", "`` and ``": "``, no ASCII escapes."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parse_turn(
    text: str, *, turn: int = 0, truncated: bool = False, reasoning: bool = False, opened: bool = False
) -> AssistantTurn:
    """Read one assistant turn.

    Args:
        text: what was sampled, without the end-of-turn token.
        turn: index of the assistant turn; part of the call ids.
        truncated: whether the turn was cut by length.
        reasoning: whether the family writes think blocks.
        opened: whether the generation prompt already opened the think block.
    """
    thoughts, rest, errors = _split_reasoning(text, opened) if reasoning else (None, text, [])
    content, calls, call_errors = _split_calls(rest, turn)
    return AssistantTurn(content, thoughts, calls, errors + call_errors, truncated)


def _split_reasoning(text: str, opened: bool) -> tuple[str | None, str, list[ToolCallError]]:
    thoughts, rest = None, text
    if opened or text.lstrip().startswith(THINK_OPEN):
        start = 0 if opened else text.index(THINK_OPEN) + len(THINK_OPEN)
        end = text.find(THINK_CLOSE, start)
        if end < 0:
            message = f"the reasoning was not closed with {THINK_CLOSE}; close it, then answer or call a tool"
            return text[start:].strip("\n"), "", [ToolCallError(ErrorKind.UNCLOSED_REASONING, message, text)]
        thoughts, rest = text[start:end].strip("\n"), text[end + len(THINK_CLOSE) :].lstrip("\n")
    stray = [tag for tag in (THINK_OPEN, THINK_CLOSE) if tag in rest]
    outside = _split_calls(rest, 0)[0] if stray else ""
    message = "{} may stand only in one block, at the beginning of the turn"
    kind = ErrorKind.STRAY_REASONING_TAG
    return thoughts, rest, [ToolCallError(kind, message.format(tag), rest) for tag in stray if tag in outside]


def _split_calls(text: str, turn: int) -> tuple[str, list[ToolCall], list[ToolCallError]]:
    """Text outside calls, the calls, and what is wrong."""
    opens, closes = (
        [*(found.start() for found in re.finditer(tag, text)), len(text)] for tag in (CALL_OPEN, CALL_CLOSE)
    )
    calls: list[ToolCall] = []
    leftovers: list[str] = []
    start = opens[0]
    lead = text[:start]
    errors = _unopened(lead)
    while start < len(text):
        following = _first(opens, start + 1)
        found, end = _read_call(text, start, _first(closes, start), following, f"call_{turn}_{len(calls)}")
        if isinstance(found, ToolCall):
            calls.append(found)
        else:
            errors.append(found)
            leftovers.append(text[start:end])
        start = _first(opens, end)
        if gap := text[end:start].strip():
            leftovers.append(gap)
            message = "text after a tool call; write text before the first call, and only calls after it"
            errors += _unopened(text[end:start]) or [ToolCallError(ErrorKind.STRAY_TEXT, message, gap)]
    if calls or leftovers:
        lead = lead.removesuffix("\n")
    return "\n".join([lead, *leftovers] if lead else leftovers), calls, errors


def _first(places: list[int], at: int) -> int:
    """The first of ascending ``places`` from ``at`` on; the last of them is the text's end."""
    return places[bisect_left(places, at)]


def _unopened(text: str) -> list[ToolCallError]:
    message = f"{CALL_CLOSE} without {CALL_OPEN} before it; write the call between the two tags"
    return [ToolCallError(ErrorKind.UNOPENED_CALL, message, text)] if CALL_CLOSE in text else []


def _read_call(text: str, start: int, close: int, following: int, call_id: str) -> tuple[ToolCall | ToolCallError, int]:
    """The call whose opening tag is at ``start``, and the index just behind it.

    A broken one reaches to the next closing tag, at ``close``, or to the next opening tag or the end, at ``following``.
    """
    at = skip_space(text, start + len(CALL_OPEN))
    reach = _REACH.match(text, at)
    assert reach is not None, "the pattern matches nothing too"
    try:
        value, length = read_json_at(reach.group(), 0)
    except JsonError as error:
        message = f"the tool call is not valid JSON: {error.reason}"
    else:
        end = skip_space(text, at + length)
        if text.startswith(CALL_CLOSE, end):
            end += len(CALL_CLOSE)
            return _check_call(value, call_id, text[start:end]), end
        message = f"other text stands between the JSON object and {CALL_CLOSE}"
    if close < following:
        end = close + len(CALL_CLOSE)
        return ToolCallError(ErrorKind.BAD_JSON, message, text[start:end]), end
    message = f"the tool call was not closed with {CALL_CLOSE}"
    return ToolCallError(ErrorKind.UNCLOSED_CALL, message, text[start:following]), following


def _check_call(value: Any, call_id: str, raw: str) -> ToolCall | ToolCallError:
    if not isinstance(value, dict):
        message = f'a tool call is an object {{"name": ..., "arguments": {{...}}}}, not {_kind(value)}'
        return ToolCallError(ErrorKind.NOT_AN_OBJECT, message, raw)
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not name:
        return ToolCallError(ErrorKind.MISSING_NAME, 'the tool call has no "name" (a string)', raw)
    if not isinstance(arguments, dict):
        got = _kind(arguments) if "arguments" in value else "nothing"
        return ToolCallError(ErrorKind.BAD_ARGUMENTS, f'"arguments" of {name} must be an object, not {got}', raw)
    if extra := sorted(value.keys() - {"name", "arguments"}):
        message = f'the tool call has keys besides "name" and "arguments": {", ".join(extra)}'
        return ToolCallError(ErrorKind.UNEXPECTED_KEY, message, raw)
    return ToolCall(call_id, name, arguments)


def _kind(value: Any) -> str:
    names = {str: "a string", list: "an array", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
