"""A hidden rule over four numbers: try points, then say what it gives for numbers that may not be tried."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import ClassVar

from environments.gyms._shared import Choice, Game, Gym, Reply, act
from environments.gyms.function.players import PLAYERS, SOLVED, moves
from environments.gyms.function.records import data_of, is_value, record_moves, rule_value
from environments.gyms.function.rules import LARGEST, VARIABLES, at, generate_tasks, text
from mua.environment.protocol import Move, Task
from mua.types import Json

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class FunctionGame(Game):
    """One hidden rule."""

    async def action(self, content: str) -> Reply:
        numbers = [float(n) for n in _NUMBER.findall(content)]
        if len(numbers) != len(VARIABLES):
            return Reply(f"an action needs exactly four numbers, such as 1 2 3 4; found {len(numbers)}", error=True)
        if not all(0 <= n <= LARGEST and n == int(n) for n in numbers):
            return Reply(f"numbers must be whole and lie between 0 and {LARGEST}", error=True)
        return self._tried([int(n) for n in numbers])

    async def search(self, content: str) -> Reply:
        if content.strip(" .'\"").lower() != "test":
            return Reply("search knows only the content test", error=True)
        return Reply(" ".join(str(n) for n in self.task.data["test"]))

    async def answer(self, content: str) -> Reply:
        numbers = [float(n) for n in _NUMBER.findall(content)]
        if len(numbers) != 1:
            return Reply("an answer is exactly one number", error=True)
        if not self._is_right(numbers[0]):
            return Reply("Wrong.")
        self.solved = True
        return Reply(f"{SOLVED}.", reward=1.0, over=True)

    def details(self) -> Json:
        return {"rule": text(self.task.data["rule"]), "expected": self._expected()}

    def _tried(self, numbers: Sequence[int]) -> Reply:
        return Reply(str(at(self.task.data["rule"], numbers)))

    def _is_right(self, number: float) -> bool:
        return number == self._expected()

    def _expected(self) -> float:
        return at(self.task.data["rule"], self.task.data["test"])


class RecordGame(FunctionGame):
    """One of UserRL's rules: it may give fractions, and its test numbers are as small as those that may be tried."""

    def _tried(self, numbers: Sequence[int]) -> Reply:
        if list(numbers) == self.task.data["test"]:
            return Reply("the test numbers themselves may not be tried", error=True)
        try:
            return Reply(rule_value(self.task.data["rule"], numbers))
        except ValueError:
            return Reply("The rule gives no number there.")

    def _is_right(self, number: float) -> bool:
        return is_value(number, self._expected())

    def _expected(self) -> float:
        return float(self.task.data["expected"])


class FunctionGym(Gym):
    """Reward 1 for the right value, once; decided by arithmetic alone, so there is no LLM oracle."""

    name = "gyms/function"
    choices: ClassVar[dict[Choice, str]] = {
        "search": "content 'test' shows the four test numbers",
        "action": "content of four whole numbers 'a b c d', at most 50 each, gives the value of the hidden rule there",
        "answer": "content of one number, the value for the test numbers",
        "finish": "give up",
    }
    defaults: ClassVar[dict[str, str | int | float | bool]] = {"max_actions": 20, "max_answers": 3}
    short_prompt = "Find the value of the hidden rule for the test numbers. Use interact."

    players = PLAYERS
    generate = staticmethod(generate_tasks)

    from_record = staticmethod(data_of)

    def game(self, task: Task, seed: int) -> Game:
        return (RecordGame if "expected" in task.data else FunctionGame)(self.setting, task, seed)

    def openings(self, task: Task) -> Sequence[str]:
        return (
            "What does the hidden rule give for the test numbers?",
            "Find out what the rule makes of the test numbers.",
            "I have a rule for four numbers. Tell me its value for my test numbers.",
            "Try some numbers, then tell me what my rule gives for the test.",
        )

    def persona(self, task: Task) -> str:
        return (
            "You know a rule that turns four numbers a, b, c, d into one. You want the agent to find out what it gives "
            "for your test numbers, by trying other numbers in the tool interact. You do not talk about the rule."
        )

    def gold(self, task: Task) -> Sequence[Move]:
        expected = task.data.get("expected")
        return [act("answer", str(at(task.data["rule"], task.data["test"]) if expected is None else repr(expected)))]

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        return record_moves(task, seed, loose) if "expected" in task.data else moves(task, seed, loose)


DOMAIN = FunctionGym()
