"""How much work something is, counted instead of timed: the same on every machine and under any load."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def operations(work: Callable[[], Any]) -> int:
    """Functions that ``work`` calls in this thread, those of C included."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    collected = gc.isenabled()
    gc.disable()  # a finalizer is nobody's work
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        if collected:
            gc.enable()
    return count
