"""The one reader of what chat endpoints reply: for policies, users and judges.

::

    body ──► why it ended ──► content, as text or in parts ──► reasoning, in a field or in the text ──► calls, as
             (else trouble)                                                                objects or as text

Servers differ in all of it. What a message holds beside that is kept (:attr:`Completion.message`), because it goes
back to the server as it came.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator, Sequence
from typing import Any

from mua.environment.blame import blame, error_codes
from mua.environment.endpoint.chat import (
    MAX_CALLS,
    MAX_REPLY_CHARACTERS,
    ChatRequest,
    Completion,
    FunctionCall,
    RequestError,
    read_refusal,
    too_long,
    unreadable,
)
from mua.types import Json
from mua.utils.errors import UserFaultKind
from mua.utils.strict_json import JsonError, read_json, read_json_at, skip_space, unpaired_surrogate

ENDED = frozenset({"", "none", "stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token", "completed"})
CALLED = frozenset({"tool_calls", "tool_call", "function_call", "tool_use"})
CUT = frozenset(
    {"length", "max_tokens", "max_output_tokens", "model_length", "max_length", "model_context_window_exceeded"}
)
"""Why a reply ended that is a turn. Whatever else a server says there means that nobody finished it."""

THOUGHTS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<reasoning>", "</reasoning>"),
    ("<thought>", "</thought>"), ("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"), ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)  # fmt: skip
"""How families mark reasoning in their text; templates that open it in the prompt leave only its end in the reply."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "reasoning_text", "thoughts")
_REASONING_PARTS = frozenset({"thinking", "reasoning", "reasoning_content", "redacted_thinking", "thought"})
_FINAL = re.compile(r"\A\s*(<\|start\|>assistant)?<\|channel\|>final<\|message\|>")
_CALL_OPEN = re.compile(
    r"<\|?tool_calls?\|?>|<\|tool_calls?_(?:start|begin)\|>|<function_call>|\[TOOL_CALLS\]|<\|python_tag\|>"
    r"|(?=<function=)"
)
_CALL_CLOSE = re.compile(r"\s*(?:</?\|?/?tool_calls?\|?>|<\|tool_calls?_end\|>|</function_call>|\[/TOOL_CALLS\])")
_FUNCTION = re.compile(r"\s*<function=([\w.-]{1,64})>")
_PARAMETER = re.compile(r"\s*<parameter=([\w.-]{1,64})>\n?")
_NAMED = re.compile(r"\s*([\w.-]{1,64})\s*(?:\[ARGS\]|<\|?tool_sep\|?>)?\s*(?=\{)")
_FENCE = re.compile(r"\A\s*```(?:json|tool_code)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)
_ARGUMENTS = ("arguments", "parameters", "args", "input")


def read_completion(body: bytes, request: ChatRequest) -> Completion | RequestError:
    """The reply to ``request`` in a body of status 200."""
    try:
        answer = read_json(body.removeprefix(BOM_UTF8), strict=False)
    except JsonError as error:
        return unreadable(f"no JSON ({error})")
    if not isinstance(answer, dict):
        return unreadable("no choices[0].message.content")
    wrong = answer.get("error") or (answer if answer.get("object") == "error" else None)
    if wrong and isinstance(wrong, dict | str):  # it calls itself a success
        status = next((int(code) for code in error_codes(wrong) if re.fullmatch(r"[45]\d\d", str(code))), 500)
        return read_refusal(status, wrong, json.dumps(wrong))
    if not isinstance(answer.get("choices"), list) or not answer["choices"]:
        return unreadable("no choices[0].message.content")
    choice = answer["choices"][0]
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return unreadable("no choices[0].message.content")
    finish = str(choice.get("finish_reason") or "").lower()
    if finish not in ENDED | CALLED | CUT or choice.get("error"):
        told = [choice.get(key) for key in ("error", "native_finish_reason", "stop_reason")] + [message.get("refusal")]
        why = "; ".join(json.dumps(one, ensure_ascii=False)[:200] for one in told if one)
        reason = f"unusable reply: it ended by finish_reason {finish[:60]!r}{f' ({why})' if why else ''}"
        whose = blame("endpoint", [finish, *error_codes(choice.get("error"))], reason)
        return RequestError("ended", reason, "look at the server's log", UserFaultKind.BROKEN_TEXT, blame=whose)
    try:
        text, inside, parts_calls = _content(message.get("content"))
        calls = [*parts_calls, *_calls(message)]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return unreadable(str(error) if isinstance(error, ValueError) else "no choices[0].message.content")
    thoughts = [inside] if inside else []
    thoughts += [found for key in _REASONING_KEYS if (found := _text_of(message.get(key)))][:1]
    if not thoughts and message.get("reasoning_details"):
        thoughts = [_text_of(message["reasoning_details"])]
    as_text = []
    if request.tools or not request.schema:
        text, marked = split_thoughts(text)
        if marked:
            thoughts += marked
            as_text += ["reasoning"]
    if request.tools and not calls:
        text, calls = read_text_calls(text, {tool.get("function", {}).get("name", "") for tool in request.tools})
        as_text += ["calls"] if calls else []
    if finish in CALLED and not calls:
        reason = f"unusable reply: it ended by finish_reason {finish!r} and calls nothing"
        return RequestError("ended", reason, "set the server's parser of tool calls", UserFaultKind.BROKEN_TEXT)
    refusal = message.get("refusal")
    if not text and not calls and isinstance(refusal, str):
        text = refusal
    if not request.verbatim and (trouble := _unusable(text := text.strip(), calls, request, refusal)) is not None:
        return trouble
    reasoning = "\n".join(thoughts).strip("\n") if thoughts and request.verbatim else None
    if unpaired_surrogate(json.dumps(message, ensure_ascii=False)) is not None:  # no trace holds it, wherever it stands
        reason = "unusable reply: it holds an unpaired surrogate"
        return RequestError("rejected", reason, "try another {here}.model", UserFaultKind.BROKEN_TEXT)
    return Completion(
        text, tuple(calls), _usage(answer), finish in CUT, reasoning, message=message, as_text=tuple(as_text)
    )


def _unusable(text: str, calls: Sequence[FunctionCall], request: ChatRequest, refusal: Any) -> RequestError | None:
    """Why a user or judge cannot have meant it."""
    if calls and not request.tools:
        reason = "unusable reply: it calls a tool, and none was offered"
        return RequestError("tool_call", reason, "try another {here}.model", UserFaultKind.TOOL_CALL_IN_TEXT)
    if len(text) > MAX_REPLY_CHARACTERS:
        return too_long(f"{len(text)} characters")
    if len(calls) > MAX_CALLS or any(len(call.arguments) > MAX_REPLY_CHARACTERS for call in calls):
        return too_long(f"{len(calls)} calls with {sum(len(call.arguments) for call in calls)} characters")
    if text and text == str(refusal).strip():
        reason = f"unusable reply: the model refuses: {text[:200]!r}"
        return RequestError("rejected", reason, "try another {here}.model", UserFaultKind.SPEAKS_AS_AGENT)
    if not text and not calls and not request.may_be_empty:
        fix = "try another {here}.model or more max_tokens"
        return RequestError("empty", "unusable reply: the reply is empty", fix, UserFaultKind.NO_TEXT)
    return None


def _content(content: Any) -> tuple[str, str, list[FunctionCall]]:
    """Text, reasoning and calls of a message's content. Raises ValueError for what is no text."""
    if content is None or isinstance(content, str):
        return content or "", "", []
    if not isinstance(content, list):
        raise ValueError(f"message content is {type(content).__name__}, not text")
    texts, thoughts, calls = list[str](), list[str](), list[FunctionCall]()
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        if kind in _REASONING_PARTS:
            thoughts.append(_text_of(part))
        elif kind == "tool_use":
            calls.append(_call(part, {"name": part["name"], "arguments": part.get("input")}, len(calls)))
        elif isinstance(part, str) or _text_of(part) or kind in ("text", "output_text", "refusal"):
            texts.append(_text_of(part))
        else:
            raise ValueError(f"message content has a part of type {str(kind)[:40]!r}, which is no text")
    return "".join(texts), "".join(thoughts), calls


def _text_of(value: Any) -> str:
    """The text of a part, whatever its key is."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_text_of, value))
    if isinstance(value, dict):
        for key in ("text", "thinking", "reasoning", "summary", "content", "refusal", "value"):
            if found := _text_of(value.get(key)):
                return found
    return ""


def _calls(message: Json) -> Iterator[FunctionCall]:
    listed = message.get("tool_calls") or ()
    if not isinstance(listed, list | tuple):
        raise TypeError
    for place, one in enumerate(listed):
        yield _call(one, one["function"], place)
    if not listed and message.get("function_call"):  # as it was before tools
        yield _call({}, message["function_call"], 0)


def _call(one: Json, function: Json, place: int) -> FunctionCall:
    arguments = function.get("arguments")
    arguments = arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)
    came = one if function is one.get("function") else {}
    return FunctionCall(str(one.get("id") or f"call_{place}"), str(function.get("name") or ""), arguments or "{}", came)


def split_thoughts(text: str) -> tuple[str, list[str]]:
    """``text`` without its reasoning, and the reasoning; one that is not closed reaches to the end."""
    found: list[str] = []
    for opening, closing in THOUGHTS:
        kept, at = list[str](), 0
        begun, ended = text.find(opening), text.find(closing)
        if ended >= 0 and not 0 <= begun < ended and opening != THOUGHTS[-1][0]:
            found.append(text[:ended])
            at = ended + len(closing)
        while (start := text.find(opening, at)) >= 0:
            kept.append(text[at:start])
            end = text.find(closing, start)
            found.append(text[start + len(opening) : end if end >= 0 else len(text)])
            at = end + len(closing) if end >= 0 else len(text)
        text = "".join([*kept, text[at:]])
    if found:
        text = _FINAL.sub("", text)
        return text.lstrip(), [thought.strip("\n") for thought in found]
    return text, []


def read_text_calls(text: str, names: set[str]) -> tuple[str, list[FunctionCall]]:
    """``text`` without the calls that it holds, and these: as Hermes, Qwen3-Coder, Mistral, Llama write them, or as
    bare JSON that names one of ``names``. What begins as a call and cannot be read is a call without a name."""
    fenced = _FENCE.match(text)
    whole = (fenced[1] if fenced else text).strip()
    if whole[:1] in ("{", "[") and (calls := _of_json(whole, 0, 0)[0]) and all(call.name in names for call in calls):
        return "", calls
    calls, kept, at = list[FunctionCall](), list[str](), 0
    while opened := _CALL_OPEN.search(text, at):
        kept.append(text[at : opened.start()])
        found, end = _of_tags(text, opened.end(), len(calls))
        if not found:
            closing = _CALL_CLOSE.search(text, opened.end())
            # A fault's place costs a look at all before it: a text of nothing but faults would take forever.
            end = closing.end() if closing and len(calls) < MAX_CALLS else len(text)
            found = [FunctionCall(f"call_{len(calls)}", "", text[opened.end() : end])]
        calls += found
        closed = _CALL_CLOSE.match(text, end)
        at = closed.end() if closed else max(end, opened.end())
    return "".join([*kept, text[at:]]).strip() if calls else text, calls


def _of_tags(text: str, at: int, number: int) -> tuple[list[FunctionCall], int]:
    """Calls behind an opening tag, and where they end."""
    if function := _FUNCTION.match(text, at):
        arguments, end = dict[str, Any](), function.end()
        while parameter := _PARAMETER.match(text, end):
            close = text.find("</parameter>", parameter.end())
            value = text[parameter.end() : close if close >= 0 else len(text)].removesuffix("\n")
            try:
                arguments[parameter[1]] = read_json(value)
            except JsonError:
                arguments[parameter[1]] = value
            end = close + len("</parameter>") if close >= 0 else len(text)
        close = text.find("</function>", end)
        written = json.dumps(arguments) if arguments else text[end : close if close >= 0 else len(text)].strip()
        end = close + len("</function>") if close >= 0 else len(text)
        return [FunctionCall(f"call_{number}", function[1], written or "{}")], end
    if named := _NAMED.match(text, at):
        try:
            value, end = read_json_at(text, named.end())
        except JsonError:
            return [], at
        return [FunctionCall(f"call_{number}", named[1], json.dumps(value))], end
    return _of_json(text, at, number)


def _of_json(text: str, at: int, number: int) -> tuple[list[FunctionCall], int]:
    """Calls in the JSON value at ``at``, an object or a list of them; none where it is something else."""
    try:
        value, end = read_json_at(text, skip_space(text, at))
    except JsonError:
        return [], at
    calls = list[FunctionCall]()
    for one in value if isinstance(value, list) else [value]:
        inner = one.get("function") if isinstance(one, dict) else None
        function = inner if isinstance(inner, dict) else one
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return [], at
        given = next((function[key] for key in _ARGUMENTS if key in function), None)
        calls.append(_call(one, {"name": function["name"], "arguments": given}, number + len(calls)))
    return calls, end


def _usage(answer: Json) -> dict[str, int]:
    found = answer.get("usage")
    usage: Json = found if isinstance(found, dict) else {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
    for side, name in (("prompt", "cached_tokens"), ("completion", "reasoning_tokens")):
        details = usage.get(f"{side}_tokens_details")
        counts[name] = details.get(name) if isinstance(details, dict) else None
    return {name: count for name, count in counts.items() if isinstance(count, int) and count >= 0}
