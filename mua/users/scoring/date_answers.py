"""Answers that are days: ``March 3rd, 2021`` is ``2021-03-03``. python-dateutil reads them.

It fills in what a text leaves out from a given day; a text is a day here only where two such days give the same. A text
with a time of day is none. Whether ``03/04/2021`` is in March or in April, ``order`` says, or nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from typing import Any, ClassVar, Literal

from mua.config.environment import AnswerForm
from mua.config.section import Section
from mua.environment.endpoint.services import Services
from mua.users.scoring.scorer import AnswerScore, Question, accepted_texts, options_of

LONGEST = 60
"""Characters of a day."""
_FILLED = (datetime(2004, 1, 2, 1, 1, 1), datetime(2008, 10, 11, 2, 2, 2))
_YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)|(?<!\d)\d{8}(?!\d)")
_YEAR_FIRST = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_FILLING = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b", re.I)


class DateOptions(Section):
    """Options of scorer ``date``."""

    order: Literal["unknown", "month_first", "day_first"] = "unknown"
    """What ``03/04/2021`` begins with. ``unknown``: such a text is no day, unless both ways of reading it agree."""


class DateScorer:
    """A day; implements :class:`mua.users.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: DateOptions) -> None:
        self._order = options.order

    def check(self, question: Question) -> None:
        for text in accepted_texts(question):
            if read_day(text, self._order) is None:
                raise question.wrong(
                    "the right answer must be a day with its year for scorer 'date', which is read in one way only "
                    "(environment.scorer.options.order)"
                )

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        given = read_day(answer, self._order)
        if given is None:
            return AnswerScore.of(False, why="no day")
        for text in accepted_texts(question):
            if read_day(text, self._order) == given:
                return AnswerScore.of(True, reference=text)
        return AnswerScore.of(False, why="another day")

    async def close(self) -> None:
        """Holds nothing."""


@lru_cache(maxsize=4096)
def read_day(text: str, order: str = "unknown") -> date | None:
    """The one day that all of ``text`` says; None where it says none, or several."""
    text = " ".join(_FILLING.sub(" ", text.strip().strip("$").removesuffix(".")).split())
    if len(text) > LONGEST or not text.isprintable() or not _YEAR.search(text):
        return None
    if (numbers := _YEAR_FIRST.fullmatch(text)) is not None:  # dateutil would take day_first at its word here, too
        try:
            return date(*map(int, numbers.groups()))
        except ValueError:
            return None
    ways = {"month_first": (False,), "day_first": (True,)}.get(order, (False, True))
    found = {_parsed(text, day_first, filled) for day_first in ways for filled in _FILLED}
    return found.pop() if len(found) == 1 else None


def _parsed(text: str, day_first: bool, filled: datetime) -> date | None:
    from dateutil import parser  # type: ignore[import-untyped]

    try:
        found: datetime = parser.parse(text, dayfirst=day_first, default=filled)
    except (ValueError, ArithmeticError, TypeError, AttributeError, LookupError):  # what it raises of odd texts
        return None
    clock = found.hour, found.minute, found.second
    stated = found.tzinfo is not None or clock != (filled.hour, filled.minute, filled.second)
    return None if stated else found.date()


def day(options: Mapping[str, Any], services: Services) -> DateScorer:
    """Scorer ``date``."""
    return DateScorer(options_of(DateOptions, options, "date"))
