"""A domain's words and the general English, compiled: what of them a sentence holds, and the sentence without them.

A sentence is *masked* before anything is learnt from it or judged by it: what the wish is about becomes ``DEED``, what
other wishes are about ``OTHER``, a fact ``FACT`` (the one in question ``THIS``), something on the phone ``TOPIC``,
numbers, ids, money, dates and names ``VALUE``. So "which order should I cancel" and "which trip should I call off" are
the same sentence, and what is learnt in one domain holds in all::

    "could you give me the order number"  →  could you give me FACT
    "i have cancelled order k7"           →  i have DEEDED order VALUE
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from environments.kit.language.patterns import expression, load
from mua.types import Json

_GENERAL = Path(__file__).with_name("general.yaml")
_VALUE = re.compile(
    r"(?<![\w$])(?:[$€£]? ?\d[\d.,]*\d|[$€£] ?\d|[\w.]+@[\w.]+\w|#?(?=[a-z_]*\d)\w+(?:[-:/.]\w+)*|#\w+)(?!\w)"
    r"|\b(?:january|february|march|april|june|july|august|september|october|november|december)(?: \d{1,2})?\b"
)
_MONEY = re.compile(r"[$€£] ?\d|\d ?(?:dollars|usd|euros?|bucks)\b|\d+\.\d\d\b")
_DIGITS = re.compile(r"\d")


@dataclass(frozen=True, slots=True)
class Named:
    """How a fact, or a thing on the phone, is named."""

    named: re.Pattern[str]
    kind: re.Pattern[str]
    """What follows "which" or "what" when it is asked for."""
    idioms: re.Pattern[str]
    """Wordings that ask for it as a whole."""


@dataclass(frozen=True, slots=True)
class Mention:
    """A place in a sentence that names a fact or a thing on the phone."""

    start: int
    end: int
    name: str

    def inside(self, other: Mention) -> bool:
        """Whether it is a proper part of another's name."""
        longer = other.end - other.start > self.end - self.start
        return longer and other.name != self.name and other.start <= self.start and self.end <= other.end


class Lexicon:
    """One domain's words, compiled."""

    def __init__(self, words: Json) -> None:
        general = _general()
        lists = {**general["lists"], **words.get("lists", {})}

        def compiled(phrases: Sequence[str]) -> re.Pattern[str]:
            return expression(phrases, lists)

        parts = ("named", "kind", "idioms")
        deeds: Mapping[str, Sequence[str]] = words["deeds"]
        self.moods = {key: compiled(phrases) for key, phrases in general.items() if key != "lists"}
        self.facts = {n: Named(*(compiled(f.get(part, ())) for part in parts)) for n, f in words["facts"].items()}
        never = compiled(())
        self.tools = {n: Named(compiled(phrases), never, never) for n, phrases in words.get("instructions", {}).items()}
        self.deeds = {wish: compiled(phrases) for wish, phrases in deeds.items()}
        self.done = {wish: compiled(_participles(phrases)) for wish, phrases in deeds.items()}
        every = [phrase for phrases in deeds.values() for phrase in phrases]
        self.any_deed, self.any_done = compiled(every), compiled(_participles(every))
        self.answers = {wish: compiled(phrases) for wish, phrases in words.get("answers", {}).items()}
        self.against = {wish: compiled(phrases) for wish, phrases in words.get("against", {}).items()}
        self.value = compiled(words.get("values", ()))

    def mentions(self, text: str) -> list[Mention]:
        """Where the text names facts and things on the phone; a longer name hides those inside it."""
        found = [
            Mention(hit.start(), hit.end(), name)
            for table in (self.facts, self.tools)
            for name, words in table.items()
            for pattern in (words.idioms, words.named)
            for hit in pattern.finditer(text)
        ]
        return [one for one in found if not any(one.inside(other) for other in found)]

    def masked(self, text: str, wish: str, mentions: Sequence[Mention], this: str = "") -> str:
        """``text`` with facts, deeds and values replaced; ``this`` is the fact in question."""
        for start, end, mark in reversed(self._marks(mentions, this)):
            text = f"{text[:start]}{mark}{text[end:]}"
        for pattern, mark in ((self.done.get(wish), "DEEDED"), (self.deeds.get(wish), "DEED")):
            text = pattern.sub(mark, text) if pattern else text
        return valueless(self.any_deed.sub("OTHER", self.any_done.sub("OTHERED", text)))

    def _marks(self, mentions: Sequence[Mention], this: str) -> list[tuple[int, int, str]]:
        """Spans that do not overlap, in order; the fact in question comes before others."""
        free: list[tuple[int, int, str]] = []
        for one in sorted(mentions, key=lambda one: (one.name != this, one.start - one.end)):
            if all(one.end <= start or end <= one.start for start, end, _ in free):
                mark = "THIS" if one.name == this else "TOPIC" if one.name in self.tools else "FACT"
                free.append((one.start, one.end, mark))
        return sorted(free)

    def of_wish(self, table: Mapping[str, re.Pattern[str]], text: str, wish: str) -> bool:
        """Whether the wish has a pattern in ``table`` that the text holds."""
        return wish in table and table[wish].search(text) is not None

    def which(self, fact: Named, text: str) -> bool:
        """Whether "which" or "what" is followed by the kind of thing that the fact is."""
        hits = self.moods["which"].finditer(text)
        return any(fact.kind.search(" ".join(text[hit.end() :].split()[:5])) for hit in hits)

    def moods_of(self, text: str) -> Iterator[str]:
        """The general moods whose wordings the text holds."""
        return (key for key, pattern in self.moods.items() if pattern.search(text))


def valueless(text: str) -> str:
    """``text`` with numbers, ids, dates and addresses as ``VALUE``, money as ``MONEY``."""
    if not _DIGITS.search(text) and "@" not in text and "#" not in text:
        return text
    return _VALUE.sub(lambda found: "MONEY" if _MONEY.search(found[0]) else "VALUE", text)


@cache
def _general() -> Json:
    return load(_GENERAL)


def _participles(phrases: Sequence[str]) -> list[str]:
    return [re.sub(r"<([a-z]+)>", r"<\1:done>", phrase) for phrase in phrases if "<" in phrase]
