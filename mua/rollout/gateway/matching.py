"""Whether a message that a client sends is one that its session holds.

Agent libraries write the assistant's messages again before they send them back (measured with four of them in
docs/benchmarks/gateway.md). What they change is only form, and is looked through: ids, reasoning, white space around
the text, the spelling of the arguments' JSON, ``null`` for empty. A library that has calls as text (smolagents) is
recognised by what the text must hold. Words of its own are another message: they start a new segment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mua.types import Json
from mua.utils.strict_json import JsonError, read_json

_THOUGHTS = re.compile(r"\A\s*(?:<think>)?(?:(?!</think>).)*</think>", re.DOTALL)


def common(held: Sequence[Json], sent: Sequence[Json]) -> int:
    """How many messages at the beginning of ``sent`` are those at the beginning of ``held``."""
    for index, (mine, theirs) in enumerate(zip(held, sent, strict=False)):
        if not same_message(mine, theirs):
            return index
    return min(len(held), len(sent))


def same_message(held: Json, sent: Json) -> bool:
    """Whether ``sent`` is the client's copy of ``held``: what it sent before, or what it was answered."""
    if held["role"] != sent["role"]:
        return False
    if held["role"] != "assistant":
        return bool(held["content"].strip() == sent["content"].strip())
    mine, theirs = _spoken(held), _spoken(sent)
    if mine == theirs and _calls(held) == _calls(sent):
        return True
    return not sent.get("tool_calls") and bool(held.get("tool_calls")) and _told(held, sent["content"])


def canonical(arguments: str) -> str:
    """Arguments in one spelling; what is no JSON stays as it is."""
    try:
        return json.dumps(read_json(arguments or "{}"), sort_keys=True, ensure_ascii=False)
    except JsonError:
        return arguments.strip()


def _spoken(message: Json) -> str:
    text = message["content"]
    return str(_THOUGHTS.sub("", text, count=1) if "</think>" in text else text).strip()


def _calls(message: Json) -> list[tuple[str, str]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], canonical(function["arguments"])) for function in functions]


def _told(held: Json, text: str) -> bool:
    """Whether ``text`` tells all that the turn ``held`` says: its words, its calls' names and all their arguments."""
    if _spoken(held) not in text:
        return False
    for name, arguments in _calls(held):
        try:
            values = list(_leaves(json.loads(arguments)))
        except ValueError:
            values = [arguments]
        if name not in text or not all(any(form in text for form in _forms(value)) for value in values):
            return False
    return True


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _forms(value: Any) -> tuple[str, ...]:
    """How Python and JSON write a plain value."""
    if isinstance(value, str):
        return value, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    return repr(value), json.dumps(value)
