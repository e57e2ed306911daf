"""When an episode's context is rewritten, and what stays of it.

::

    before a turn ── due? ──► discard_tool_results: old results become a mark ──┐
                       │                                                        ├──► a new segment that the template
                       └────► summarize, digest: the policy writes notes ───────┘    writes from what stays
                              (sampled, trained with the turn that follows)

The functions work on messages as :class:`mua.tokens.conversation.Conversation` keeps them and change none of them.
What an episode's evaluation, its traces and its judge see is everything that happened, not what was left of it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rapidfuzz import fuzz

from mua.config.rollout import ContextConfig
from mua.tokens.codec import Codec, content
from mua.types import Json, Provenance

Reason = Literal["tokens", "turns", "repetition"]

REMOVED = "[this result was removed to make room]"
NOTES = "Your notes on what has happened so far:\n{notes}\n\nGo on from there."
NO_NOTES = "(none)"
_LEFT_OUT = "\n[{count} tokens left out]\n"
_CHARACTERS_PER_TOKEN = 4
NOTES_KEY = "notes"
"""Of a message that holds notes, which later ones replace; no template reads it, no endpoint gets it."""


@dataclass(slots=True)
class ContextKeeper:
    """Watches one episode's context."""

    config: ContextConfig
    max_tokens: int
    """``rollout.max_tokens``."""
    counts: Counter[str] = field(default_factory=Counter)
    """Metrics ``context/...`` of the episode."""
    _since: int = 0
    """Assistant turns before the last rewrite."""

    def due(self, tokens: int, turns: int, messages: Sequence[Json]) -> Reason | None:
        """Why the context of so many ``tokens`` is to be rewritten before the next turn, if it is.

        ``turns`` and ``messages`` are those of the episode so far. Between two rewrites there is a turn at least.
        """
        config, done = self.config, turns - self._since
        if config.strategy == "off" or done < 1 or self.counts["context/rewrites"] >= config.max_rewrites:
            return None
        if tokens >= math.ceil(config.share * self.max_tokens):
            return "tokens"
        if config.every_turns is not None and done >= config.every_turns:
            return "turns"
        often = config.on_repetition
        if often is not None and repetitions(messages, done, similarity=config.similarity) >= often:
            return "repetition"
        return None

    def rewritten(self, reason: Reason, turns: int, before: int, after: int) -> None:
        """Note a rewrite from ``before`` tokens to ``after``."""
        self._since = turns
        self.counts.update(
            {
                "context/rewrites": 1, f"context/rewrites_by_{reason}": 1, "context/tokens_before": before,
                "context/tokens_after": after,
            }
        )  # fmt: skip

    def shorten(self, results: Sequence[str], codec: Codec | None) -> list[str]:
        """``results`` of tool calls within ``max_result_tokens``."""
        limit = self.config.max_result_tokens
        if limit is None:
            return list(results)
        cut = [shorten_result(result, limit, codec) for result in results]
        self.counts["context/results_cut"] += sum(a != b for a, b in zip(results, cut, strict=True))
        return cut


def shorten_result(text: str, limit: int, codec: Codec | None) -> str:
    """``text`` with at most ``limit`` of its tokens, half from its beginning and half from its end.

    What is left out is said in between. Without a ``codec`` four characters count as a token.
    """
    if codec is None:
        count, head, tail = len(text), limit * _CHARACTERS_PER_TOKEN // 2, -(-limit * _CHARACTERS_PER_TOKEN // 2)
        if count <= head + tail:
            return text
        left = (count - head - tail) // _CHARACTERS_PER_TOKEN or 1
        return text[:head] + _LEFT_OUT.format(count=left) + text[count - tail :]
    ids = codec.encode([content(text, Provenance.TOOL)])[0]
    if len(ids) <= limit:
        return text
    head, tail = limit // 2, limit - limit // 2
    first, last = (codec.decode(part).strip("\ufffd") for part in (ids[:head], ids[len(ids) - tail :]))
    return first + _LEFT_OUT.format(count=len(ids) - limit) + last


def repetitions(messages: Sequence[Json], last: int | None = None, *, similarity: float = 1.0) -> int:
    """How many of the ``last`` assistant messages (all, if None) say what the newest says, itself included.

    The same are text and calls, but for white space, ids and the order of arguments; below 1, ``similarity`` is the
    least normalized Indel similarity (of insertions and deletions) of what counts as the same.
    """
    said = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            text = " ".join((message.get("content") or "").split())
            said.append((text, *((call["name"], call["arguments"]) for call in calls)))
    said = said if last is None else said[max(0, len(said) - last) :]
    if not said or similarity == 1:
        return said.count(said[-1]) if said else 0
    written = [json.dumps(one) for one in said]
    return sum(fuzz.ratio(one, written[-1]) >= 100 * similarity for one in written)


def without_results(messages: Sequence[Json], keep: int) -> list[Json]:
    """``messages`` in which only the last ``keep`` turns' results are whole, the others a mark.

    Results that no turn has followed yet stay in any case: the policy has not read them.
    """
    kept, last_of_turn, out, read = 0, False, list[Json](), False
    for message in reversed(messages):
        read = read or message["role"] == "assistant"
        if message["role"] == "tool":
            kept += not last_of_turn
            removed = read and kept > keep and len(message["content"]) > len(REMOVED)
            out.append({**message, "content": REMOVED} if removed else message)
        else:
            out.append(message)
        last_of_turn = message["role"] == "tool"
    return out[::-1]


def with_notes(messages: Sequence[Json], notes: str, *, users: bool) -> list[Json]:
    """The instructions, what the user said, and the policy's ``notes`` on the rest; earlier notes go.

    With ``users`` all of the user's messages stay; else the first, and the last if it was not answered.
    """
    head = [message for message in messages[:1] if message["role"] == "system"]
    said = [message for message in messages if message["role"] == "user" and not message.get(NOTES_KEY)]
    if not users:
        unanswered = said[1:] and said[-1] is messages[-1]
        said = [said[0], said[-1]] if unanswered else said[:1]
    note: Json = {"role": "user", "content": NOTES.format(notes=notes.strip() or NO_NOTES), NOTES_KEY: True}
    if len(said) > 1 and said[-1] is messages[-1]:  # what the user waits for an answer to comes last
        return [*head, *said[:-1], note, said[-1]]
    return [*head, *said, note]
