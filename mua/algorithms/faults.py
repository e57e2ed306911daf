"""Which turns of a conversation were malformed, and which repeat what was done or said before.

A turn is an assistant message. Messages are those of :class:`mua.types.Trajectory`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from mua.types import Json


def malformed_turns(messages: Sequence[Json]) -> list[bool]:
    """For every turn: it holds something that is no acceptable tool call, or nothing at all.

    Not acceptable is what cannot be read, names no tool or breaks its schema (``tool_call_errors``). A turn that was
    cut by a budget is not malformed.
    """
    return [_malformed(turn) for turn in _turns(messages)]


def repeated_turns(messages: Sequence[Json]) -> list[bool]:
    """For every turn: one of its tool calls was made before, with the same arguments; or, without a call, its text was.

    Arguments are compared as JSON values, texts without regard to white space. That the world changed in between does
    not excuse a call: whether to look again is for the policy to find out.
    """
    seen: set[str] = set()
    repeated = []
    for turn in _turns(messages):
        actions = list(_actions(turn))
        repeated.append(any(action in seen for action in actions) or len(set(actions)) < len(actions))
        seen.update(actions)
    return repeated


def _turns(messages: Sequence[Json]) -> Iterator[Json]:
    return (message for message in messages if message["role"] == "assistant")


def _malformed(turn: Json) -> bool:
    empty = not (turn.get("content") or "").strip() and not turn.get("tool_calls") and not turn.get("truncated")
    return empty or bool(turn.get("tool_call_errors"))


def _actions(turn: Json) -> Iterator[str]:
    """What a turn did, in a form that is equal where the deed is."""
    for call in turn.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        yield json.dumps(["call", call["function"]["name"], arguments], sort_keys=True)
    if not turn.get("tool_calls") and (words := (turn.get("content") or "").split()):
        yield json.dumps(["text", *words])
