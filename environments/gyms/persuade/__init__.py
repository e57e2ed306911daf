"""Persuade gym: change somebody's mind about a claim, by arguments from facts that meet what matters to that person.

The holder moves on seven levels from strongly agree to strongly disagree. What matters has to be found out by
listening, the facts by looking them up; they are made up for each task. By rule, hidden concerns with weights decide
how far an argument moves the holder; with ``environment.oracle: llm`` a judge decides the stance and a user model
speaks. A turn earns the gain over the furthest stance reached so far, so that an episode earns at most 1, however it
swings.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, act
from environments.gyms._shared.settings import Option, Role
from environments.gyms.persuade.canned import canned
from environments.gyms.persuade.claims import NAME, generate
from environments.gyms.persuade.expert import argument, moves
from environments.gyms.persuade.game import PersuadeGame
from environments.gyms.persuade.notes import notes
from mua.environment.canned import Canned
from mua.environment.protocol import Move, Split, Task

_OPENINGS = (
    "{claim} {argument} That is my opinion, and you will hardly change it. I live in a {setting}; only what came of it "
    "in another {setting} counts for me.",
    "I am convinced of one thing. {claim} {argument} What do you say to that? But tell me of a {setting}, for that is "
    "where I live.",
    "Let us talk. {claim} Why? {argument} And come to me with nothing but a {setting} like mine.",
    "Listen: {claim} {argument} Or do you know of a {setting} like ours where it was otherwise?",
)


class PersuadeGym(Gym):
    """Implements :class:`mua.environment.protocol.Domain`."""

    name = NAME
    choices: ClassVar[Mapping[Choice, str]] = {
        "search": "a theme to look up: notes on what happened in places that decided the matter",
        "action": "what you say to the person: a question, or one argument",
        "finish": "end the conversation",
    }
    decisive: ClassVar[Choice] = "action"
    defaults: ClassVar[Mapping[str, Option]] = {"max_actions": 12, "max_searches": 15}
    llm_roles: ClassVar[tuple[Role, ...]] = ("user", "judge")
    short_prompt = (
        "Argue against the claim with interact until the person gives in: ask what is on their mind, search for notes "
        "on that, then argue with the one note that fits."
    )

    @classmethod
    def generate(cls, split: Split) -> Iterable[Task]:
        return generate(split)

    def game(self, task: Task, seed: int) -> Game:
        return PersuadeGame(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        return [opening.format(**task.data) for opening in _OPENINGS]

    def persona(self, task: Task) -> str:
        data, game = task.data, PersuadeGame(self.setting, task, 0)
        concerns = "\n".join(f"- {one}" for one in game.concerns)
        return (
            f"You are convinced of this: {data['claim']}\nYou say: {data['argument']}\nYou think it over honestly when "
            f"somebody shows you one of the following and says what follows from it, and only then:\n{concerns}"
        )

    def gold(self, task: Task) -> Sequence[Move]:
        rng, found = random.Random(task.id), notes(task)
        fitting = [
            note
            for one in sorted(task.data["concerns"], key=lambda one: -one["weight"])
            for note in found[one["theme"]]
            if note.against(task.data["side"]) and note.setting == task.data["setting"]
        ]
        return [act("action", argument(note, task.data["side"], rng)) for note in fitting]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        return moves(task, seed, loose)

    def canned(self) -> Mapping[str, Canned]:
        return canned()


DOMAIN = PersuadeGym()
