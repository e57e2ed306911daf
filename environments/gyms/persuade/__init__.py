"""Persuade gym: change somebody's mind about a claim, by arguments from facts that meet what matters to that person.

The holder moves on seven levels from strongly agree to strongly disagree. What matters has to be found out by
listening, the facts by looking them up; they are made up for each task. By rule, hidden concerns with weights decide
how far an argument moves the holder; with ``environment.oracle: llm`` a judge decides the stance and a user model
speaks. A turn earns the gain over the furthest stance reached so far, so that an episode earns at most 1, however it
swings.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, act
from environments.gyms._shared.game import Role
from environments.gyms._shared.records import PersuadeRecord
from environments.gyms.persuade.game import SAYINGS, Debate, PersuadeGame
from environments.gyms.persuade.players import PLAYERS, argument, moves
from environments.gyms.persuade.topics import NAME, generate_tasks, notes
from environments.kit.options import Option
from mua.environment.protocol import Move, Task
from mua.types import Json
from mua.utils.errors import MuaError

_OPENINGS = SAYINGS["openings"]
_RECORD_OPENINGS = SAYINGS["record_openings"]


class PersuadeGym(Gym):
    """Implements :class:`mua.environment.domain.Domain`."""

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

    lacking: ClassVar[str] = "concerns of the person, and no notes to argue from"
    record_choices: ClassVar[Mapping[Choice, str]] = {
        "action": "what you say to the person: one argument, or a question",
        "finish": "end the conversation",
    }
    record_prompt = "Argue against the claim with interact, one sound argument at a time, until the person gives in."

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    @staticmethod
    def from_record(record: PersuadeRecord) -> Json:
        return {"kind": "given", "difficulty": "medium", "claim": record.claim, "argument": record.argument}

    def game(self, task: Task, seed: int) -> Game:
        return (PersuadeGame if "concerns" in task.data else Debate)(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        openings = _OPENINGS if "concerns" in task.data else _RECORD_OPENINGS
        return [" ".join(opening.format(**task.data).split()) for opening in openings]

    def persona(self, task: Task) -> str:
        if "concerns" not in task.data:
            return (
                f"You are convinced of this: {task.data['claim']}\nYou say: {task.data['argument']}\nYou think it over "
                "honestly when somebody gives you a sound argument that you have not heard yet, and only then."
            )
        data, game = task.data, PersuadeGame(self.setting, task, 0)
        concerns = "\n".join(f"- {one}" for one in game.concerns)
        return (
            f"You are convinced of this: {data['claim']}\nYou say: {data['argument']}\nYou think it over honestly when "
            f"somebody shows you one of the following and says what follows from it, and only then:\n{concerns}"
        )

    def gold(self, task: Task) -> Sequence[Move]:
        """None for a record: it holds no argument against its claim; raises :class:`MuaError`."""
        _check_notes(task)
        rng, found = random.Random(task.id), notes(task)
        fitting = [
            note
            for one in sorted(task.data["concerns"], key=lambda one: -one["weight"])
            for note in found[one["theme"]]
            if note.against(task.data["side"]) and note.setting == task.data["setting"]
        ]
        return [act("action", argument(note, task.data["side"], rng)) for note in fitting]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        """Argues from the notes; a record has none, and raises :class:`MuaError`."""
        _check_notes(task)
        return moves(task, seed, loose)


def _check_notes(task: Task) -> None:
    if "concerns" not in task.data:
        raise MuaError(
            f"{task.id}: UserRL's record holds no argument against its claim; arguments for it come from a model"
        )


DOMAIN = PersuadeGym()
