"""Seeds that depend on what they are for, and on nothing else."""

from __future__ import annotations

import hashlib
import random


def derived_seed(*parts: int | str) -> int:
    """A seed in ``[0, 2**31)`` that is a pure function of ``parts``, equal on every machine and Python."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def named_random(*parts: int | str) -> random.Random:
    """A generator that is a pure function of ``parts``, likewise; what is recorded of users and canned policies is
    drawn from it."""
    return random.Random("/".join(str(part) for part in parts))
