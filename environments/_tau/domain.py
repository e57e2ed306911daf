"""A domain over official data: its tasks, its policy as system prompt, users that follow their instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from environments._tau.desk import OfficialDesk
from environments._tau.environment import JudgedEnvironment, OfficialEnvironment
from environments._tau.folder import Form, OfficialData, load_official
from environments._tau.tau2 import BASES
from environments._tau.user import InstructedUser
from environments.kit.database import Tool
from mua.config.schema import EnvironmentConfig
from mua.environment.endpoint.services import Services
from mua.environment.protocol import (
    Environment,
    Isolation,
    Move,
    PromptStyle,
    Split,
    Task,
    Transcript,
    UserMove,
)
from mua.environment.user import User
from mua.types import Json
from mua.users.judge import Judge
from mua.utils.errors import ConfigError

ToolsOf = Callable[[Form], Sequence[Tool]]
"""The domain's tools in the order the policy sees them, for tau-bench or tau2-bench."""
SWITCHES = ("skip_noop", "communicate")
OPTIONS = ("skip_noop", "leave_out", "communicate", "split")


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
    check_options(name, config)
    data = load_official(name, config.data, tables, wanted_split(config))
    desk = OfficialDesk(data.base, tools(data.form), reward=config.reward)
    return OfficialDomain(name, data, desk, short_prompt, services).under(config)


def check_options(name: str, config: EnvironmentConfig, *more: str) -> None:
    """ConfigError for an option that there is not (``more``: those of one domain), or of another type."""
    known = (*OPTIONS, *more)
    for key, value in config.options.items():
        if key not in known:
            raise ConfigError(
                f"environment.options: {name} has no option {key!r} on official data; known: {', '.join(known)}"
            )
        wanted = bool if key in SWITCHES else str
        if not isinstance(value, wanted):
            kind = "true or false" if wanted is bool else "a text"
            raise ConfigError(f"environment.options.{key}: must be {kind}, not {value!r}")


def wanted_split(config: EnvironmentConfig) -> str | None:
    """The option ``split``."""
    found = config.options.get("split")
    return None if found is None else str(found)


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
