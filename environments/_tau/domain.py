"""A domain over official data: its tasks, its policy as system prompt, users that follow their instruction."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from environments._tau.desk import OfficialDesk
from environments._tau.folder import BASES, Form, OfficialData, load_official
from environments._tau.user import InstructedUser
from environments.kit.conduct import unsaid
from environments.kit.database import DatabaseEnvironment, Telling, Tool, verdict
from environments.kit.options import read_options
from environments.kit.overlay import Difference
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import (
    Environment,
    Evaluation,
    Isolation,
    Move,
    PromptStyle,
    Split,
    Task,
    ToolResult,
    Transcript,
    UserMove,
)
from mua.environment.user import User
from mua.types import Json, ToolSchema
from mua.users.judge import Judge
from mua.utils.errors import ConfigError

# Episodes on official data: tau-bench's verdict, and the parts that tau2-bench's ``reward_basis`` adds to it.


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


ToolsOf = Callable[[Form], Sequence[Tool]]
"""The domain's tools in the order the policy sees them, for tau-bench or tau2-bench."""
OPTIONS: Mapping[str, str | bool] = {"skip_noop": False, "leave_out": "", "communicate": False, "split": ""}


def official_domain(
    name: str,
    config: EnvironmentConfig,
    services: Services,
    tables: Sequence[str],
    tools: ToolsOf,
    *,
    short_prompt: str,
) -> OfficialDomain:
    """The domain over ``config.data``; raises :class:`ConfigError` for what cannot be had."""
    assert config.data is not None
    options = read_options(name, OPTIONS, config)
    data = load_official(name, config.data, tables, str(options["split"]) or None)
    desk = OfficialDesk(data.base, tools(data.form), reward=config.reward)
    return OfficialDomain(name, data, desk, short_prompt, services).under(config)


class OfficialDomain:
    """Implements :class:`mua.environment.domain.Domain` over one folder."""

    isolation: Isolation = "inline"

    def __init__(
        self, name: str, data: OfficialData, desk: OfficialDesk, short_prompt: str, services: Services
    ) -> None:
        self.name = name
        self.desk = desk
        self._data = data
        self._tasks = dict(data.tasks)
        self._short_prompt = short_prompt
        self._judge = Judge(services.judge) if services.judge is not None else None

    def under(self, config: EnvironmentConfig) -> Self:
        """This domain with the options applied; ConfigError where a task asks for what there is not."""
        self.leave_out(str(config.options.get("leave_out", "")))
        self.check_basis()
        for tasks in self._tasks.values():
            for task in tasks:
                self.desk.check(task)
        if config.options.get("communicate"):
            self.require_communication()
        if config.options.get("skip_noop"):
            self.skip_noop()
        return self

    def serving(self, tasks: Mapping[Split, tuple[Task, ...]], *, skip_noop: bool) -> Self:
        """This domain with other tasks; ConfigError for one that asks for what there is not."""
        other = copy.copy(self)
        other._tasks = dict(tasks)
        for found in tasks.values():
            for task in found:
                self.desk.check(task)
        if skip_noop:
            other.skip_noop()
        return other

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def environment(self) -> Environment:
        environment = OfficialEnvironment(self.desk)
        return JudgedEnvironment(environment, self._judge) if self._judge is not None else environment

    def system_prompt(self, style: PromptStyle) -> str:
        return self._short_prompt if style == "short" else self._data.policy

    def persona(self, task: Task) -> str:
        return str(task.data["instruction"])

    def scripted_user(self, task: Task, seed: int) -> User:
        return InstructedUser(task.data["instruction"], self.name, seed)

    def gold(self, task: Task) -> Sequence[Move]:
        """What has to be told first, since a transfer ends the conversation; then the calls of both sides."""
        told = [" ".join(map(str, statement)) for statement in task.data["statements"]]
        return [*told, *map(_gold_move, task.data["actions"])]

    def noop_tasks(self, split: Split) -> list[Task]:
        """Tasks that earn full reward for doing and saying nothing, which training should not reward."""
        return [task for task in self._tasks[split] if self._earns_idling(task)]

    def skip_noop(self) -> None:
        """Leave out :meth:`noop_tasks` from every split."""
        for split in self._tasks:
            idle = {task.id for task in self.noop_tasks(split)}
            self._tasks[split] = tuple(task for task in self._tasks[split] if task.id not in idle)

    def leave_out(self, names: str) -> None:
        """Drop parts of the reward basis by name, separated by commas; tau-bench's tasks have none."""
        dropped = {name.strip() for name in names.split(",") if name.strip()}
        if unknown := sorted(dropped - set(BASES[2:])):
            raise ConfigError(f"environment.options.leave_out: {unknown[0]!r} is none of {', '.join(BASES[2:])}")
        for tasks in self._tasks.values():
            for task in tasks:
                if "basis" in task.data:
                    task.data["basis"] = [name for name in task.data["basis"] if name not in dropped]

    def require_communication(self) -> None:
        """Ask for tau2-bench's ``communicate_info`` in every task, whether or not its basis does.

        A reward of our own: it stands for assertions that there is no judge for.
        """
        for tasks in self._tasks.values():
            for task in tasks:
                task.data["statements"] = task.data.get("communicate_info", task.data["statements"])

    def check_basis(self) -> None:
        """Raises :class:`ConfigError` where a reward basis asks for what is not configured or not here."""
        lacking = ["ENV_ASSERTION"] * (not self.desk.assertions) + ["NL_ASSERTION"] * (self._judge is None)
        for name in lacking:
            asking = [task.id for tasks in self._tasks.values() for task in tasks if name in task.data.get("basis", ())]
            if asking:
                mend = "configure the section judge, or " if name == "NL_ASSERTION" else ""
                raise ConfigError(
                    f"environment.data: {self._data.folder}: {len(asking)} tasks, such as {asking[0]}, are judged by "
                    f"{name}; {mend}leave it out with environment.options.leave_out: {name}"
                )

    def _earns_idling(self, task: Task) -> bool:
        if "NL_ASSERTION" in task.data.get("basis", ()):
            return False
        environment = OfficialEnvironment(self.desk)
        environment.reset(task, 0)
        return environment.evaluate(Transcript([])).success


def _gold_move(action: Json) -> Move:
    name, arguments = action["name"], action["arguments"]
    return UserMove(name, arguments) if action.get("requestor") == "user" else (name, arguments)
