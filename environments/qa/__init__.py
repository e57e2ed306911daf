"""Questions and answers: with tools or without, scored by any scorer.

``environment.data`` names questions of one's own (:mod:`environments.qa.records`); without it the domain asks about a
made-up world (:mod:`environments.qa.own`), whose pages are found with ``lookup`` and read with ``open_page``. The
policy may use tools, these and those of ``environment.mcp``, for as many turns as it likes; its first text with an
answer ends the conversation. What it is worth is the matter of ``environment.scorer`` (docs/scorers.md).
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from environments.kit.canned import Canned
from environments.kit.options import Option, read_options
from environments.qa.episode import Asker, QuestionEnvironment
from environments.qa.own import NAME, other_tasks, own_tasks
from environments.qa.players import CANNED, moves
from environments.qa.records import DataOptions, load, question_of
from environments.qa.world import SENTENCES, SPLITS
from mua.config.environment import AnswerForm, ScorerConfig
from mua.environment.domain import Domain
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.user import User
from mua.users.scoring.scorer import ChecksTogether, Grader, grader
from mua.users.scoring.text_answers import ChoiceScorer
from mua.utils.errors import ConfigError

if TYPE_CHECKING:
    from mua.config.schema import EnvironmentConfig
    from mua.environment.endpoint.services import Services

_OWN_SCORER = ScorerConfig(name="exact", forms=["tag", "boxed", "line"])
_SHORT = "Answer the question."
_FULL = """\
You answer a question.

- Work it out step by step. Where you have tools, use them; do not guess what they can tell you.
- {form}
- The first message with an answer ends the conversation, so give it only when you are done, and give one answer alone.
"""
_PAGES = """\
- The question is about a world that you cannot know. lookup finds its pages, open_page reads one.
- A question may take several steps: find out one name, then look that up.
"""
_FORMS: Mapping[AnswerForm, str] = {
    "boxed": r"Put the final answer into \boxed{}.",
    "tag": "Put the final answer between <{tag}> and </{tag}>.",
    "json": 'Give the final answer as a JSON object with the key "{key}".',
    "line": "Give the final answer on a line of its own, as Answer: ...",
    "code": "Give the final program in a fenced block, marked as python.",
    "number": "End with the number that is the answer.",
    "whole": "Say the answer and nothing else.",
}
_OPENINGS = ("{}", "I would like to know this. {}", "Here is a question for you. {}", "{} Please find it out.")
_WHOLE = {"patience": 3, "results": 5, "sentences": SENTENCES, "practice": 0, "plain_names": 0}
"""Options that are whole numbers: texts without an answer until the asker leaves, pages that a lookup gives, sentences
of a page besides its facts, practice worlds in place of the training split's, 1 for names of common words."""
_RANGES = {
    "patience": (1, 50),
    "results": (1, 50),
    "sentences": (0, SENTENCES),
    "practice": (0, 50),
    "plain_names": (0, 1),
}
_OF_THE_WORLD = ("sentences", "practice", "plain_names")


class QuestionDomain:
    """Implements :class:`mua.environment.domain.Domain`, ``Expert``, ``Configurable``, ``Owner``, ``PerTaskPrompt``."""

    name = NAME
    user_in_tools = True
    scores_answers = True
    isolation: Isolation = "thread"

    def __init__(
        self,
        scorer: Grader,
        given: Mapping[Split, Sequence[Task]] | None = None,
        options: Mapping[str, int] = _WHOLE,
    ) -> None:
        """``given`` are tasks from files, in place of those about the made-up world."""
        self.grader, self._given, self._options = scorer, given, options

    def tasks(self, split: Split) -> Sequence[Task]:
        if self._given is not None:
            return self._given[split]
        practice, plain = self._options["practice"], bool(self._options["plain_names"])
        if plain or (practice and split == "train"):
            return other_tasks(split, practice, plain)
        return own_tasks(split)

    def environment(self) -> Environment:
        return QuestionEnvironment(self.grader, self._options["results"], self._options["sentences"])

    def system_prompt(self, style: PromptStyle) -> str:
        form = self._form()
        if style == "short":
            return f"{_SHORT} {form}"
        return _FULL.format(form=form) + (_PAGES if self._given is None else "")

    def prompt_for(self, task: Task, style: PromptStyle) -> str:
        """The row's own instructions, where it has any."""
        own: str | None = task.data.get("system")
        return self.system_prompt(style) if own is None else own

    def persona(self, task: Task) -> str:
        return f"You want the answer to one question, and do not know it: {task.data['question']}"

    def scripted_user(self, task: Task, seed: int) -> User:
        rng = random.Random(f"{task.id}/{seed}")
        wording = rng.choice(_OPENINGS) if self._given is None else "{}"
        opening = wording.replace("{}", self._asked(task))
        return Asker(opening, self.grader, self._options["patience"], self._form(), rng.randrange(1000))

    def gold(self, task: Task) -> Sequence[Move]:
        """The answer at once; none where the scorer knows no right one (programs without a solution)."""
        right = self.grader.scorer.correct(question_of(task))
        return [self._said(right)] if right else []

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """Follows the chain of a question about the made-up world from page to page; to others it knows the answer."""
        if "chain" not in task.data:
            yield from self.gold(task)
            return
        found = yield from moves(task, seed, loose)
        if found is not None:
            yield self._said(found)

    def canned(self) -> Mapping[str, Canned]:
        """Policies that deserve nothing, on the tasks of its own."""
        return CANNED

    def configured(self, config: EnvironmentConfig, services: Services) -> Domain:
        """Under ``config``; raises :class:`ConfigError` for what cannot be had."""
        of_files: dict[str, Option] = {field.name: getattr(DataOptions(), field.name) for field in fields(DataOptions)}
        read = read_options(NAME, {**_WHOLE, **of_files}, config)
        reading = DataOptions(**{name: read.pop(name) for name in of_files})  # type: ignore[arg-type]
        options = {name: int(value) for name, value in read.items()}
        # In a mix another domain's data may be named.
        data = config.data if config.data is None or NAME in (config.name, config.data.name) else None
        for key in config.options:
            name = key.removeprefix(f"{NAME}.")
            least, most = _RANGES.get(name, (0, 0))
            if name in options and not least <= options[name] <= most:
                raise ConfigError(f"environment.options.{key}: must be a whole number from {least} to {most}")
            if name in _OF_THE_WORLD and data is not None:
                raise ConfigError(f"environment.options.{key}: is about the made-up world, and environment.data is set")
            if name in of_files and config.data is None:
                raise ConfigError(f"environment.options.{key}: says how environment.data is read, which is not set")
        if config.reward != "all_or_nothing" and config.name == NAME:
            raise ConfigError(
                "environment.reward: 'qa' pays what its scorer says; use environment.scorer.options.graded"
            )
        if config.scorer is not None and config.scorer.name == "judge" and config.isolation == "process":
            raise ConfigError(
                "environment.isolation: scorer 'judge' asks endpoints of the run; leave isolation at auto"
            )
        scorer = grader(config.scorer or _OWN_SCORER, services)
        if data is None:
            if config.scorer is not None and config.name == NAME:
                for split in SPLITS:
                    self._check(scorer, own_tasks(split))
            return QuestionDomain(scorer, None, options)
        given = load(data, reading, NAME)
        try:
            self._check(scorer, [task for tasks in given.values() for task in tasks])
        except ConfigError as error:
            raise ConfigError(f"environment.data: {data}: {error} (field {reading.answer!r})") from None
        return QuestionDomain(scorer, given, options)

    async def start(self) -> None:
        """Processes of the scorer start when they are needed."""

    async def stop(self) -> None:
        """End them."""
        await self.grader.scorer.close()

    @staticmethod
    def _check(scorer: Grader, tasks: Sequence[Task]) -> None:
        questions = [question_of(task) for task in tasks]
        for question in questions:
            scorer.scorer.check(question)
        if isinstance(scorer.scorer, ChecksTogether):
            scorer.scorer.check_together(questions)

    def _form(self) -> str:
        """How an answer is to be given, by the first form that is looked for."""
        config = self.grader.config
        return _FORMS[config.forms[0]].replace("{tag}", config.tag).replace("{key}", config.key)

    def _said(self, answer: str) -> str:
        """``answer`` in that form."""
        config = self.grader.config
        dressed: Mapping[AnswerForm, str] = {
            "boxed": f"\\boxed{{{answer}}}",
            "tag": f"<{config.tag}>{answer}</{config.tag}>",
            "line": f"Answer: {answer}",
            "json": json.dumps({config.key: answer}, ensure_ascii=False),
        }
        return dressed.get(config.forms[0], answer)

    def _asked(self, task: Task) -> str:
        """The question, with its choices."""
        question: str = task.data["question"]
        scorer = self.grader.scorer
        label = scorer.label if isinstance(scorer, ChoiceScorer) else (lambda place: "-")
        lines = [
            f"{label(place)}) {text}".replace("-) ", "- ") for place, text in enumerate(task.data.get("choices", ()))
        ]
        return "\n".join([question, *lines])


DOMAIN = QuestionDomain(grader(_OWN_SCORER))
