"""Documents with titles of English domains, and their ranking for a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mua.environment.reading.ranking import Ranking

TITLE = 6
"""How often a title counts: a search for a name finds the document about it, not those that mention it."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a search finds."""

    title: str
    text: str


def ranking(documents: Sequence[Document]) -> Ranking[Document]:
    """By words of two letters and more, without the stop words of English."""
    return Ranking(documents, _words, title=TITLE, repeats=True)


def _words(texts: list[str]) -> list[list[str]]:
    # Imported late: it takes a while, and few domains need it.
    import bm25s  # type: ignore[import-untyped]

    found: list[list[str]] = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    return found
