"""The names by which SGLang calls torch_memory_saver, for engines on a CPU, where there is no memory to unmap.

Pausing and resuming an unknown or an already paused region is refused, as it would be an error of the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NoMemorySaver:
    """Allocations stay where they are; only the order of calls is kept."""

    enabled = True
    hook_mode = "preload"

    def __init__(self) -> None:
        self._tags: set[str] = set()
        self._paused: set[str] = set()

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        self._tags.add(tag)
        yield

    @contextmanager
    def cuda_graph(self, **_: Any) -> Iterator[None]:
        yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        yield

    def pause(self, tag: str) -> None:
        if tag not in self._tags or tag in self._paused:
            raise RuntimeError(f"cannot pause {tag!r}: it is {'paused' if tag in self._paused else 'not allocated'}")
        self._paused.add(tag)

    def resume(self, tag: str) -> None:
        if tag not in self._paused:
            raise RuntimeError(f"cannot resume {tag!r}: it is not paused")
        self._paused.remove(tag)


torch_memory_saver = NoMemorySaver()


@contextmanager
def configure_subprocess() -> Iterator[None]:
    yield
