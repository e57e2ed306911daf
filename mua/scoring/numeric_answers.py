"""Answers that are numbers, compared by value (:mod:`mua.scoring.written_numbers` reads them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar, Literal

from mua.config.scorer_section import AnswerForm
from mua.config.section import NonNegativeFloat, Section
from mua.endpoint.services import Services
from mua.scoring.scorer import AnswerScore, Question, accepted_texts, options_of
from mua.scoring.written_numbers import EXACT, WrittenNumber, near, read_number


class NumericOptions(Section):
    """Options of scorer ``numeric``."""

    relative: NonNegativeFloat = 1e-6
    """Largest difference as a share of the reference."""
    absolute: NonNegativeFloat = 0.0
    """Largest difference that is right in any case."""
    exact_integers: bool = True
    """Two whole numbers must be equal, whatever ``relative`` says; ``absolute`` still holds."""
    percent: Literal["fraction", "ignore", "either"] = "fraction"
    """``fraction``: 50% is 0.5; ``ignore``: 50% is 50; ``either``: a percent sign on one side only may mean both."""
    decimal: Literal["point", "comma"] = "point"
    """What separates decimals; the other one separates thousands."""
    units: Literal["same", "ignore", "required"] = "same"
    """``same``: two units must agree, and one that is missing is taken for granted; ``required``: it may not be missing
    where the reference has one; ``ignore``: units do not count."""


class NumericScorer:
    """A number, compared by value; implements :class:`mua.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: NumericOptions) -> None:
        self.options = options
        self._point = "," if options.decimal == "comma" else "."

    def check(self, question: Question) -> None:
        for text in accepted_texts(question):
            if read_number(text, self._point) is None:
                raise question.wrong("the right answer must be a number for scorer 'numeric'")

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        given = read_number(answer, self._point)
        if given is None:
            return AnswerScore.of(False, why="no number")
        for text in accepted_texts(question):
            reference = _reference(text, self._point)
            if reference is None:
                raise question.wrong("the right answer must be a number for scorer 'numeric'")
            if self.equal(given, reference):
                return AnswerScore.of(True, reference=text)
        return AnswerScore.of(False, why="another number")

    async def close(self) -> None:
        """Holds nothing."""

    def equal(self, given: WrittenNumber, reference: WrittenNumber) -> bool:
        """Whether both are the same number under the options."""
        options = self.options
        counts = options.units != "ignore" and reference.unit and (given.unit or options.units == "required")
        if counts and given.unit != reference.unit:
            return False
        relative = 0.0 if options.exact_integers and given.whole and reference.whole else options.relative
        pairs = [(a, b) for a in self._readings(given, reference) for b in self._readings(reference, given)]
        return any(near(a, given.bottom, b, reference.bottom, relative, options.absolute) for a, b in pairs)

    def _readings(self, number: WrittenNumber, other: WrittenNumber) -> list[Decimal]:
        if not number.percent or self.options.percent == "ignore":
            return [number.top]
        hundredth = number.top.scaleb(-2, EXACT)
        if self.options.percent == "either" and not other.percent:
            return [number.top, hundredth]
        return [hundredth]


@lru_cache(maxsize=4096)
def _reference(text: str, point: str) -> WrittenNumber | None:
    return read_number(text, point)


def numeric(options: Mapping[str, Any], services: Services) -> NumericScorer:
    """Scorer ``numeric``."""
    return NumericScorer(options_of(NumericOptions, options, "numeric"))
