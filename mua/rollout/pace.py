"""Whose doing it is that a turn's time ran out: the policy's, which wrote on and on, or the engine's, which was slow.

A turn that is still being written at ``rollout.generate_seconds`` is aborted, and the engine says what it had written.
The policy answers for it (outcome ``length``, scored and trained on what it wrote) where that is

- at least :data:`NEAR` of the tokens it was allowed (``rollout.max_turn_tokens``, or what is left of
  ``rollout.max_tokens``): the budget would have ended it a moment later; or
- more than any of the last :data:`REMEMBERED` turns that ended by themselves, of which there must be :data:`ENOUGH`.

An engine that is slow, stopped, paused or overloaded, for one request or for all, writes *less* by the deadline than
what turns need that end; one that is dead or has the request in its queue says nothing. Both leave the turn unscored
(``timeout``), and it is tried again. So a slow engine never makes a failure of the policy's, and a policy that runs on
is told as soon as others of its turns end, or its budget is nearly used up.
"""

from __future__ import annotations

import logging
from collections import deque

log = logging.getLogger(__name__)

NEAR = 0.9
REMEMBERED = 256
ENOUGH = 32


class Pace:
    """The turns that ended lately, over all episodes of a run. Of one event loop."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._warned = False

    def ended(self, tokens: int, seconds: float) -> None:
        """A turn of so many ``tokens`` ended by itself after ``seconds``."""
        self._lengths.append(tokens)
        self._seconds.append(seconds)

    def ran_on(self, tokens: int, allowed: int) -> bool:
        """Whether the policy answers for a turn that was cut after ``tokens`` of those it was ``allowed``."""
        return tokens >= NEAR * allowed or (len(self._lengths) >= ENOUGH and tokens > max(self._lengths))

    def warn_if_too_slow(self, max_turn_tokens: int, generate_seconds: float) -> None:
        """Say once that the longest allowed turn cannot be written before its deadline, if that is so."""
        if self._warned or len(self._lengths) < ENOUGH or not (seconds := sum(self._seconds)):
            return
        speed = sum(self._lengths) / seconds
        if max_turn_tokens > speed * generate_seconds:
            self._warned = True
            log.warning(
                "at the present %.3g tokens a second of a turn, one of rollout.max_turn_tokens %d takes %.0f s, more "
                "than rollout.generate_seconds %g: long turns end by time and not by length; raise the deadline, lower "
                "the tokens, or have fewer episodes at once (rollout.concurrency)",
                speed, max_turn_tokens, max_turn_tokens / speed, generate_seconds,
            )  # fmt: skip
