"""Answers to yes/no questions from the table: an attribute in any of its wordings, the name, its first letter.

What the table can not tell is Maybe: comparisons, negations, things it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from environments.gyms._shared.questions import plain
from environments.gyms.telepathy.table import Entity, Truth, attributes, by_name, truth

_GUESS = re.compile(
    r"(?:is|was|could|might|are|would)\s+(?:it|this|that|you|he|she)\s+(?:maybe\s+|perhaps\s+)?(?:be\s+|thinking\s+of\s+)?"
    r"(?:an?\s+|the\s+|some\s+)?(?P<name>.+?)"
)
_LETTER = r"(?:the\s+)?(?:letter\s+)?['\"]?(?P<letter>[a-z])['\"]?"
_STARTS = re.compile(rf"\b(?:start|begin)s?\s+with\s+{_LETTER}$")
_BEFORE = re.compile(rf"\b(?:start|begin)s?\s+with\s+a\s+letter\s+before\s+{_LETTER}$")
_UNDECIDED = re.compile(r"\bthan\b|\bnot\b|n't\b|\bnever\b|\bexcept\b")
_ARTICLE = re.compile(r"^(?:it\s+is|it's|is\s+it|i\s+think\s+it\s+is|my\s+answer\s+is)?\s*(?:an?|the|some)?\s+")


def answer(entity: Entity, question: str) -> Truth:
    """Yes, No or Maybe to a yes/no question about ``entity``."""
    text = plain(question)
    guess = _GUESS.fullmatch(text)
    known = by_name().get(guess["name"]) if guess else None
    if known is entity:
        return "Yes"
    if (told := _by_letter(entity, text)) is not None:
        return told
    asked, rest = asked_for(text)
    if asked:
        return "Maybe" if _UNDECIDED.search(rest) else _joined([truth(entity, name) for name in asked], rest)
    return "Maybe" if known is None else "No"


def is_named(entity: Entity, text: str) -> bool:
    """Whether ``text`` is one of the names of ``entity``, with or without an article or a plural's s."""
    said = plain(text).strip("'\"")
    forms = {said, _ARTICLE.sub("", said), _ARTICLE.sub("", f" {said}")}
    return not {name for form in forms for name in (form, form.removesuffix("s"))}.isdisjoint(entity.names())


def _by_letter(entity: Entity, text: str) -> Truth | None:
    first = entity.name[0].lower()
    if (found := _BEFORE.search(text)) is not None:
        return "Yes" if first < found["letter"] else "No"
    if (found := _STARTS.search(text)) is not None:
        return "Yes" if first == found["letter"] else "No"
    return None


def _joined(values: Sequence[Truth], rest: str) -> Truth:
    """``or`` between attributes needs one of them, anything else all; in three-valued logic."""
    one, other = ("Yes", "No") if re.search(r"\bor\b", rest) else ("No", "Yes")
    if one in values:
        return one  # type: ignore[return-value]
    return "Maybe" if "Maybe" in values else other  # type: ignore[return-value]


def asked_for(text: str) -> tuple[list[str], str]:
    """The attributes whose phrases stand in ``text``, and the text without these phrases."""
    found: list[str] = []
    rest = plain(text)
    for phrase, name, pattern in _phrases():
        if phrase in rest:
            rest, times = pattern.subn(" # ", rest)
            if times and name not in found:
                found.append(name)
    return found, rest


@lru_cache(maxsize=1)
def _phrases() -> Sequence[tuple[str, str, re.Pattern[str]]]:
    """Phrases, longest first, each with its attribute and pattern."""
    return sorted(_each_phrase(), key=lambda entry: (-len(entry[0]), entry[0]))


def _each_phrase() -> Iterator[tuple[str, str, re.Pattern[str]]]:
    for name, attribute in attributes().items():
        for phrase in attribute.phrases:
            yield phrase, name, re.compile(rf"\b{re.escape(phrase)}\b")
