"""The service desk of official data: lenient as the official tools are, and with tau2-bench's initial states."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

from mua.environment.database import RewardForm, ServiceDesk, Tool, ToolError
from mua.environment.overlay import Base, Changes, Overlay, copied
from mua.environment.protocol import Task, ToolResult
from mua.errors import ConfigError
from mua.types import Json

_MISUSE = (TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a tool raises over arguments of a type that it does not expect."""


class OfficialDesk(ServiceDesk):
    """Checks the names of arguments but not their types: a number as zip code is written down, as tau-bench does it.

    Recorded calls and the official evaluation then mean the same here; on data of our own, arguments are checked
    against the whole schema.
    """

    def __init__(self, base: Base, tools: Sequence[Tool], *, reward: RewardForm = "all_or_nothing") -> None:
        super().__init__(base, tools, reward=reward)
        self._names = {tool.schema.name: _argument_names(tool) for tool in tools}
        self._initial: dict[str, Base] = {}

    def call(self, state: Overlay, name: str, arguments: Any, *, user: bool = False) -> ToolResult:
        tool = self.tools.get(name)
        if tool is None or user:
            return _refused(f"there is no tool {name!r}")
        if (fault := self._misfit(name, arguments)) is not None:
            return _refused(fault)
        try:
            answer = tool.run(state, **arguments)
        except ToolError as error:
            return _refused(str(error))
        except _MISUSE as error:
            return _refused(f"an argument is of no use to {name}: {error}")
        return ToolResult(answer if isinstance(answer, str) else json.dumps(answer), terminal=tool.terminal)

    def base_of(self, task: Task) -> Base:
        """The base under tau2-bench's initial state, if the task has one."""
        wanted: Json | None = task.data.get("initialization")
        if wanted is None:
            return self.base
        found = self._initial.get(task.id)
        if found is None:
            found = self._initial[task.id] = self._initialized(task, wanted)
        return found

    def _misfit(self, name: str, arguments: Any) -> str | None:
        if not isinstance(arguments, dict):
            return f"the arguments of {name} must be a JSON object"
        required, known = self._names[name]
        if missing := sorted(required - arguments.keys()):
            return f"{name} lacks the argument {missing[0]!r}"
        if unknown := sorted(arguments.keys() - known):
            return f"{name} has no argument {unknown[0]!r}"
        return None

    def _initialized(self, task: Task, wanted: Json) -> Base:
        """Tables with ``wanted["data"]`` merged in, then ``wanted["actions"]`` run."""
        state = Overlay(self.base)
        for table, records in wanted["data"].items():
            if table not in self.base.tables:
                raise ConfigError(f"task {task.id}: initial_state fills the unknown table {table!r}")
            for key, record in records.items():
                state.insert(table, key, merged(state.get(table, key), record))
        for action in wanted["actions"]:
            result = self.call(state, action["func_name"], action["arguments"])
            if result.error:
                raise ConfigError(f"task {task.id}: initial_state cannot be had: {result.text}")
        return laid_over(self.base, state.changes())


def merged(before: Any, after: Any) -> Any:
    """``after`` over ``before``, objects key by key."""
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, **{key: merged(before.get(key), value) for key, value in after.items()}}
    return copied(after)


def laid_over(base: Base, changes: Changes) -> Base:
    """A base whose changed tables are new; the others are shared."""
    tables = dict(base.tables)
    for table, records in changes.items():
        mixed = {**base.tables[table], **records}
        tables[table] = {key: record for key, record in mixed.items() if record is not None}
    return Base(tables)


def _argument_names(tool: Tool) -> tuple[frozenset[str], frozenset[str]]:
    """Arguments that a tool needs, and all that it takes."""
    parameters = list(inspect.signature(tool.run).parameters.values())[1:]
    required = frozenset(one.name for one in parameters if one.default is one.empty)
    return required, frozenset(one.name for one in parameters)


def _refused(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", error=True)
