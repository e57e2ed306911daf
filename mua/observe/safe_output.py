"""The way to a terminal: what others wrote reaches it without control characters, whoever prints it.

The command line puts :class:`SafeStream` in the place of standard output and error (:func:`safe_output`); tables and
bars are drawn by a :class:`SafeConsole`, whose own colors pass. Log files go through the same function,
:func:`mua.utils.strict_json.pictured`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from mua.utils.strict_json import pictured


class SafeStream:
    """``stream`` without control characters, but for the return with which a library's progress bar begins."""

    def __init__(self, stream: TextIO) -> None:
        self.unsafe: TextIO = getattr(stream, "unsafe", stream)

    def write(self, text: str) -> int:
        lead = text[: len(text) - len(text.lstrip("\r"))]
        return self.unsafe.write(lead + pictured(text[len(lead) :]))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unsafe, name)


@contextmanager
def safe_output() -> Iterator[None]:
    """A block whose standard output and error are safe streams."""
    out: Any = SafeStream(sys.stdout)
    errors: Any = SafeStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(errors):
        yield


class SafeConsole(Console):
    """A console on ``stream`` (standard output by default) whose texts are neither markup nor terminal codes."""

    def __init__(self, stream: TextIO | None = None, width: int | None = None) -> None:
        stream = stream or sys.stdout
        super().__init__(
            file=getattr(stream, "unsafe", stream), width=width, markup=False, emoji=False, highlight=False
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else pictured(text), style, control)
