"""Persuade gym: change somebody's mind about a claim, by arguments that meet what matters to that person.

The holder moves on seven levels from strongly agree to strongly disagree. By rule, hidden concerns with weights decide
how far an argument moves it; with ``environment.oracle: llm`` a judge decides the stance and a user model speaks. A
turn earns the gain over the furthest stance reached so far, so that an episode earns at most 1, however it swings.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, act
from environments.gyms._shared.settings import Option, Role
from environments.gyms.persuade.claims import NAME, generate
from environments.gyms.persuade.expert import argument, moves
from environments.gyms.persuade.game import PersuadeGame
from environments.gyms.persuade.topics import OTHER, topics
from mua.environment.protocol import Move, Split, Task

_OPENINGS = (
    "{claim} {argument} That is my opinion, and you will hardly change it.",
    "I am convinced of one thing. {claim} {argument} What do you say to that?",
    "Let us talk. {claim} Why? {argument}",
    "Listen: {claim} {argument} Or do you see it differently?",
)


class PersuadeGym(Gym):
    """Implements :class:`mua.environment.protocol.Domain`."""

    name = NAME
    choices: ClassVar[Mapping[Choice, str]] = {
        "action": "what you say to the person: one argument at a time",
        "finish": "end the conversation",
    }
    decisive: ClassVar[Choice] = "action"
    defaults: ClassVar[Mapping[str, Option]] = {"max_actions": 12}
    llm_roles: ClassVar[tuple[Role, ...]] = ("user", "judge")
    short_prompt = "Argue against the claim with interact, action: one argument at a time, until the person gives in."

    @classmethod
    def generate(cls, split: Split) -> Iterable[Task]:
        return generate(split)

    def game(self, task: Task, seed: int) -> Game:
        return PersuadeGame(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        return [opening.format(**task.data) for opening in _OPENINGS]

    def persona(self, task: Task) -> str:
        data = task.data
        other = topics()[data["kind"]].reasons[OTHER[data["side"]]]
        concerns = "\n".join(f"- {other[one['reason']].sentence}" for one in data["concerns"])
        return (
            f"You are convinced of this: {data['claim']}\nYou say: {data['argument']}\nYou think it over honestly when "
            f"somebody makes you see one of the following, and only then:\n{concerns}"
        )

    def gold(self, task: Task) -> Sequence[Move]:
        other = topics()[task.data["kind"]].reasons[OTHER[task.data["side"]]]
        rng = random.Random(task.id)
        return [act("action", argument(other[one["reason"]], rng)) for one in task.data["concerns"]]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        return moves(task, seed, loose)


DOMAIN = PersuadeGym()
