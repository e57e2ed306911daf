"""Conversations of the scripted agent with the scripted customer, as data for supervised training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

from environments.help_desk.expert import Expert
from environments.help_desk.tasks import FIRST_SEED, KINDS, generate
from environments.help_desk.tools import HelpDesk
from environments.help_desk.user import ScriptedCustomer
from mua.environment.protocol import Evaluation, Task, Transcript
from mua.types import Json

GRANTED = ("track", "cancel", "redirect", "return")
_FIRST_SEED = FIRST_SEED["train"] + 100_000
"""Demonstrations use shops of their own, which no split contains."""


def demonstrations(count: int, loose: float, seed: int, system: str) -> Iterator[list[Json]]:
    """``count`` conversations in OpenAI form, all kinds of tasks in turn; the same for the same arguments.

    Wishes that are granted come twice as often as refused ones: they are longer, and fewer kinds.
    ``loose`` is how often the agent tells a fact in words of its own.
    """
    kinds = [*KINDS, *GRANTED]
    for index in range(count):
        task = generate("train", _FIRST_SEED + seed * 1_000_000 + index, kinds[index % len(kinds)])
        messages, _ = asyncio.run(demonstrate(task, index, system, loose))
        yield messages


async def demonstrate(task: Task, seed: int, system: str, loose: float = 0.0) -> tuple[list[Json], Evaluation]:
    """One conversation about ``task`` and its verdict. With ``loose`` 0 the agent solves every task."""
    desk, customer = HelpDesk(), ScriptedCustomer(task, seed)
    desk.reset(task, seed)
    messages: list[Json] = [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": (await customer.open()).text})
    moves = Expert(task, seed, loose).moves()
    move = next(moves)
    while True:
        if isinstance(move, tuple):
            answer = desk.call(*move).text
            messages += [_call(*move), {"role": "tool", "content": answer}]
        else:
            messages.append({"role": "assistant", "content": move})
            answer = (await customer.reply(move)).text
            messages.append({"role": "user", "content": answer})
        try:
            move = moves.send(answer)
        except StopIteration:
            break
    verdict = desk.evaluate(Transcript(messages))
    desk.close()
    return messages, verdict


def spoken_text(conversations: Sequence[Sequence[Json]]) -> Iterator[str]:
    """Every text in the conversations, tool calls as they are written: the corpus of a tokenizer."""
    for messages in conversations:
        for message in messages:
            for call in message.get("tool_calls", []):
                function = call["function"]
                yield json.dumps({"name": function["name"], "arguments": json.loads(function["arguments"])})
            yield message["content"]


def _call(name: str, arguments: Json) -> Json:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
