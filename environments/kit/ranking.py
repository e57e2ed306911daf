"""Pages with titles, and their ranking for a query by BM25."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TITLE = 6
"""How often a title counts: a search for a name finds the document about it, not those that mention it."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a search finds."""

    title: str
    text: str


class Index:
    """Ranks documents for a query by BM25 (Lucene's variant, k1 1.5, b 0.75)."""

    def __init__(self, documents: Sequence[Document]) -> None:
        # Imported late: it takes a while, and few domains need it.
        import bm25s  # type: ignore[import-untyped]

        self._documents = documents
        self._tokenize = bm25s.tokenize
        self._ranks: Any = bm25s.BM25()
        self._ranks.index(self._tokens([f"{one.title}. " * TITLE + one.text for one in documents]), show_progress=False)

    def search(self, query: str, count: int) -> list[Document]:
        """The ``count`` best documents that share a word with ``query``, best first; equals by their order."""
        words = self._tokens([query])
        if not words[0]:
            return []
        scores = self._ranks.get_scores(words[0])
        best = np.argsort(-scores, kind="stable")[:count]
        return [self._documents[place] for place in best if scores[place] > 0]

    def _tokens(self, texts: list[str]) -> list[list[str]]:
        return self._tokenize(texts, return_ids=False, show_progress=False)
