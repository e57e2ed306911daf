"""Multiple choice: a label (``B``, ``(b)``, ``Option B``, ``B) Paris``), or the text of a choice."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from mua.config.environment import AnswerForm
from mua.config.section import Section
from mua.environment.endpoint.services import Services
from mua.users.scoring.scorer import AnswerScore, Question, options_of
from mua.users.scoring.text_answers import normal
from mua.users.scoring.written_numbers import tidy

_LABEL = re.compile(
    r"(?:(?:option|choice|answer)\s?:?\s?)?(?P<open>[(\[])?(?P<label>[A-Za-z]|\d{1,2})(?P<close>[)\]])?(?P<mark>\s?[.):-])?"
    r"(?:\s(?P<text>.+))?",
    re.IGNORECASE | re.DOTALL,
)


class ChoiceOptions(Section):
    """Options of scorer ``choice``."""

    labels: Literal["letters", "numbers"] = "letters"
    """How choices are called: A, B, C or 1, 2, 3."""
    reference: Literal["label", "index", "text"] = "label"
    """What the right answer is given as: a label, the place of the choice from 0, or its text."""
    texts: bool = True
    """Whether the text of a choice is an answer too."""


class ChoiceScorer:
    """One of several choices; implements :class:`mua.users.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: ChoiceOptions) -> None:
        self._options = options

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

    async def close(self) -> None:
        """Holds nothing."""

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


def choice(options: Mapping[str, Any], services: Services) -> ChoiceScorer:
    """Scorer ``choice``."""
    return ChoiceScorer(options_of(ChoiceOptions, options, "choice"))
