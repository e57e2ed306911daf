"""Asking LLMs to play the other side or to judge, with replies read strictly.

A reply that cannot be read is asked for again with another seed; after :data:`ATTEMPTS` it is the fault of whoever gave
it (:class:`mua.errors.UserFault` or :class:`mua.errors.JudgeFault`), which ends the episode unscored. No default answer
and no default score exists.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from environments.gyms._shared.settings import Chat
from mua.errors import JudgeFault, MuaError, UserFault

T = TypeVar("T")
ATTEMPTS = 3
YES_NO_MAYBE = ("Yes", "No", "Maybe")
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)


async def asked(chat: Chat | None, system: str, text: str, read: Callable[[str], T], seed: int) -> T:
    """What the LLM that plays the other side says to ``text``; ``read`` raises ValueError for what it cannot use."""
    return await _read(chat, system, text, read, seed, UserFault)


async def judged(chat: Chat | None, system: str, text: str, read: Callable[[str], T], seed: int) -> T:
    """The judge's verdict on ``text``; every fault is a :class:`JudgeFault`."""
    try:
        return await _read(chat, system, text, read, seed, JudgeFault)
    except UserFault as fault:
        # The endpoint does not know which role it plays.
        raise JudgeFault(str(fault)) from None


def one_of(labels: Sequence[str]) -> Callable[[str], str]:
    """Reads exactly one of ``labels``, whatever its case and punctuation."""

    def read(reply: str) -> str:
        said = re.sub(r"[^a-z ]", "", reply.lower()).strip()
        for label in labels:
            if said == label.lower():
                return label
        raise ValueError(f"the reply must be one of {', '.join(labels)}")

    return read


def spoken(reply: str) -> str:
    """Reads any text on one line."""
    text = " ".join(reply.split())
    if not text:
        raise ValueError("the reply is empty")
    return text


def json_object(check: Callable[[Any], T]) -> Callable[[str], T]:
    """Reads one JSON value, fenced or bare, and hands it to ``check``, which raises ValueError for another shape."""

    def read(reply: str) -> T:
        fenced = _FENCE.match(reply.strip())
        return check(json.loads(fenced.group(1) if fenced else reply))

    return read


async def _read(
    chat: Chat | None, system: str, text: str, read: Callable[[str], T], seed: int, fault: type[MuaError]
) -> T:
    assert chat is not None, "configured() has checked the roles"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    reason = ""
    for attempt in range(ATTEMPTS):
        reply = await chat.complete(messages, seed=seed + 7919 * attempt)
        try:
            return read(reply)
        except ValueError as error:
            reason = f"{error}; it said {reply[:200]!r}"
    raise fault(f"{chat!r}: no usable reply in {ATTEMPTS} attempts: {reason}; try another model")
