"""What a scorer is: it compares one answer with one reference. A grader finds the answer first. Scorers by name, and
those of one's own by ``package.module:function``.

::

    last text ──► extraction ──► none: 0, with the reason
                     │
                     └─► answers that differ ──► scorer, each ──► the worst counts

A scorer that cannot do its work (no sandbox, no endpoint, a reference that nobody can read) raises: what is no fault of
the policy is never scored.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import ValidationError

from mua.config.environment import AnswerForm, ScorerConfig
from mua.config.section import Section
from mua.environment.endpoint.services import Services
from mua.types import Json
from mua.users.scoring.extraction import found_answers
from mua.utils.errors import ConfigError
from mua.utils.hooks import call_hook, check_attributes, is_hook

S = TypeVar("S", bound=Section)
V = TypeVar("V")
SCORERS: Mapping[str, str] = {
    "exact": "mua.users.scoring.text_answers:ExactScorer",
    "numeric": "mua.users.scoring.numeric_answers:NumericScorer",
    "date": "mua.users.scoring.text_answers:DateScorer",
    "symbolic": "mua.users.scoring.symbolic_answers:SymbolicScorer",
    "fuzzy": "mua.users.scoring.text_answers:FuzzyScorer",
    "f1": "mua.users.scoring.text_answers:F1Scorer",
    "list": "mua.users.scoring.list_answers:ListScorer",
    "choice": "mua.users.scoring.text_answers:ChoiceScorer",
    "code": "mua.users.scoring.code_answers:CodeScorer",
    "judge": "mua.users.scoring.text_answers:JudgedScorer",
}
"""Name -> class, whose module is imported when it is asked for."""
_NEEDS = {"symbolic": ("math_verify", "math-verify")}
_KEY = "environment.scorer.name"


@dataclass(frozen=True, slots=True)
class Question:
    """What an answer is compared with, and what a message says of it."""

    text: str
    reference: Any
    """The right answer, as JSON; which forms it may have is the scorer's matter."""
    choices: Sequence[str] = ()
    """What may be chosen from, in order."""
    where: str = "the reference"
    """File and line, for messages."""
    seed: int = 0
    """For scorers that ask a model."""

    def wrong(self, what: str) -> ConfigError:
        """The error for a reference that is no reference."""
        shown = repr(self.reference)
        return ConfigError(f"{self.where}: {what}, got {shown if len(shown) <= 80 else f'{shown[:80]}...'}")


@dataclass(frozen=True, slots=True)
class AnswerScore:
    """What one answer is worth."""

    score: float
    """From 0 to 1."""
    right: bool
    details: Json = field(default_factory=dict)
    """For people: what was compared, or why nothing was."""

    @classmethod
    def of(cls, right: bool, **details: Any) -> AnswerScore:
        """1 or 0."""
        return cls(float(right), right, details)


class Scorer(Protocol):
    """Compares answers with references. One instance serves a run: ``score`` is called concurrently.

    Made with its options and the run's language models. A scorer of one's own may inherit what is the same for most.
    """

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")
    """Where answers are looked for, if the configuration does not say."""

    def check(self, question: Question) -> None:
        """Raise :class:`ConfigError`, with ``question.where``, for a reference that cannot be compared with.

        Called for every question when its file is read, so it has to be quick.
        """

    def correct(self, question: Question) -> str:
        """An answer that is right, as a policy would write it; for gold moves."""
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        """What ``answer`` is worth. Raises only for what is no fault of whoever wrote it."""
        ...

    async def close(self) -> None:
        """Give back processes and connections. The scorer may be used again afterwards."""
        return None


class ReadScorer(Scorer, Generic[V]):
    """Compares what it reads in answer and references: numbers, days."""

    what: ClassVar[str]
    """What both have to be, such as "a number"."""

    def read(self, text: str) -> V | None:
        """What all of ``text`` says; None where it says none, or several."""
        raise NotImplementedError

    def equal(self, given: V, reference: V) -> bool:
        """Whether both are the same."""
        return given == reference

    def check(self, question: Question) -> None:
        if any(self.read(text) is None for text in accepted_texts(question)):
            raise question.wrong(f"the right answer must be {self.what}")

    async def score(self, answer: str, question: Question) -> AnswerScore:
        if (given := self.read(answer)) is None:
            return AnswerScore.of(False, why=f"not {self.what}")
        self.check(question)
        for text in accepted_texts(question):
            if (reference := self.read(text)) is not None and self.equal(given, reference):
                return AnswerScore.of(True, reference=text)
        return AnswerScore.of(False, why="another one")


@runtime_checkable
class ChecksTogether(Protocol):
    """A scorer that also looks at all references of a data set at once, as work that is no matter of a moment."""

    def check_together(self, questions: Sequence[Question]) -> None:
        """As :meth:`Scorer.check`, after that, once for all questions. Blocks."""


class Grader:
    """Finds the answer in a text and has it scored."""

    def __init__(self, scorer: Scorer, config: ScorerConfig) -> None:
        self.scorer = scorer
        self.config = config.model_copy(update={"forms": list(config.forms or scorer.forms)})

    def answers(self, text: str) -> Sequence[str]:
        """The different answers in ``text``, in order; none where there is no answer."""
        return found_answers(text, self.config).answers

    async def grade(self, text: str, question: Question) -> AnswerScore:
        """What ``text``, the last thing that the policy said, is worth."""
        found = found_answers(text, self.config)
        if not found.answers:
            return AnswerScore(0.0, False, {"why": found.why})
        answers = ["\n".join(found.answers)] if self.config.several == "joined" else found.answers
        scores = [await self.scorer.score(answer, question) for answer in answers]
        worst = min(scores, key=lambda one: (one.right, one.score))
        told: Json = {"answer": list(answers) if len(answers) > 1 else answers[0], "form": found.form}
        return AnswerScore(worst.score, worst.right, told | worst.details)


def accepted_texts(question: Question) -> list[str]:
    """The reference as texts of which each is right: a text, a number, or a list of these."""
    given = question.reference if isinstance(question.reference, list) else [question.reference]
    texts = [str(one).lower() if isinstance(one, bool) else str(one) for one in given]
    if not texts or not all(isinstance(one, str | int | float) for one in given) or not all(map(str.strip, texts)):
        raise question.wrong("the right answer must be a text or a number, or a list of accepted ones")
    return texts


def options_of(form: type[S], options: Mapping[str, Any], scorer: str) -> S:
    """``options`` as the section that ``scorer`` has; :class:`ConfigError` names the wrong key."""
    known = sorted(form.model_fields)
    try:
        return form.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        here = f"environment.scorer.options{'.' if key else ''}{key}"
        if first["type"] != "extra_forbidden":
            raise ConfigError(f"{here}: {first['msg'].removeprefix('Value error, ')}") from None
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'none'}"
        raise ConfigError(f"{here}: scorer {scorer!r} has no such option; {hint}") from None


def grader(config: ScorerConfig, services: Services | None = None) -> Grader:
    """What finds and scores answers under ``config``; :class:`ConfigError` for what cannot be had."""
    return Grader(make_scorer(config.name, config.options, services or Services()), config)


def make_scorer(name: str, options: Mapping[str, Any], services: Services) -> Scorer:
    """The scorer ``name``; raises as :func:`grader`."""
    if name in _NEEDS and importlib.util.find_spec(_NEEDS[name][0]) is None:
        raise ConfigError(f"{_KEY}: scorer {name!r} needs {_NEEDS[name][1]}: install the extra 'tools' (mua[tools])")
    path = SCORERS.get(name, name)
    if not is_hook(path):
        near = difflib.get_close_matches(name, SCORERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{_KEY}: unknown scorer {name!r}; known: {', '.join(sorted(SCORERS))}, or package.module:function{hint}"
        )
    scorer: Scorer = call_hook(_KEY, path, options, services)
    check_attributes(_KEY, path, scorer)
    return scorer
