"""Guess what the other side is thinking of by yes/no questions."""

from __future__ import annotations

from collections.abc import Container, Generator, Sequence
from functools import cached_property
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, Setting, act
from environments.gyms._shared.oracles import GuessingGame, labeled, plain
from environments.gyms._shared.records import TelepathyRecord
from environments.gyms.telepathy.players import PLAYERS, moves
from environments.gyms.telepathy.table import (
    Entity,
    about_name,
    answer,
    entity_of,
    generate_tasks,
    is_named,
    names_something,
)
from mua.environment.protocol import Move, Task
from mua.types import Json

JUDGE = """Someone had to guess what another person is thinking of: {name} (also called: {synonyms}).
Does the guess name this thing? The name itself, a synonym, another spelling and the plural do. Something more general,
more special or merely similar does not, and neither does a guess that names several things."""

NOT_THE_NAME = "Please ask about the thing, not about its name."
A_GUESS = "If that is your guess, give it with the choice answer."


class TelepathyGame(GuessingGame):
    """One thing thought of."""

    def __init__(self, setting: Setting, task: Task, seed: int, persona: str, names: Container[str] = ()) -> None:
        """``names``: of things that other tasks are about, besides those of the table."""
        super().__init__(setting, task, seed, persona)
        self._entity: Entity = entity_of(task)
        self._names = names

    async def action(self, content: str) -> Reply:
        if about_name(content):
            return Reply(NOT_THE_NAME)
        return Reply(A_GUESS) if names_something(content, self._names) else await super().action(content)

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
        name = _described(self.task) if "gloss" in self.task.data else self._entity.name
        question = JUDGE.format(name=name, synonyms=synonyms)
        said = await labeled(self.setting.judge, question, ("Yes", "No"), {"the guess": guess}, self._llm_seed())
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
    lacking = "table of what is true of the thing"
    short_prompt = "Guess what it is by yes/no questions. Use interact."

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    @staticmethod
    def from_record(record: TelepathyRecord) -> Json:
        titles = {plain(record.title), plain(record.entity)} - {record.entity.lower()}
        return {
            "kind": record.category.replace("_", " ") or "thing", "difficulty": "medium", "entity": record.entity,
            "synonyms": sorted(titles), "gloss": record.gloss, "openings": [record.description,
            f"{record.description} {record.goal}".strip()],
        }  # fmt: skip

    @cached_property
    def _names(self) -> frozenset[str]:
        """Of everything that the records are about."""
        tasks = [task for tasks in (self._loaded or {}).values() for task in tasks]
        return frozenset(plain(name) for task in tasks for name in (task.data["entity"], *task.data["synonyms"]))

    def game(self, task: Task, seed: int) -> Game:
        return TelepathyGame(self.setting, task, seed, self.persona(task), self._names)

    def openings(self, task: Task) -> Sequence[str]:
        if "openings" in task.data:
            return [str(opening) for opening in task.data["openings"]]
        sort = {"easy": task.data["kind"], "medium": _BROAD[task.data["broad"]], "hard": "something"}
        what = sort[task.data["difficulty"]]
        what = what if what.startswith("something") else f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
        return (
            f"I am thinking of {what}.",
            f"Guess what I have in mind: {what}.",
            f"I have {what} in mind. What is it?",
        )

    def persona(self, task: Task) -> str:
        return (
            f"You are thinking of: {_described(task)}. Someone asks you yes/no questions about it. "
            "Answer truthfully with exactly one word: Yes, No, or Maybe. Maybe is for questions whose answer depends "
            "on the case or is unknown, and for any about its name or spelling. What usually holds counts as Yes. "
            "Never name the thing and never explain."
        )

    def gold(self, task: Task) -> Sequence[Move]:
        return [act("answer", task.data["entity"])]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """A record's thing it knows, and asks for its sort first: nothing tells by rules what is true of it."""
        return _asking(task) if "gloss" in task.data else moves(task, seed, loose)


def _described(task: Task) -> str:
    """The thing with what sets it apart from others of its name."""
    if "gloss" in task.data:
        return f"{task.data['entity']} ({task.data['gloss'] or task.data['kind']})"
    return f"{task.data['entity']} (a {task.data['kind']})"


def _asking(task: Task) -> Generator[Move, str, None]:
    sort = task.data["kind"]
    yield act("action", f"Is it {'an' if sort[:1] in 'aeiou' else 'a'} {sort}?")
    yield act("answer", task.data["entity"])


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
