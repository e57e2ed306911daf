"""BM25 over a corpus (Lucene's variant, k1 1.5, b 0.75, by bm25s), and the extract of a page that shows the words.

Unless a caller has other words, these are runs of letters and digits without regard to case and width; scripts that are
written without spaces (Han, kana, Thai) are taken in pairs of characters. There is no stemming and no list of stop
words: words that are everywhere weigh little by themselves.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

TITLE = 3
"""How often the words of a title count."""
_SPACELESS = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_WORDS = re.compile(f"[{_SPACELESS}]+|[^\\W_{_SPACELESS}]+")
_ONE_SPACELESS = re.compile(f"[{_SPACELESS}]")
_EXTRACT_FROM = 50_000
"""Characters of a page in which an extract is looked for."""


def words_of(text: str) -> list[str]:
    """What a text is found by."""
    found: list[str] = []
    for word in _WORDS.findall(unicodedata.normalize("NFKC", text).casefold()):
        if len(word) > 1 and _ONE_SPACELESS.match(word):
            found += [word[at : at + 2] for at in range(len(word) - 1)]
        else:
            found.append(word)
    return found


class Titled(Protocol):
    """What is ranked."""

    @property
    def title(self) -> str: ...

    @property
    def text(self) -> str: ...


P = TypeVar("P", bound=Titled)
Words: TypeAlias = Callable[[list[str]], list[list[str]]]


class Ranking(Generic[P]):
    """Ranks pages for queries. Read only once it is made, so threads may share it."""

    def __init__(
        self, pages: Sequence[P], words: Words | None = None, *, title: int = TITLE, repeats: bool = False
    ) -> None:
        """``words`` are what each of several texts is found by (None: :func:`words_of`), ``title`` how often those of a
        title count; ``repeats``: a word that a query has twice counts twice."""
        # Imported late: it takes a while, and only a search of a corpus needs it.
        import bm25s  # type: ignore[import-untyped]

        self._pages, self._repeats = pages, repeats
        self._words: Words = words or (lambda texts: [words_of(text) for text in texts])
        titles, texts = self._words([page.title for page in pages]), self._words([page.text for page in pages])
        self._ranks: Any = bm25s.BM25()
        self._ranks.index([a * title + b for a, b in zip(titles, texts, strict=True)], show_progress=False)
        self._vocabulary = self._ranks.vocab_dict

    def best(self, query: str, count: int) -> list[P]:
        """At most ``count`` pages that share a word with ``query``, best first; equals in the order of the corpus."""
        words = [word for word in self._words([query])[0] if word in self._vocabulary]
        if not words:
            return []
        scores = self._ranks.get_scores(words if self._repeats else list(dict.fromkeys(words)))
        places = np.flatnonzero(scores > 0)
        if len(places) > count:
            least = np.partition(scores[places], -count)[-count]
            places = places[scores[places] >= least]
        best = places[np.argsort(-scores[places], kind="stable")][:count]
        return [self._pages[place] for place in best]


def extract(text: str, query: str, longest: int) -> str:
    """A stretch of ``text`` on one line, about ``longest`` characters: the first that has most words of ``query``."""
    text = " ".join(text[:_EXTRACT_FROM].split())
    wanted = set(words_of(query))
    hits = [(m.start(), w) for m in _WORDS.finditer(text) for w in words_of(m[0]) if w in wanted]
    begin, most = 0, 0
    inside: dict[str, int] = {}
    first = 0
    for at, word in hits:
        inside[word] = inside.get(word, 0) + 1
        while at - hits[first][0] > longest * 0.8:
            left = hits[first][1]
            inside[left] -= 1
            if not inside[left]:
                del inside[left]
            first += 1
        if len(inside) > most:
            begin, most = hits[first][0], len(inside)
    begin = max(0, begin - longest // 10) if begin + longest * 0.9 < len(text) else max(0, len(text) - longest)
    if begin:
        begin = text.find(" ", begin, begin + 30) + 1 or begin
    end = begin + longest
    if end < len(text):
        end = max(text.rfind(" ", end - 30, end), end - 30)
    return f"{'... ' if begin else ''}{text[begin:end].strip()}{' ...' if end < len(text) else ''}"


# ---- documents of English domains

ENGLISH_TITLE = 6
"""How often a title counts: a search for a name finds the document about it, not those that mention it."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a search finds."""

    title: str
    text: str


def ranking(documents: Sequence[Document]) -> Ranking[Document]:
    """By words of two letters and more, without the stop words of English."""
    return Ranking(documents, _english_words, title=ENGLISH_TITLE, repeats=True)


def _english_words(texts: list[str]) -> list[list[str]]:
    # Imported late: it takes a while, and few domains need it.
    import bm25s  # type: ignore[import-untyped]

    found: list[list[str]] = bm25s.tokenize(texts, return_ids=False, show_progress=False)
    return found
