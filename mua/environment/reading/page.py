"""A page as text, and its parts."""

from __future__ import annotations

from dataclasses import dataclass

from mua.environment.reading.page_text import MAIN, PDF, PLAIN

CUT = "only the first {} characters of the page were kept"
_NEAR = 0.1
"""How much shorter a part may be for it to end at the end of a line or word."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page as text."""

    url: str
    """Of the last redirect."""
    title: str
    text: str
    how: str = PLAIN
    """How the text was found; see :mod:`mua.environment.reading.page_text`."""
    cut: str = ""
    """What of the page is not in ``text``, as words; empty: nothing."""

    def heading(self) -> str:
        """Title, address and what a reader has to know of the text, a line each."""
        lines = [f"Title: {self.title}"] if self.title else []
        lines.append(f"URL: {self.url}")
        if self.how not in (MAIN, PLAIN, PDF):
            lines.append("Text: everything on the page, since no main text was found")
        return "\n".join([*lines, f"Cut: {self.cut}"] if self.cut else lines)


def parts_of(text: str, longest: int) -> list[str]:
    """``text`` in parts of at most ``longest`` characters, each to the end of a line or word where one is near.

    Parts follow on one another: joined they are the text.
    """
    parts, at = [], 0
    while at < len(text):
        end = at + longest
        if end < len(text):
            near = end - max(1, int(longest * _NEAR))
            for mark in ("\n", " "):
                if (found := text.rfind(mark, near, end)) >= 0:
                    end = found + 1
                    break
        parts.append(text[at:end])
        at = end
    return parts or [""]
