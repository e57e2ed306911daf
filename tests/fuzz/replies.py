"""What endpoints answer: each body is a completion that can be told to a policy and kept, or trouble with a reason.

Not covered: connections and their limits; refusals, whose bodies the library reads.
"""

from __future__ import annotations

import json
import random
from functools import partial
from typing import Any

from mua.environment.endpoint.chat import ChatRequest, Completion
from mua.environment.endpoint.replies import read_completion
from mua.rollout.agent import turn_of
from mua.users.llm import _arguments
from mua.users.utterance_check import unusable, without_label
from tests.fuzz._mutate import NASTY_TEXTS, drawn, mutated_bytes, mutated_json, outcome

CASES = 1000
_CALL = {"id": "c0", "type": "function", "function": {"name": "restart", "arguments": '{"on": true}'}}
_BODY: dict[str, Any] = {
    "choices": [
        {"message": {"role": "assistant", "content": "Hello é", "tool_calls": [_CALL]}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
}
_PARTS = (
    "<think>", "</think>", "User:", "agent :", "\n", "\n\n", " ", "*", "#", ">", "the ", "ai ", "<|im_end|>", "x", "é",
)  # fmt: skip


def run(cases: int, seed: int) -> list[str]:
    """Faults of ``cases`` bodies, one line each."""
    bodies = ((case, _drawn(rng)) for case, rng in drawn("replies", cases, seed))
    return [f"{case}: {fault}: {body[:120]!a}" for case, body in bodies for fault in _read(body)]


def _drawn(rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return mutated_bytes(json.dumps(_BODY).encode(), rng)
    if kind == 1:
        return rng.choice(NASTY_TEXTS).encode("utf-8", "surrogatepass")
    if kind == 2:
        text = "".join(rng.choice(_PARTS) for _ in range(rng.randint(1, 5))) * rng.choice((1, 100, 20_000))
        message = {"role": "assistant", "content": text[:200_000]}
        return json.dumps({"choices": [{"message": message}]}).encode()
    if kind == 3:
        arguments = rng.choice((*NASTY_TEXTS, mutated_json({"on": True, "n": [1]}, rng)))
        call = {"id": "c", "function": {"name": "restart", "arguments": arguments}}
        return json.dumps({"choices": [{"message": {"content": None, "tool_calls": [call]}}]}).encode()
    return mutated_json(_BODY, rng).encode("utf-8", "surrogatepass")


def _read(body: bytes) -> list[str]:
    told = []
    for use, verbatim in ((_used, False), (_played, True)):
        request = ChatRequest([], 0, 1.0, 100, tools=[{"type": "function"}], verbatim=verbatim)
        found, _, faults = outcome(partial(read_completion, body, request), ())
        if not faults and isinstance(found, Completion):
            faults = outcome(partial(use, found), ())[2]
        elif not faults and not found.reason.strip():
            faults = ["trouble without a reason"]
        told += faults
    return told


def _played(reply: Completion) -> None:
    """What an episode does with a policy's reply."""
    turn, calls, broken = turn_of(reply, 0, ())
    assert {*(call.id for call in turn.tool_calls), *broken} == {*calls}
    json.dumps([turn.message(), *calls.values()], ensure_ascii=False).encode("utf-8")
    json.dumps(reply.sent_back(list(calls.values())))


def _used(reply: Completion) -> None:
    """What a user does with a reply."""
    unusable(reply.text)
    without_label(reply.text).encode("utf-8")
    for call in reply.calls:
        json.dumps(call.openai(), ensure_ascii=False).encode("utf-8")
        json.dumps(_arguments(call), ensure_ascii=False, allow_nan=False).encode("utf-8")
