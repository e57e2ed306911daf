"""A vague request: ask for what it leaves open, one thing at a time, the important first."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, Setting, act
from environments.gyms._shared.oracles import is_list
from environments.gyms.intention.players import PLAYERS, moves
from environments.gyms.intention.schemas import (
    covered_by_llm,
    covered_by_rule,
    data_of,
    generate_tasks,
    question_about,
    record_moves,
    said_by_llm,
    said_by_rule,
)
from mua.environment.protocol import Move, Task
from mua.types import Json

WORTH = {3: 1.0, 2: 0.7, 1: 0.4}
"""Reward of a question by the importance of the most important detail that it newly covers."""
SEVERAL = 0.2
"""Taken off for each further detail that the same question covers."""
CONTENT = "That is all I had in mind."
IMPATIENT = "You keep asking what does not matter; I shall see to it myself."


def worth(importances: Sequence[int]) -> float:
    """Reward of a question that newly covers details of these importances; never negative."""
    if not importances:
        return 0.0
    return max(0.0, round(WORTH[max(importances)] - SEVERAL * (len(importances) - 1), 4))


class IntentionGame(Game):
    """One request. ``covered`` only grows: what was told once pays once."""

    def __init__(self, setting: Setting, task: Task, seed: int) -> None:
        super().__init__(setting, task, seed)
        self._details: list[Json] = task.data["details"]
        self._covered: set[int] = set()
        self._asked = 0
        self._useless = 0

    async def action(self, content: str) -> Reply:
        self._asked += 1
        covered = await self._covers(content)
        new = [i for i in covered if i not in self._covered]
        text = await self._says(content, new, [i for i in covered if i in self._covered])
        self._covered.update(new)
        self.solved = len(self._covered) == len(self._details)
        self._useless += not new
        if self.solved:
            text += f" {CONTENT}"
        elif self._out_of_patience():
            text += f" {IMPATIENT}"
        over = self.solved or self._out_of_patience()
        return Reply(text, reward=worth([self._details[i]["importance"] for i in new]), over=over)

    def details(self) -> Json:
        return {
            "covered": [d["key"] for i, d in enumerate(self._details) if i in self._covered],
            "missed": [d["key"] for i, d in enumerate(self._details) if i not in self._covered],
            "useless": self._useless,
        }

    def _out_of_patience(self) -> bool:
        """Whether so many questions brought nothing new that the person leaves: a list by heart is no asking."""
        most = self.setting.whole("max_useless")
        return 0 < most <= self._useless

    async def _covers(self, question: str) -> list[int]:
        if is_list(question):
            return []
        if self.setting.oracle == "llm":
            return await covered_by_llm(self.setting, self._details, question, self._llm_seed())
        return covered_by_rule(self.task.data["kind"], self._details, question)

    async def _says(self, question: str, new: Sequence[int], old: Sequence[int]) -> str:
        fresh, stale = [self._details[i] for i in new], [self._details[i] for i in old]
        if self.setting.oracle == "llm":
            request = self.task.data["request"]
            return await said_by_llm(self.setting, request, question, [*fresh, *stale], self._llm_seed())
        return said_by_rule(self.task, question, fresh, stale, self.rng)

    def _llm_seed(self) -> int:
        return self.seed * 1000 + self._asked


class IntentionGym(Gym):
    """Rewards add up over the details, so a task with more of them is worth more than 1."""

    name = "gyms/intention"
    held_out = True
    choices: ClassVar[dict[Choice, str]] = {
        "action": "content is a question to the person",
        "finish": "nothing more to ask",
    }
    decisive = "action"
    defaults: ClassVar[dict[str, str | int | float | bool]] = {"max_actions": 10, "max_useless": 3}
    llm_roles = ("user", "judge")
    lacking = "keywords by which a question is about a detail"
    short_prompt = "Ask for what the request leaves open, one thing at a time. Use interact."

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    from_record = staticmethod(data_of)

    def game(self, task: Task, seed: int) -> Game:
        return IntentionGame(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        request: str = task.data["request"]
        return (
            request,
            f"Hi. {request}",
            f"Hello, {request[0].lower() + request[1:]}" if request[0] != "I" else request,
        )

    def persona(self, task: Task) -> str:
        known = "\n".join(f"- {d['description']}: {d['preference']}" for d in task.data["details"])
        return (
            f"You asked an assistant: {task.data['request']} You have these wishes and no others:\n{known}\n"
            "Tell a wish only when you are asked for it, one at a time, in one short sentence."
        )

    def gold(self, task: Task) -> Sequence[Move]:
        return [act("action", question_about(detail)) for detail in task.data["details"]]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """A record's details it knows: no kind of request stands behind them."""
        return record_moves(task, seed, loose) if "category" in task.data else moves(task, seed, loose)


DOMAIN = IntentionGym()
