r"""Answers that are mathematics: expressions, equations, intervals, sets, matrices, in LaTeX or plain.

math-verify and sympy do the work in processes of their own (:mod:`symbolic_worker` says by which rules),
because both may compute without end. What cannot be decided within the processor time of one comparison is wrong: that
is a property of the answer, and not of how busy the machine is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from mua.config.environment import AnswerForm
from mua.config.section import NonNegativeFloat, Positive, PositiveFloat, Section
from mua.environment.endpoint.services import Services
from mua.types import Json
from mua.users.scoring.comparison_pool import ComparisonPool
from mua.users.scoring.scorer import AnswerScore, Question, accepted_texts, options_of
from mua.users.scoring.written_numbers import read_number

LONGEST = 1_000
"""Characters of an expression that is compared."""
_KEPT = 10_000
"""Comparisons that are remembered."""
_UNREADABLE = "scorer 'symbolic' cannot read the right answer as mathematics"
_PROBE = "z_{9}"
"""Compares with every reference that can be worked with."""


class SymbolicOptions(Section):
    """Options of scorer ``symbolic``."""

    relative: NonNegativeFloat = 1e-6
    """Largest difference of two constants as a share of the reference; two whole numbers must be equal."""
    absolute: NonNegativeFloat = 0.0
    """Largest difference that is right in any case."""
    cpu_seconds: PositiveFloat = 3.0
    """Processor time of one comparison; one that takes longer is wrong."""
    wall_seconds: PositiveFloat = 50.0
    """The same by the clock, after which the machine is to blame and the episode is tried again."""
    workers: Positive = 2
    """Processes; each takes about 120 MiB and, when it starts, two seconds."""


class SymbolicScorer:
    """Mathematics; implements :class:`mua.users.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: SymbolicOptions) -> None:
        self._options = options
        self._pool = ComparisonPool(options.workers, options.cpu_seconds, options.wall_seconds)
        self._rules: Json = {"relative": options.relative, "absolute": options.absolute}
        self._known: dict[tuple[str, str], Json] = {}

    def check(self, question: Question) -> None:
        """Its length and braces; what sympy makes of it is :meth:`check_together`'s to say."""
        for text in accepted_texts(question):
            if len(text) > LONGEST:
                raise question.wrong(f"scorer 'symbolic' compares at most {LONGEST} characters")
            if not _balanced(text):
                raise question.wrong("the right answer has braces that do not match")

    def check_together(self, questions: Sequence[Question]) -> None:
        """Have sympy read every different reference that is no plain number: some milliseconds each."""
        asked: dict[str, Question] = {}
        for question in questions:
            for text in accepted_texts(question):
                if read_number(text) is None:
                    asked.setdefault(text, question)
        if not asked:
            return
        try:
            for question, found in zip(asked.values(), self._pool.read(asked, self._rules), strict=True):
                if found.get("unreadable"):
                    raise question.wrong(_UNREADABLE)
                if "why" in found:
                    raise question.wrong(f"scorer 'symbolic' cannot work with the right answer ({found['why']})")
        finally:
            self._pool.close()

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        why = "not equal"
        if len(answer) > LONGEST:
            return AnswerScore.of(False, why=f"longer than {LONGEST} characters")
        for text in accepted_texts(question):
            found = await self._compared(answer, text)
            if found.get("unreadable"):
                raise question.wrong(_UNREADABLE)
            if found.get("equal"):
                return AnswerScore.of(True, reference=text)
            if "why" in found and "why" in await self._compared(_PROBE, text):
                raise question.wrong(f"scorer 'symbolic' cannot work with the right answer ({found['why']})")
            why = found.get("why", why)
        return AnswerScore.of(False, why=why)

    async def close(self) -> None:
        self._pool.close()

    async def _compared(self, answer: str, reference: str) -> Json:
        if (found := self._known.get((answer, reference))) is None:
            found = await self._pool.compare(answer, reference, self._rules)
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[answer, reference] = found
        return found


@lru_cache(maxsize=4096)
def _balanced(text: str) -> bool:
    depth, escaped = 0, False
    for sign in text:
        if not escaped and sign in "{}":
            depth += 1 if sign == "{" else -1
        escaped = sign == "\\" and not escaped
        if depth < 0:
            return False
    return depth == 0


def symbolic(options: Mapping[str, Any], services: Services) -> SymbolicScorer:
    """Scorer ``symbolic``; :class:`ConfigError` without the packages of extra ``tools``."""
    return SymbolicScorer(options_of(SymbolicOptions, options, "symbolic"))
