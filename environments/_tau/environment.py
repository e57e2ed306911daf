"""Episodes on official data: tau-bench's verdict, and the parts that tau2-bench's ``reward_basis`` adds to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mua.environment.database import DatabaseEnvironment, ServiceDesk
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.types import Json
from mua.users.judge import Judge


class OfficialEnvironment(DatabaseEnvironment):
    """Database, statements and, where the task's basis has ``ACTION``, the gold calls."""

    def __init__(self, desk: ServiceDesk) -> None:
        super().__init__(desk)
        self._called: list[tuple[str, Json]] = []

    def reset(self, task: Task, seed: int) -> None:
        super().reset(task, seed)
        self._called = []

    def call(self, name: str, arguments: Json) -> ToolResult:
        self._called.append((name, arguments))
        return super().call(name, arguments)

    def evaluate(self, transcript: Transcript) -> Evaluation:
        evaluation = super().evaluate(transcript)
        assert self._task is not None
        if "ACTION" not in self._task.data.get("basis", ()):
            return evaluation
        gold = [action for action in self._task.data["actions"] if action.get("requestor") != "user"]
        missing = [action for action in gold if not any(_matches(action, call) for call in self._called)]
        return narrowed(evaluation, not missing, "uncalled", missing)


class JudgedEnvironment:
    """An :class:`OfficialEnvironment` whose evaluation asks a judge about ``nl_assertions``."""

    def __init__(self, inner: OfficialEnvironment, judge: Judge) -> None:
        self._inner, self._judge = inner, judge
        self._task: Task | None = None
        self._seed = 0
        self.tools, self.call, self.close = inner.tools, inner.call, inner.close

    def reset(self, task: Task, seed: int) -> None:
        self._task, self._seed = task, seed
        self._inner.reset(task, seed)

    async def evaluate(self, transcript: Transcript) -> Evaluation:
        """The judge is asked only where everything else holds, since all of it has to.

        Raises :class:`mua.errors.JudgeFault` where it gives no verdict.
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
