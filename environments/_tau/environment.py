"""Episodes on official data: tau-bench's verdict, and the parts that tau2-bench's ``reward_basis`` adds to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from environments._tau.desk import OfficialDesk
from environments.kit.conduct import unsaid
from environments.kit.database import DatabaseEnvironment, Telling, verdict
from environments.kit.overlay import Difference
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.types import Json, ToolSchema
from mua.users.judge import Judge


class OfficialEnvironment(DatabaseEnvironment):
    """The parts of the task's basis that rules can judge. tau-bench's tasks have none: database and statements.

    Calls of the user's tools count as those of the agent do: tau2-bench looks for a gold call among both.
    """

    def __init__(self, desk: OfficialDesk) -> None:
        super().__init__(desk)
        self._official = desk
        self._called: list[tuple[str, Json]] = []

    def reset(self, task: Task, seed: int) -> None:
        super().reset(task, seed)
        self._called = []

    def call(self, name: str, arguments: Json) -> ToolResult:
        self._called.append((name, arguments))
        return super().call(name, arguments)

    def user_tools(self) -> Sequence[ToolSchema]:
        """All, or those that the task names."""
        allowed = self._allowed()
        return [tool for tool in super().user_tools() if allowed is None or tool.name in allowed]

    def user_call(self, name: str, arguments: Json) -> ToolResult:
        allowed = self._allowed()
        if allowed is not None and name not in allowed:
            return ToolResult(f"Error: there is no tool {name!r}", error=True)
        self._called.append((name, arguments))
        return super().user_call(name, arguments)

    def evaluate(self, transcript: Transcript) -> Evaluation:
        assert self._task is not None, "reset comes first"
        data = self._task.data
        basis = data.get("basis", ("DB",))
        evaluation = super().evaluate(transcript) if "DB" in basis else self._told(transcript)
        if "ACTION" in basis:
            missing = [action for action in data["actions"] if not any(_matches(action, call) for call in self._called)]
            evaluation = narrowed(evaluation, not missing, "uncalled", missing)
        if "ENV_ASSERTION" in basis:
            failed = [one for one in data["env_assertions"] if not self._official.holds(self.state, one)]
            evaluation = narrowed(evaluation, not failed, "failed", failed)
        return evaluation

    def _told(self, transcript: Transcript) -> Evaluation:
        """The verdict without a look at the database."""
        assert self._task is not None
        statements = self._task.data["statements"]
        missing = unsaid(statements, transcript.told_user())
        return verdict(self._desk.reward, Difference(), Telling(len(statements), missing), ())

    def _allowed(self) -> Sequence[str] | None:
        assert self._task is not None, "reset comes first"
        found: Sequence[str] | None = self._task.data.get("user_tools")
        return found


class JudgedEnvironment:
    """An :class:`OfficialEnvironment` whose evaluation asks a judge about ``nl_assertions``."""

    def __init__(self, inner: OfficialEnvironment, judge: Judge) -> None:
        self._inner, self._judge = inner, judge
        self._task: Task | None = None
        self._seed = 0
        self.tools, self.call, self.close = inner.tools, inner.call, inner.close
        self.user_tools, self.user_call = inner.user_tools, inner.user_call

    def reset(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed
        self._inner.reset(task, seed)

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        """The judge is asked only where everything else holds, since all of it has to.

        Raises :class:`JudgeFault` where it gives no verdict.
        """
        evaluation = self._inner.evaluate(transcript)
        assert self._task is not None
        if not evaluation.success or "NL_ASSERTION" not in self._task.data.get("basis", ()):
            return evaluation
        said = {"Conversation": "\n".join(f"{message['role']}: {_line(message)}" for message in transcript.messages)}
        assertions: list[str] = self._task.data["nl_assertions"]
        denied = [text for text in assertions if not await self._judge.holds(text, seed=self._seed, material=said)]
        return narrowed(evaluation, not denied, "denied", denied)


def narrowed(evaluation: Evaluation, holds: bool, key: str, found: Sequence[object]) -> Evaluation:
    """``evaluation`` with one more condition; what speaks against it is kept in the details under ``key``."""
    if holds:
        return evaluation
    details = {**evaluation.details, key: list(found)}
    return dataclasses.replace(evaluation, reward=0.0, success=False, details=details)


def _matches(gold: Json, call: tuple[str, Json]) -> bool:
    name, arguments = call
    compared = gold["arguments"].keys() if gold.get("compare_args") is None else gold["compare_args"]
    return bool(gold["name"] == name) and all(
        key in arguments and arguments[key] == gold["arguments"].get(key) for key in compared
    )


def _line(message: Json) -> str:
    calls = [
        f"[calls {call['function']['name']} {call['function']['arguments']}]"
        for call in message.get("tool_calls") or []
    ]
    return " ".join([*calls, message["content"] or ""]).strip()
