"""Guess what the other side is thinking of by yes/no questions."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, Setting, act
from environments.gyms._shared.guessing import GuessingGame
from environments.gyms._shared.oracles import labelled
from environments.gyms.telepathy.canned import policies
from environments.gyms.telepathy.expert import moves
from environments.gyms.telepathy.oracle import about_name, answer, is_named, names_something
from environments.gyms.telepathy.table import Entity, by_name, generate
from mua.environment.canned import Canned
from mua.environment.protocol import Move, Split, Task
from mua.types import Json

JUDGE = """Someone had to guess what another person is thinking of: {name} (also called: {synonyms}).
Does the guess name this thing? The name itself, a synonym, another spelling and the plural do. Something more general,
more special or merely similar does not, and neither does a guess that names several things."""

NOT_THE_NAME = "Please ask about the thing, not about its name."
A_GUESS = "If that is your guess, give it with the choice answer."


class TelepathyGame(GuessingGame):
    """One thing thought of."""

    def __init__(self, setting: Setting, task: Task, seed: int, persona: str) -> None:
        super().__init__(setting, task, seed, persona)
        self._entity: Entity = by_name()[task.data["entity"].lower()]

    async def action(self, content: str) -> Reply:
        if about_name(content):
            return Reply(NOT_THE_NAME)
        return Reply(A_GUESS) if names_something(content) else await super().action(content)

    def by_rule(self, question: str) -> str:
        return answer(self._entity, question)

    async def answer(self, content: str) -> Reply:
        self._calls += 1
        self.solved = await self._names_it(content)
        return Reply("Yes, that is it.", reward=1.0, over=True) if self.solved else Reply("No, that is not it.")

    def details(self) -> Json:
        return {"entity": self._entity.name}

    async def _names_it(self, guess: str) -> bool:
        if is_named(self._entity, guess):
            return True  # nothing to judge: this is the name
        if self.setting.oracle == "rule":
            return False
        synonyms = ", ".join(self._entity.synonyms) or "nothing else"
        question = JUDGE.format(name=self._entity.name, synonyms=synonyms)
        said = await labelled(self.setting.judge, question, ("Yes", "No"), {"the guess": guess}, self._llm_seed())
        return said == "Yes"


class TelepathyGym(Gym):
    """Reward 1 for the right name, once."""

    name = "gyms/telepathy"
    held_out = True
    choices: ClassVar[dict[Choice, str]] = {
        "action": "content is a yes/no question",
        "answer": "content is the name of what it could be",
        "finish": "give up",
    }
    defaults: ClassVar[dict[str, str | int | float | bool]] = {"max_actions": 20, "max_answers": 3}
    llm_roles = ("user", "judge")
    short_prompt = "Guess what it is by yes/no questions. Use interact."

    @classmethod
    def generate(cls, split: Split) -> Iterable[Task]:
        return generate(split)

    def game(self, task: Task, seed: int) -> Game:
        return TelepathyGame(self.setting, task, seed, self.persona(task))

    def openings(self, task: Task) -> Sequence[str]:
        sort = {"easy": task.data["kind"], "medium": _BROAD[task.data["broad"]], "hard": "something"}
        what = sort[task.data["difficulty"]]
        what = what if what.startswith("something") else f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
        return (
            f"I am thinking of {what}.",
            f"Guess what I have in mind: {what}.",
            f"I have {what} in mind. What is it?",
        )

    def persona(self, task: Task) -> str:
        entity = by_name()[task.data["entity"].lower()]
        return (
            f"You are thinking of: {entity.name} (a {entity.category}). Someone asks you yes/no questions about it. "
            "Answer truthfully with exactly one word: Yes, No, or Maybe. Maybe is for questions whose answer depends "
            "on the case or is unknown, and for any about its name or spelling. What usually holds counts as Yes. "
            "Never name the thing and never explain."
        )

    def gold(self, task: Task) -> Sequence[Move]:
        return [act("answer", task.data["entity"])]

    def canned(self) -> Mapping[str, Canned]:
        return policies()

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        return moves(task, seed, loose)


_BROAD = {
    "animal": "animal",
    "plant": "plant",
    "food": "food or drink",
    "object": "thing",
    "place": "place",
    "person": "person",
    "activity": "activity or occupation",
    "body": "part of the body",
    "nature": "something in nature",
}
"""How an opening names the broad classes."""

DOMAIN = TelepathyGym()
