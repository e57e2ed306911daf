"""A strange story: find out by yes/no questions what really happened, then explain it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, Setting, act
from environments.gyms._shared.oracles import GuessingGame, labeled
from environments.gyms.turtle.players import PLAYERS, asking, moves
from environments.gyms.turtle.stories import (
    Criterion,
    answer,
    asked_about,
    data_of,
    generate_tasks,
    schemas,
    score,
    story_of,
)
from mua.environment.protocol import Move, Task
from mua.types import Json

SCORES = {"full": 1.0, "none": 0.0}
LONGEST_QUESTION = 20
"""Words; longer ones ask several things at once."""
JUDGE = """Someone had to explain a strange story. Judge whether the explanation contains this one point:
{point}

- full: the explanation says the same, in whatever words, and one of the questions that were answered with Yes had asked
  about it.
- none: it does not say it or only a part of it, contradicts it, or only names it as one of several possibilities; or
  none of the questions had asked about it."""


class TurtleGame(GuessingGame):
    """One story. ``best`` is the score of the best explanation so far; only what goes beyond it is paid.

    A point counts once a question about it has been answered with Yes: nothing is paid for reciting or guessing.
    """

    def __init__(self, setting: Setting, task: Task, seed: int, persona: str) -> None:
        super().__init__(setting, task, seed, persona)
        self._story = story_of(task)
        self._best = 0.0
        self._confirmed: list[str] = []
        """Questions that were answered with Yes."""
        self._needed = sum(len(criterion.statement.split()) for criterion in self._story.criteria)
        """Words that the points take."""

    async def action(self, content: str) -> Reply:
        if len(content.split()) > LONGEST_QUESTION:
            return Reply(f"a question has at most {LONGEST_QUESTION} words", error=True)
        reply = await super().action(content)
        if reply.text == "Yes.":
            self._confirmed.append(content)
        return reply

    def by_rule(self, question: str) -> str:
        return answer(self._story, question)

    async def answer(self, content: str) -> Reply:
        limit = self.setting.whole("max_words")
        if limit and len(content.split()) > max(limit, self._needed):
            return Reply(f"an explanation has at most {max(limit, self._needed)} words", error=True)
        self._calls += 1
        scores = await asyncio.gather(*(self._score(c, content, i) for i, c in enumerate(self._story.criteria)))
        total = round(sum(c.weight * s for c, s in zip(self._story.criteria, scores, strict=True)), 4)
        gain, self._best = max(0.0, round(total - self._best, 4)), max(total, self._best)
        self.solved = self._best >= 1.0
        found = sum(s == 1.0 for s in scores)
        text = f"This explanation has {found} of {len(scores)} points."
        return Reply(text + (" That is the whole story." if self.solved else ""), reward=gain, over=self.solved)

    def details(self) -> Json:
        return {"best": self._best, "story": self._story.hidden_story}

    async def _score(self, criterion: Criterion, content: str, index: int) -> float:
        if self.setting.oracle == "rule":
            asked = any(asked_about(criterion, question, self._story.surface) for question in self._confirmed)
            return score(criterion, content, self._story.surface) if asked else 0.0
        if not self._confirmed:
            return 0.0
        question = JUDGE.format(point=criterion.statement)
        material = {
            "the story as it was told": self._story.surface,
            "the explanation": content,
            "the questions that were answered with Yes": "\n".join(self._confirmed),
        }
        seed = self._llm_seed() + 100_000 * index
        return SCORES[await labeled(self.setting.judge, question, list(SCORES), material, seed)]


class TurtleGym(Gym):
    """Rewards add up to at most 1, the weight of all points of the explanation."""

    name = "gyms/turtle"
    choices: ClassVar[dict[Choice, str]] = {
        "action": "content is a yes/no question about the story",
        "answer": "content is your explanation of the story",
        "finish": "give up",
    }
    defaults: ClassVar[dict[str, str | int | float | bool]] = {"max_actions": 20, "max_answers": 3, "max_words": 80}
    llm_roles = ("user", "judge")
    lacking = "keywords of the story's points and facts"
    short_prompt = "Explain the story. Ask yes/no questions first. Use interact."

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    from_record = staticmethod(data_of)

    def game(self, task: Task, seed: int) -> Game:
        return TurtleGame(self.setting, task, seed, self.persona(task))

    def openings(self, task: Task) -> Sequence[str]:
        surface = task.data["surface"]
        return (f"{surface} What is behind it?", f"Explain this: {surface}", f"{surface} How can that be?")

    def persona(self, task: Task) -> str:
        story = story_of(task)
        return (
            f"You told someone a strange story: {story.surface}\nWhat really happened: {story.hidden_story}\n"
            "The other one asks yes/no questions to find it out. Answer truthfully with exactly one word: Yes, No, or "
            "Maybe. Maybe is for what does not matter or what the story does not tell. Never explain."
        )

    def gold(self, task: Task) -> Sequence[Move]:
        if "criteria" in task.data:
            return [*_asked_of(task), act("answer", " ".join(statement for _, statement in task.data["criteria"]))]
        story = story_of(task)
        found = [act("action", f"Does it have to do with {aliases[0]}?") for aliases in story.found.values()]
        told = " ".join(criterion.statement for criterion in story.criteria)
        return [*asking(schemas()[story.schema], task.data["shown"]), *found, act("answer", told)]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """A record's story it knows: it asks about each point and tells those that it was right about."""
        return _telling(task) if "criteria" in task.data else moves(task, seed, loose)


_LEADS = ("The", "A", "An", "He", "She", "It", "They", "His", "Her", "Their", "There")


def _asked_of(task: Task) -> Iterator[Move]:
    """A question about each point of a record's story; of a long point about its first words."""
    lead = ("Is", "it", "true", "that")
    for _, statement in task.data["criteria"]:
        words = statement.strip(" .").split()[: LONGEST_QUESTION - len(lead)]
        words[:1] = [word.lower() if word in _LEADS else word for word in words[:1]]
        yield act("action", f"{' '.join((*lead, *words))}?")


def _telling(task: Task) -> Generator[Move, str, None]:
    right = []
    for question, (_, statement) in zip(_asked_of(task), task.data["criteria"], strict=True):
        if (yield question).startswith("Yes"):
            right.append(statement)
    yield act("answer", " ".join(right)) if right else act("finish")


DOMAIN = TurtleGym()
