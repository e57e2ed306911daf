"""Answers that are words: equal after normalisation, nearly equal, or sharing words (SQuAD's F1)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from rapidfuzz import fuzz
from rapidfuzz.distance import Levenshtein

from mua.config.environment import AnswerForm
from mua.config.section import Fraction, Section
from mua.environment.endpoint.services import Services
from mua.users.scoring.scorer import AnswerScore, Question, accepted_texts, options_of

FUZZY_LONGEST = 4_000
"""Characters that are compared letter by letter, which takes time by the product of both lengths."""
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|emph|mathbf|operatorname)\s{0,4}\{([^{}]{0,2000})\}")
_MINUS, _DOT = "\ue000", "\ue001"
"""Private characters that stand for what is kept while punctuation goes."""
_NOT_WORDS = re.compile(rf"[^\w\s%$€£¥°+{_MINUS}{_DOT}]")
_BETWEEN_WORDS = re.compile(r"[-\u2010-\u2015_/]")
_SIGN = re.compile(r"(?<![\w.])[-\u2212](?=[.\d])")
_POINT = re.compile(r"(?<=\d)\.(?=\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def normal(text: str, *, articles: bool = True) -> str:
    """``text`` as SQuAD's exact match compares it: lower case, no punctuation, no articles, single spaces.

    Besides, one form of each character (NFKC), and what makes another number of a number stays: the sign, the decimal
    point, signs of percent and currency; separators of thousands go.
    """
    text = _COMMAND.sub(r"\1", unicodedata.normalize("NFKC", text)).casefold()
    text = _SIGN.sub(_MINUS, _POINT.sub(_DOT, _THOUSANDS.sub("", text)))
    # A hyphen joins words that others write apart; other punctuation stands in place of nothing (U.S.), as in SQuAD.
    text = _NOT_WORDS.sub("", _BETWEEN_WORDS.sub(" ", text)).replace(_MINUS, "-").replace(_DOT, ".")
    return " ".join((_ARTICLES.sub(" ", text) if articles else text).split())


class ExactOptions(Section):
    """Options of scorer ``exact``."""

    normalise: bool = True
    """Compare as SQuAD does, without case, punctuation and articles; off: white space alone does not count."""


class ExactScorer:
    """The same text, or one of several; implements :class:`mua.users.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: ExactOptions) -> None:
        self._options = options

    def check(self, question: Question) -> None:
        if not all(self._form(text) for text in accepted_texts(question)):
            raise question.wrong("nothing is left of the right answer without punctuation and articles")

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        said = self._form(answer)
        return AnswerScore.of(bool(said) and said in map(self._form, accepted_texts(question)))

    async def close(self) -> None:
        """Holds nothing."""

    def _form(self, text: str) -> str:
        # An answer that is nothing but an article or a sign is compared with those.
        whole = " ".join(unicodedata.normalize("NFKC", text).split())
        return (normal(text) or normal(text, articles=False) or whole) if self._options.normalise else whole


class FuzzyOptions(Section):
    """Options of scorer ``fuzzy``."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9
    """From which likeness on an answer is right."""
    compare: Literal["ratio", "token_sort", "levenshtein"] = "ratio"
    """``ratio``: rapidfuzz's normalised Indel similarity; ``token_sort``: of the words in alphabetical order;
    ``levenshtein``: one minus the edits per character."""
    graded: bool = False
    """Pay the likeness itself from ``threshold`` on, in place of 1."""
    numbers: bool = True
    """The numbers in both texts must be the same: 1984 is not nearly 1985."""


_LIKENESS: Mapping[str, Callable[[str, str], float]] = {
    "ratio": lambda a, b: fuzz.ratio(a, b) / 100,
    "token_sort": lambda a, b: fuzz.token_sort_ratio(a, b) / 100,
    "levenshtein": Levenshtein.normalized_similarity,
}


class FuzzyScorer:
    """Nearly the same text; implements :class:`mua.users.scoring.scorer.Scorer`.

    Whole texts are compared: no measure is offered that takes a part for the whole, because a text with every answer in
    it would then be right.
    """

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: FuzzyOptions) -> None:
        self._options = options

    def check(self, question: Question) -> None:
        for text in accepted_texts(question):
            if not normal(text):
                raise question.wrong("nothing is left of the right answer without punctuation and articles")
            if len(text) > FUZZY_LONGEST:
                raise question.wrong(f"scorer 'fuzzy' compares at most {FUZZY_LONGEST} characters")

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        options, said = self._options, normal(answer[: FUZZY_LONGEST + 1])
        if not said or len(answer) > FUZZY_LONGEST:
            return AnswerScore.of(False, why="nothing to compare")
        best = max(self._likeness(said, normal(text)) for text in accepted_texts(question))
        right = best >= options.threshold
        return AnswerScore(best if right and options.graded else float(right), right, {"likeness": round(best, 4)})

    async def close(self) -> None:
        """Holds nothing."""

    def _likeness(self, said: str, right: str) -> float:
        if self._options.numbers and _numbers(said) != _numbers(right):
            return 0.0
        return _LIKENESS[self._options.compare](said, right)


def _numbers(text: str) -> list[str]:
    return sorted(re.findall(r"-?\d+(?:\.\d+)?", text))


class F1Options(Section):
    """Options of scorer ``f1``."""

    threshold: Fraction = 1.0
    """From which F1 on an answer is right."""
    graded: bool = True
    """Pay F1 itself; off: 1 from ``threshold`` on, else 0."""


class F1Scorer:
    """Words that answer and reference share (SQuAD's F1); implements :class:`mua.users.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: F1Options) -> None:
        self._options = options

    def check(self, question: Question) -> None:
        if not all(normal(text) for text in accepted_texts(question)):
            raise question.wrong("nothing is left of the right answer without punctuation and articles")

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        best = max(shared_words(answer, text) for text in accepted_texts(question))
        right = best >= self._options.threshold and best > 0
        return AnswerScore(best if self._options.graded else float(right), right, {"f1": round(best, 4)})

    async def close(self) -> None:
        """Holds nothing."""


def shared_words(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words of both, each word as often as it stands there."""
    ours, theirs = Counter(normal(answer).split()), Counter(normal(reference).split())
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def exact(options: Mapping[str, Any], services: Services) -> ExactScorer:
    """Scorer ``exact``."""
    return ExactScorer(options_of(ExactOptions, options, "exact"))


def fuzzy(options: Mapping[str, Any], services: Services) -> FuzzyScorer:
    """Scorer ``fuzzy``."""
    return FuzzyScorer(options_of(FuzzyOptions, options, "fuzzy"))


def f1(options: Mapping[str, Any], services: Services) -> F1Scorer:
    """Scorer ``f1``."""
    return F1Scorer(options_of(F1Options, options, "f1"))
