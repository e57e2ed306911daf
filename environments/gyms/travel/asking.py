"""The rules that understand the agent: what a query covers, and what a question is about."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from environments.gyms._shared.questions import is_list
from environments.gyms.travel.catalog import Aspect, catalog

Span: TypeAlias = tuple[int, int]
Kind = Literal["chat", "hit", "miss", "vague"]
"""Small talk; a concrete question about something that matters; about something that does not; no concrete question."""
MOST_TOPICS = 2
"""A question about more attributes than this is vague: else one text could ask for everything."""

_QUESTION = re.compile(
    r"\?|^\s*(what|which|where|when|how|do|does|would|will|should|is|are|any|may|can|could)\b"
    r"|\b(tell me|let me know|please (say|describe|specify)|i (would like|want|need) to know)\b",
    re.IGNORECASE,
)
_SMALL_TALK = re.compile(r"\b(how are you|how do you do|nice to meet|looking forward to it|isn't it)\b", re.IGNORECASE)
_SHORT_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTHS = {name: number for number, name in enumerate(_SHORT_MONTHS, 1)}
_MONTH = rf"({'|'.join(_SHORT_MONTHS)})[a-z]*\.?"
_DATES = (
    re.compile(rf"\b(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?: of)? (?P<month>{_MONTH})", re.IGNORECASE),
    re.compile(rf"\b(?P<month>{_MONTH}) (?:the )?(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\b", re.IGNORECASE),
    re.compile(r"\b\d{4}-(?P<month>\d{1,2})-(?P<day>\d{1,2})\b"),
)
_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a text asks for."""

    kind: Kind
    aspect: str = ""
    attribute: str = ""
    """The first attribute that is asked for and has not been told; of a miss, the first that does not matter."""


def classify(text: str, pending: Mapping[str, Sequence[str]], told: Mapping[str, Sequence[str]] | None = None) -> Asked:
    """What ``text`` asks for, given the attributes that still matter for each aspect of the trip.

    A question that is also about something that does not matter misses, so that nobody finds out by asking for two
    things at once; what was ``told`` before may be mentioned.
    """
    if not _QUESTION.search(text) or _SMALL_TALK.search(text):
        return Asked("chat")
    if is_list(text):
        return Asked("vague")
    topics = list(_topics(text, [catalog()[name] for name in pending]))
    if not topics or len(topics) > MOST_TOPICS:
        return Asked("vague")
    known = {(aspect, attribute) for aspect, those in (told or {}).items() for attribute in those}
    new = [topic for topic in topics if topic not in known]
    beside = [(aspect, attribute) for aspect, attribute in new if attribute not in pending[aspect]]
    if new and not beside:
        return Asked("hit", *new[0])
    return Asked("miss", *(beside or topics)[0])


def named(text: str, aspects: Sequence[Aspect]) -> list[Aspect]:
    """The aspects that ``text`` names."""
    return [aspect for aspect in aspects if aspect.named.search(text)]


def missing(text: str, arguments: Mapping[str, str]) -> list[str]:
    """The search arguments that ``text`` does not state: cities by name, dates in any usual form, numbers or words."""
    dates, rest = _dates(text)
    return [name for name, value in arguments.items() if not _states(value, dates, rest)]


def _topics(text: str, aspects: Sequence[Aspect]) -> list[tuple[str, str]]:
    """(aspect, attribute) that the text is about; of the aspects it names, or of all where it names none.

    Words inside a longer match count for that one alone: a "child seat" is no seat, a "dinner table" no table.
    """
    spans = {
        (aspect.name, attribute.name): [match.span() for match in attribute.asked.finditer(text)]
        for aspect in named(text, aspects) or aspects
        for attribute in aspect.attributes.values()
    }
    names = [match.span() for aspect in aspects for match in aspect.named.finditer(text)]
    longest = [*names, *(span for found in spans.values() for span in found)]
    return [topic for topic, found in spans.items() if any(not _inside(span, names, longest) for span in found)]


def _inside(span: Span, names: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether ``span`` is a name, or lies within a longer one."""
    first, last = span
    return span in names or any(a <= first and last <= b and (a, b) != span for a, b in others)


def _dates(text: str) -> tuple[set[tuple[int, int]], str]:
    """Every (month, day) in ``text``, and the text without them."""
    found = set()
    for pattern in _DATES:
        for match in pattern.finditer(text):
            month = match["month"].lower()
            found.add((int(month) if month.isdigit() else _MONTHS[month[:3]], int(match["day"])))
        text = pattern.sub(" ", text)
    return found, text


def _states(value: str, dates: set[tuple[int, int]], rest: str) -> bool:
    if value.isdigit():
        return re.search(rf"\b({value}|{_NUMBERS[int(value) - 1]})\b", rest, re.IGNORECASE) is not None
    if value[0].isdigit():
        return _dates(value)[0] <= dates
    return re.search(rf"\b{re.escape(value)}\b", rest, re.IGNORECASE) is not None
