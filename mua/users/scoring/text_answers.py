"""Answers that are words: equal after normalization, nearly equal, sharing words (SQuAD's F1), one of several choices
(``B``, ``(b)``, ``Option B``, ``B) Paris``), a day (by python-dateutil), or whatever the judge finds right.

dateutil fills in what a text leaves out from a given day; a text is a day here only where two such days give the same.
A text with a time of day is none. Whether ``03/04/2021`` is in March or in April, ``order`` says, or nobody knows.

A judge that gives no verdict raises :class:`JudgeFault`, so that the episode is tried again and never scored.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field
from rapidfuzz import fuzz
from rapidfuzz.distance import Levenshtein

from mua.config.section import Fraction, Section
from mua.environment.endpoint.services import Services
from mua.users.judge import Judge, VerdictForm
from mua.users.scoring.scorer import AnswerScore, Question, ReadScorer, Scorer, accepted_texts, options_of
from mua.users.scoring.written_numbers import tidy
from mua.utils.errors import ConfigError

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
_LABEL = re.compile(
    r"(?:(?:option|choice|answer)\s?:?\s?)?(?P<open>[(\[])?(?P<label>[A-Za-z]|\d{1,2})(?P<close>[)\]])?(?P<mark>\s?[.):-])?"
    r"(?:\s(?P<text>.+))?",
    re.IGNORECASE | re.DOTALL,
)
LONGEST_DAY = 60
"""Characters of a day."""
_FILLED = (datetime(2004, 1, 2, 1, 1, 1), datetime(2008, 10, 11, 2, 2, 2))
_YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)|(?<!\d)\d{8}(?!\d)")
_YEAR_FIRST = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_FILLING = re.compile(r"(?<=\d)(?:st|nd|rd|th)\b|\bof\b|\bthe\b", re.I)
_QUESTION = (
    "Is the given answer right? It is right if it says the same as a reference answer in other words or another form. "
    "It is wrong if it says something else, is missing, leaves a choice between several answers, or contradicts itself."
)


def check_words(question: Question) -> None:
    """Raises :class:`ConfigError` for a reference that has no words."""
    if not all(map(normal, accepted_texts(question))):
        raise question.wrong("nothing is left of the right answer without punctuation and articles")


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

    normalize: bool = True
    """Compare as SQuAD does, without case, punctuation and articles; off: white space alone does not count."""


class ExactScorer(Scorer):
    """The same text, or one of several."""

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self._options = options_of(ExactOptions, options, "exact")

    def check(self, question: Question) -> None:
        accepted_texts(question)

    async def score(self, answer: str, question: Question) -> AnswerScore:
        said = self._form(answer)
        return AnswerScore.of(bool(said) and said in map(self._form, accepted_texts(question)))

    def _form(self, text: str) -> str:
        # An answer that is nothing but an article or a sign is compared with those.
        whole = " ".join(unicodedata.normalize("NFKC", text).split())
        return (normal(text) or normal(text, articles=False) or whole) if self._options.normalize else whole


class FuzzyOptions(Section):
    """Options of scorer ``fuzzy``."""

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.9
    """From which likeness on an answer is right."""
    compare: Literal["ratio", "token_sort", "levenshtein"] = "ratio"
    """``ratio``: rapidfuzz's normalized Indel similarity; ``token_sort``: of the words in alphabetical order;
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


class FuzzyScorer(Scorer):
    """Nearly the same text.

    Whole texts are compared: no measure is offered that takes a part for the whole, because a text with every answer in
    it would then be right.
    """

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self._options = options_of(FuzzyOptions, options, "fuzzy")

    def check(self, question: Question) -> None:
        check_words(question)
        if max(map(len, accepted_texts(question))) > FUZZY_LONGEST:
            raise question.wrong(f"scorer 'fuzzy' compares at most {FUZZY_LONGEST} characters")

    async def score(self, answer: str, question: Question) -> AnswerScore:
        options, said = self._options, normal(answer[: FUZZY_LONGEST + 1])
        if not said or len(answer) > FUZZY_LONGEST:
            return AnswerScore.of(False, why="nothing to compare")
        compare, best = _LIKENESS[options.compare], 0.0
        for right_text in map(normal, accepted_texts(question)):
            if not options.numbers or _numbers(said) == _numbers(right_text):
                best = max(best, compare(said, right_text))
        right = best >= options.threshold
        return AnswerScore(best if right and options.graded else float(right), right, {"likeness": round(best, 4)})


def _numbers(text: str) -> list[str]:
    return sorted(re.findall(r"-?\d+(?:\.\d+)?", text))


class F1Options(Section):
    """Options of scorer ``f1``."""

    threshold: Fraction = 1.0
    """From which F1 on an answer is right."""
    graded: bool = True
    """Pay F1 itself; off: 1 from ``threshold`` on, else 0."""


class F1Scorer(Scorer):
    """Words that answer and reference share (SQuAD's F1)."""

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self._options = options_of(F1Options, options, "f1")

    def check(self, question: Question) -> None:
        check_words(question)

    async def score(self, answer: str, question: Question) -> AnswerScore:
        best = max(shared_words(answer, text) for text in accepted_texts(question))
        right = best >= self._options.threshold and best > 0
        return AnswerScore(best if self._options.graded else float(right), right, {"f1": round(best, 4)})


def shared_words(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the words of both, each word as often as it stands there."""
    ours, theirs = Counter(normal(answer).split()), Counter(normal(reference).split())
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


# ---- multiple choice


class ChoiceOptions(Section):
    """Options of scorer ``choice``."""

    labels: Literal["letters", "numbers"] = "letters"
    """How choices are called: A, B, C or 1, 2, 3."""
    reference: Literal["label", "index", "text"] = "label"
    """What the right answer is given as: a label, the place of the choice from 0, or its text."""
    texts: bool = True
    """Whether the text of a choice is an answer too."""


class ChoiceScorer(Scorer):
    """One of several choices."""

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self._options = options_of(ChoiceOptions, options, "choice")

    def label(self, place: int) -> str:
        """What the choice at ``place`` (from 0) is called."""
        return string.ascii_uppercase[place] if self._options.labels == "letters" else str(place + 1)

    def check(self, question: Question) -> None:
        most = 26 if self._options.labels == "letters" else 99
        if not 2 <= len(question.choices) <= most:
            raise question.wrong(f"scorer 'choice' needs 2 to {most} choices, there are {len(question.choices)}")
        texts = [normal(text, articles=False) or text for text in question.choices]
        if len(set(texts)) < len(texts):
            raise question.wrong("two choices are the same")
        self._right(question)

    def correct(self, question: Question) -> str:
        return self.label(self._right(question))

    async def score(self, answer: str, question: Question) -> AnswerScore:
        chosen = self._chosen(answer, question.choices)
        if chosen is None:
            return AnswerScore.of(False, why="no single choice")
        return AnswerScore.of(chosen == self._right(question), chosen=self.label(chosen))

    def _right(self, question: Question) -> int:
        given, form, choices = question.reference, self._options.reference, question.choices
        if form == "index" and isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(choices):
            return given
        if form == "label" and isinstance(given, str | int):
            labels = [self.label(place) for place in range(len(choices))]
            if (name := str(given).strip().strip("().").upper()) in labels:
                return labels.index(name)
        if form == "text" and given in choices:
            return list(choices).index(given)
        known = {"label": f"a label from {self.label(0)} to {self.label(max(0, len(choices) - 1))}",
                 "index": f"a number from 0 to {len(choices) - 1}", "text": "the text of a choice"}  # fmt: skip
        raise question.wrong(f"the right answer must be {known[form]} (environment.scorer.options.reference: {form})")

    def _chosen(self, answer: str, choices: Sequence[str]) -> int | None:
        """The one choice that all of ``answer`` names; None where it names none, or two."""
        answer = tidy(answer)
        said = normal(answer, articles=False) or answer
        texts = [normal(tidy(text), articles=False) or text for text in choices]
        by_text = texts.index(said) if self._options.texts and said in texts else None
        found = _LABEL.fullmatch(answer)
        labels = [self.label(place) for place in range(len(choices))]
        if found is None or (label := found["label"].upper()) not in labels:
            return by_text
        by_label, beside = labels.index(label), found["text"]
        if beside is None:
            # A choice may read like the label of another: then the text is unambiguous only if both agree.
            return by_label if by_text in (None, by_label) else None
        if not (found["mark"] or found["close"]):
            return by_text  # "A dog" is no label with a text
        named = normal(beside, articles=False) or beside
        return by_label if texts[by_label] == named else None


# ---- days


class DateOptions(Section):
    """Options of scorer ``date``."""

    order: Literal["unknown", "month_first", "day_first"] = "unknown"
    """What ``03/04/2021`` begins with. ``unknown``: such a text is no day, unless both ways of reading it agree."""


class DateScorer(ReadScorer[date]):
    """A day."""

    what = "a day with its year, read in one way only (environment.scorer.options.order)"

    def __init__(self, options: Mapping[str, Any], _services: Services) -> None:
        self._order = options_of(DateOptions, options, "date").order

    def read(self, text: str) -> date | None:
        return read_day(text, self._order)


@lru_cache(maxsize=4096)
def read_day(text: str, order: str = "unknown") -> date | None:
    """The one day that all of ``text`` says; None where it says none, or several."""
    text = " ".join(_FILLING.sub(" ", text.strip().strip("$").removesuffix(".")).split())
    if len(text) > LONGEST_DAY or not text.isprintable() or not _YEAR.search(text):
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


# ---- what a language model judges


class Correctness(VerdictForm):
    """The verdict on an answer."""

    right: bool = Field(description="Whether the given answer is right.")


class JudgedOptions(Section):
    """Options of scorer ``judge``."""

    first: Literal["exact", "nothing"] = "exact"
    """What is compared before the judge is asked: an answer that is the reference (as scorer ``exact`` compares) needs
    no judge."""
    instructions: str = ""
    """What else the judge is told about right answers."""


class JudgedScorer(Scorer):
    """Asks the endpoints of ``judge.llm``."""

    def __init__(self, options: Mapping[str, Any], services: Services) -> None:
        """:class:`ConfigError` without an endpoint."""
        if services.judge is None:
            raise ConfigError("environment.scorer.name: scorer 'judge' needs the section judge.llm; fill it in")
        self._options, self._judge = options_of(JudgedOptions, options, "judge"), Judge(services.judge)

    def check(self, question: Question) -> None:
        accepted_texts(question)

    async def score(self, answer: str, question: Question) -> AnswerScore:
        accepted = accepted_texts(question)
        said = normal(answer)
        if self._options.first == "exact" and said and said in map(normal, accepted):
            return AnswerScore.of(True, by="the same text")
        material = {"question": question.text, "reference answer": " | or | ".join(accepted), "given answer": answer}
        asked = f"{_QUESTION} {self._options.instructions}".strip()
        verdict = await self._judge.verdict(asked, Correctness, seed=question.seed, material=material)
        return AnswerScore.of(verdict.right, by="judge", reason=verdict.reason)
