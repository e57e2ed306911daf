"""Answers to yes/no questions from the table: an attribute in any of its wordings.

What the table can not tell is Maybe: comparisons, negations, things it does not know. Names are for the choice answer:
whoever may ask "Is it a dog?" or for letters finds everything by going through a list.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from functools import lru_cache

from environments.gyms._shared.questions import plain
from environments.gyms.telepathy.table import Entity, Truth, attributes, by_name, truth

_GUESS = re.compile(
    r"(?:is|was|could|might|are|would)\s+(?:it|this|that|you|he|she)\s+(?:maybe\s+|perhaps\s+)?(?:be\s+|thinking\s+of\s+)?"
    r"(?:an?\s+|the\s+|some\s+)?(?P<name>.+?)"
)
_OF_THE_NAME = re.compile(
    r"\b(letters?|spell\w*|spelt|syllables?|rhymes?|alphabet\w*|vowels?|consonants?|(?:its|the) name)\b"
)
_STARTS = re.compile(r"\b(?:start|begin|end)s?\s+(?:with|in)\s+(?:an?\s+|the\s+)?['\"]?[a-z]['\"]?$")
_UNDECIDED = re.compile(r"\bthan\b|\bnot\b|n't\b|\bnever\b|\bexcept\b")
_ARTICLE = re.compile(r"^(?:it\s+is|it's|is\s+it|i\s+think\s+it\s+is|my\s+answer\s+is)?\s*(?:an?|the|some)?\s+")


def answer(entity: Entity, question: str) -> Truth:
    """Yes, No or Maybe to a yes/no question about what ``entity`` is like."""
    asked, rest = asked_for(plain(question))
    if not asked or _UNDECIDED.search(rest):
        return "Maybe"
    return _joined([truth(entity, name) for name in asked], rest)


def about_name(question: str) -> bool:
    """Whether ``question`` is about a name or its letters."""
    text = plain(question)
    return bool(_OF_THE_NAME.search(text) or _STARTS.search(text))


def names_something(question: str, others: Container[str] = ()) -> bool:
    """Whether ``question`` names an entity of the table, or one of ``others``: a guess, which is no question."""
    text = plain(question)
    guess = _GUESS.fullmatch(text)
    if guess is None or not (guess["name"] in by_name() or guess["name"] in others):
        return False
    return guess["name"] in others or not asked_for(text)[0]


def is_named(entity: Entity, text: str) -> bool:
    """Whether ``text`` is one of the names of ``entity``, with or without an article or a plural's s."""
    said = plain(text).strip("'\"")
    forms = {said, _ARTICLE.sub("", said), _ARTICLE.sub("", f" {said}")}
    return not {name for form in forms for name in (form, form.removesuffix("s"))}.isdisjoint(entity.names())


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
