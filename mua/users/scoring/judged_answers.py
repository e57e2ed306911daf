"""Answers that a language model judges beside the reference, where no rule can.

A judge that gives no verdict raises :class:`JudgeFault`, so that the episode is tried
again and never scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from mua.config.environment import AnswerForm
from mua.config.section import Section
from mua.environment.endpoint.services import Services
from mua.users.judge import Judge, VerdictForm
from mua.users.scoring.scorer import AnswerScore, Question, accepted_texts, options_of
from mua.users.scoring.text_answers import normal
from mua.utils.errors import ConfigError

_QUESTION = (
    "Is the given answer right? It is right if it says the same as a reference answer in other words or another form. "
    "It is wrong if it says something else, is missing, leaves a choice between several answers, or contradicts itself."
)


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


class JudgedScorer:
    """Asks the endpoints of ``judge.llm``; implements :class:`mua.users.scoring.scorer.Scorer`."""

    forms: ClassVar[Sequence[AnswerForm]] = ("boxed", "tag", "json", "line", "whole")

    def __init__(self, options: JudgedOptions, judge: Judge) -> None:
        self._options, self._judge = options, judge

    def check(self, question: Question) -> None:
        accepted_texts(question)

    def correct(self, question: Question) -> str:
        return accepted_texts(question)[0]

    async def score(self, answer: str, question: Question) -> AnswerScore:
        accepted = accepted_texts(question)
        said = normal(answer)
        if self._options.first == "exact" and said and said in map(normal, accepted):
            return AnswerScore.of(True, by="the same text")
        material = {"question": question.text, "reference answer": " | or | ".join(accepted), "given answer": answer}
        asked = f"{_QUESTION} {self._options.instructions}".strip()
        verdict = await self._judge.verdict(asked, Correctness, seed=question.seed, material=material)
        return AnswerScore.of(verdict.right, by="judge", reason=verdict.reason)

    async def close(self) -> None:
        """The endpoint is the run's."""


def judge(options: Mapping[str, Any], services: Services) -> JudgedScorer:
    """Scorer ``judge``; :class:`ConfigError` without an endpoint."""
    if services.judge is None:
        raise ConfigError("environment.scorer.name: scorer 'judge' needs the section judge.llm; fill it in")
    return JudgedScorer(options_of(JudgedOptions, options, "judge"), Judge(services.judge))
