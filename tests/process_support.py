"""Whether a process runs."""

from __future__ import annotations

import psutil


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which whoever inherits it may leave, does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
