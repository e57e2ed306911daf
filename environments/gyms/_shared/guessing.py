"""Games in which the other side answers yes/no questions about something hidden."""

from __future__ import annotations

from environments.gyms._shared.game import Game, Reply
from environments.gyms._shared.oracles import YES_NO_MAYBE, asked, one_of
from environments.gyms._shared.questions import is_yes_no
from environments.gyms._shared.settings import Setting
from mua.environment.protocol import Task

NO_QUESTION = "Please ask something that can be answered by yes or no."


class GuessingGame(Game):
    """Answers the choice ``action``, by the gym's rule or by an LLM that plays ``persona``."""

    def __init__(self, setting: Setting, task: Task, seed: int, persona: str) -> None:
        super().__init__(setting, task, seed)
        self._persona = persona
        self._calls = 0

    async def action(self, content: str) -> Reply:
        self._calls += 1
        if not is_yes_no(content):
            return Reply(NO_QUESTION)
        if self.setting.oracle == "llm":
            said = await asked(self.setting.user, self._persona, content, one_of(YES_NO_MAYBE), self._llm_seed())
            return Reply(f"{said}.")
        return Reply(f"{self.by_rule(content)}.")

    def by_rule(self, question: str) -> str:
        """Yes, No or Maybe, from the task's facts."""
        raise NotImplementedError(f"{type(self).__name__} has no rule for questions")

    def _llm_seed(self) -> int:
        """Another one for each call."""
        return self.seed * 1000 + self._calls
