"""A message as the network reads it: words with what the domain's words and the rules say of them.

::

    "I've cancelled order K7. Anything else?"
        →  i have cancelled order [value] [.] anything else [?]
                  DEEDED    FACT  VALUE   "r done" …         "r offer" "g offer?" …

A sentence's last token stands for the whole of it and bears its marks. Names of facts are not masked: the network
knows the words, and which of them name a fact is told for each fact apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from environments.kit.language.features import Read, wish_marks
from environments.kit.language.lexicon import Lexicon, valueless

_WORD = re.compile(r"\S+")
LONGEST = 300
"""Words of a message from which on no further sentence is read; no customer reads more."""
VALUE, MONEY, END, QUESTION = "[value]", "[money]", "[.]", "[?]"


@dataclass(frozen=True, slots=True)
class Tokens:
    """The words of one message, sentence after sentence."""

    words: Sequence[str]
    marks: Sequence[Sequence[str]]
    """Of each word."""
    mentions: Mapping[str, Sequence[int]]
    """For each fact or tool that is named, where: indices of words, and of the ends of sentences that ask for it."""


def tokens(lexicon: Lexicon, found: Sequence[Read], wish: str) -> Tokens:
    """All words of a message that has been read."""
    words: list[str] = []
    marks: list[list[str]] = []
    mentions: dict[str, set[int]] = {}
    for one in found:
        if len(words) > LONGEST:
            break
        spans = [(hit.start(), hit.end(), hit[0]) for hit in _WORD.finditer(one.place.sentence.text)]
        start = len(words)
        words += [_value_in(word) or word for _, _, word in spans] + [QUESTION if one.ask == "?" else END]
        said = {f"r {mark.split(':')[0]}" for mark in one.marks}
        whole = {f"g {mood}{one.ask}" for mood in one.moods} | said | set(wish_marks(lexicon, one, wish))
        marks += [*_marked(lexicon, one, wish, spans), sorted(whole)]
        for mention in one.mentions:
            places = {start + at for at, (a, b, _) in enumerate(spans) if mention.start < b and mention.end > a}
            mentions.setdefault(mention.name, set()).update(places)
        for mark in one.marks:
            if mark.startswith("ask:"):
                mentions.setdefault(mark[4:], set()).add(len(words) - 1)
    return Tokens(words, marks, {name: sorted(places) for name, places in mentions.items()})


def _value_in(word: str) -> str:
    """The token that stands for a word that is a value; empty for another."""
    plain = valueless(word)
    return "" if plain == word else MONEY if "MONEY" in plain else VALUE


def _marked(lexicon: Lexicon, one: Read, wish: str, spans: Sequence[tuple[int, int, str]]) -> Iterator[list[str]]:
    """For each word the marks of what it is part of."""
    text = one.place.sentence.text
    patterns = {
        "DEED": lexicon.deeds.get(wish),
        "DEEDED": lexicon.done.get(wish),
        "OTHER": lexicon.any_deed,
        "OTHERED": lexicon.any_done,
    }
    parts = [
        (m.start(), m.end(), mark) for mark, pattern in patterns.items() if pattern for m in pattern.finditer(text)
    ]
    parts += [(m.start, m.end, "TOPIC" if m.name in lexicon.tools else "FACT") for m in one.mentions]
    for start, end, word in spans:
        own = {_value_in(word).strip("[]").upper()} - {""}
        yield sorted(own | {mark for a, b, mark in parts if a < end and b > start})
