"""What a policy writes: every text is read as a turn, loses nothing that can be seen, and can be written down again.

Not covered: the way from ids to text, which the tokenizer's own tests cover.
"""

from __future__ import annotations

import json
import random
import re

from mua.environment.endpoint.chat import Completion, FunctionCall
from mua.rollout.agent import turn_of
from mua.tokens.parsing import AssistantTurn, dump_json, parse_turn
from mua.users.judge import single_object
from tests.fuzz._mutate import NASTY_TEXTS, drawn, mutated_bytes, mutated_json, outcome

CASES = 10_000
_CALL = {"name": "find_order", "arguments": {"order": "W1", "lines": [1, 2.5, None], "note": "</tool_call> é"}}
_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "<|im_end|>", "<|im_start|>")
_PARTS = (
    *_TAGS, *_TAGS[:4], "\n", " ", "{", "}", "[", "]", '"', "\\", ":", ",", "é🙂", "x", "\x00", "\ud800", "\u2028",
    json.dumps(_CALL), f"<tool_call>\n{json.dumps(_CALL)}\n</tool_call>", '{"name": "f"', '"arguments": {',
    '["\\"', '["',     '{"a": "x\\', '{"name": "f", "arguments": {"a": "',
)  # fmt: skip
_READERS = ({}, {"reasoning": True}, {"reasoning": True, "opened": True}, {"truncated": True, "turn": 3})


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` texts, one line each."""
    failures = []
    for case, rng in drawn("tool calls", cases, seed):
        text = _drawn(rng)
        for faults in (
            _parser(text, rng.choice(_READERS)),
            _endpoint(text),
            outcome(lambda text=text: single_object(text), (ValueError,))[2],
        ):
            failures += [f"{case}: {fault}: {text[:120]!a}" for fault in faults]
    return failures


def _drawn(rng: random.Random) -> str:
    kind = rng.randrange(7)
    if kind == 0:
        return "".join(rng.choice(_PARTS) for _ in range(rng.randrange(20)))
    if kind == 1:
        return f"Wait.\n<tool_call>\n{mutated_json(_CALL, rng)}\n</tool_call>"
    if kind == 2:
        return f"<tool_call>{rng.choice(NASTY_TEXTS)}</tool_call>" + rng.choice(("", "x", "<tool_call>"))
    if kind == 3:
        whole = f"<think>\nhm\n</think>\n\nYes.\n<tool_call>\n{json.dumps(_CALL)}\n</tool_call>"
        return mutated_bytes(whole.encode(), rng).decode("utf-8", "replace")
    if kind == 4:
        parts = "".join(rng.choice(_PARTS) for _ in range(rng.randint(1, 4)))
        return (parts * rng.choice((10, 1000, 16_384)))[: rng.choice((10_000, 400_000))]
    if kind == 5:
        return f'<tool_call>{{"name": "f", "arguments": {{"a": {rng.choice(NASTY_TEXTS)}}}}}</tool_call>'
    return "".join(chr(rng.choice((rng.randrange(128), rng.randrange(0x110000)))) for _ in range(rng.randrange(60)))


def _parser(text: str, reader: dict) -> list[str]:
    turn, _, faults = outcome(lambda: parse_turn(text, **reader), ())
    if faults:
        return faults
    lost, _, faults = outcome(lambda: _lost(text, turn), ())
    return faults or lost


def _lost(text: str, turn: AssistantTurn) -> list[str]:
    """What of ``text`` is neither content, reasoning nor a call."""
    json.dumps(turn.message())
    for call in turn.tool_calls:
        call.openai()["function"]["arguments"].encode()
    if turn.tool_calls:
        kept = all(json.loads(dump_json(call.arguments)) == call.arguments for call in turn.tool_calls)
        return [] if kept else ["the arguments of a call are written otherwise than read"]
    seen = _visible(turn.content + (turn.reasoning or ""))
    if seen != _visible(text):
        return ["characters of the turn are lost"]
    # Of a block that is not closed all is reasoning, and no call in it counts.
    marked = any(tag in turn.content for tag in _TAGS[:2])
    return ["a malformed call goes unnoticed"] if marked and not turn.errors else []


def _visible(text: str) -> list[str]:
    return sorted("".join(re.sub(r"</?think>", "", text).split()))


def _endpoint(text: str) -> list[str]:
    """The same text as the arguments of a call at an endpoint."""
    found, _, faults = outcome(lambda: turn_of(Completion("", (FunctionCall("1", "f", text),)), 0, ()), ())
    if faults:
        return faults
    turn, calls, _ = found
    return outcome(lambda: json.dumps(calls, ensure_ascii=False).encode(), ())[2] if turn.tool_calls else []
