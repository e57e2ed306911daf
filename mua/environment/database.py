"""Environments whose state is a database and whose verdict compares it with gold: most service domains.

A domain brings tables (:class:`~mua.environment.overlay.Base`), tools, and tasks whose ``data`` may hold:

``actions``
    gold calls, ``{"name", "arguments"}``, replayed through the same tools; with ``"requestor": "user"`` through the
    user's tools. A gold call that fails stays without effect, as it does for the policy.
``statements``
    what the user must be told (:mod:`mua.environment.statements`).
``forbidden``
    calls that may not succeed at any time, ``{"name", "arguments"}``; arguments that are left out match anything.
``initial``
    records that differ from the base when the episode starts, as :data:`~mua.environment.overlay.Changes`.
"""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mua.environment.overlay import Base, Changes, Difference, Overlay, difference, digest_of
from mua.environment.protocol import Evaluation, Task, ToolResult, ToolSchema, Transcript
from mua.environment.schema import argument_checker
from mua.environment.statements import unsaid
from mua.types import Json

RewardForm = Literal["all_or_nothing", "partial"]


class ToolError(Exception):
    """What a tool refuses, in words for the policy. Raised before anything is written."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool over an :class:`Overlay`."""

    schema: ToolSchema
    run: Callable[..., Any]
    """``run(database, **arguments)``; a text is answered as it is, anything else as JSON."""
    terminal: bool = False
    """The episode ends after a successful call."""


@dataclass(frozen=True, slots=True)
class Gold:
    """What the database must be in the end."""

    changes: Changes
    digest: str
    """Of ``changes``: equal digests are equal states, so the difference is only computed when they differ."""


class ServiceDesk:
    """What all episodes of one domain share: the base, the tools, the gold states found so far."""

    def __init__(
        self,
        base: Base,
        tools: Sequence[Tool],
        user_tools: Sequence[Tool] = (),
        *,
        reward: RewardForm = "all_or_nothing",
    ) -> None:
        self.base = base
        self.reward: RewardForm = reward
        self.tools = {tool.schema.name: tool for tool in tools}
        self.user_tools = {tool.schema.name: tool for tool in user_tools}
        self.schemas = tuple(tool.schema for tool in tools)
        self.user_schemas = tuple(tool.schema for tool in user_tools)
        checked = [*tools, *user_tools]
        self._checkers = {tool.schema.name: argument_checker(tool.schema) for tool in checked}
        self._gold: dict[str, Gold] = {}

    def base_of(self, task: Task) -> Base:
        """The base with the task's ``initial`` records laid over it."""
        initial: Changes = task.data.get("initial") or {}
        if not initial:
            return self.base
        tables: dict[str, Mapping[str, Any]] = dict(self.base.tables)
        for table, records in initial.items():
            tables[table] = ChainMap(records, tables[table])  # type: ignore[arg-type]
        return Base(tables)

    def gold(self, task: Task) -> Gold:
        """The state after the gold actions; computed once a task."""
        found = self._gold.get(task.id)
        if found is None:
            state = Overlay(self.base_of(task))
            for action in task.data["actions"]:
                self.call(state, action["name"], action["arguments"], user=action.get("requestor") == "user")
            changes = state.changes()
            found = self._gold[task.id] = Gold(changes, digest_of(changes))
        return found

    def call(self, state: Overlay, name: str, arguments: Any, *, user: bool = False) -> ToolResult:
        """Run one tool on ``state``; what the caller did wrong is a result with ``error`` set."""
        tool = (self.user_tools if user else self.tools).get(name)
        if tool is None:
            return _refused(f"there is no tool {name!r}")
        if (fault := self._checkers[name](arguments)) is not None:
            return _refused(fault)
        if unknown := arguments.keys() - tool.schema.parameters.get("properties", {}).keys():
            return _refused(f"{name} has no argument {', '.join(sorted(map(repr, unknown)))}")
        try:
            answer = tool.run(state, **arguments)
        except ToolError as error:
            return _refused(str(error))
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return ToolResult(text, terminal=tool.terminal)


class DatabaseEnvironment:
    """One episode over a :class:`ServiceDesk`. Implements :class:`mua.environment.protocol.Environment`."""

    def __init__(self, desk: ServiceDesk) -> None:
        self._desk = desk
        self._task: Task | None = None
        self._base = desk.base
        self._state: Overlay | None = None
        self._done: list[tuple[str, Json]] = []

    def reset(self, task: Task, seed: int) -> None:
        self._task = task
        self._base = self._desk.base_of(task)
        self._state = Overlay(self._base)
        self._done = []

    def tools(self) -> Sequence[ToolSchema]:
        return self._desk.schemas

    def call(self, name: str, arguments: Json) -> ToolResult:
        result = self._desk.call(self.state, name, arguments)
        if not result.error:
            self._done.append((name, arguments))
        return result

    def user_tools(self) -> Sequence[ToolSchema]:
        """The tools of the task's user; see :class:`mua.environment.protocol.UserControlled`."""
        return self._desk.user_schemas

    def user_call(self, name: str, arguments: Json) -> ToolResult:
        """Run one of the user's tools."""
        return self._desk.call(self.state, name, arguments, user=True)

    def evaluate(self, transcript: Transcript) -> Evaluation:
        """Compare the final state with gold; see :func:`verdict`."""
        assert self._task is not None, "reset comes first"
        statements = self._task.data.get("statements", ())
        gold, changes = self._desk.gold(self._task), self.state.changes()
        equal = digest_of(changes) == gold.digest
        return verdict(
            self._desk.reward,
            Difference(right=1)
            if equal and self._desk.reward == "all_or_nothing"
            else difference(self._base, changes, gold.changes),
            unsaid(statements, transcript.told_user()),
            len(statements),
            [call for call in self._done if _forbidden(call, self._task.data.get("forbidden", ()))],
        )

    def equals_gold(self) -> bool:
        """Whether the database is now what the gold actions make of it."""
        assert self._task is not None, "reset comes first"
        return digest_of(self.state.changes()) == self._desk.gold(self._task).digest

    def equals_untouched(self) -> bool:
        """Whether the database is now what it was at the start."""
        return not self.state.changes()

    def close(self) -> None:
        self._state = None

    @property
    def state(self) -> Overlay:
        """The database as it is now."""
        assert self._state is not None, "reset comes first"
        return self._state


def verdict(
    form: RewardForm, rows: Difference, missing: Sequence[Any], required: int, broken: Sequence[tuple[str, Json]]
) -> Evaluation:
    """All or nothing: 1 exactly when the database equals gold, every statement was told and nothing forbidden done.

    Partial credit is the share of right changes and told statements among all that were due or made::

        (right + told) / (right + wrong + missing + extra + required)

    so that doing nothing earns nothing, also where gold changes nothing; a forbidden call earns 0.
    """
    success = rows.size == 0 and not missing and not broken
    reward = float(success)
    if form == "partial" and not broken:
        due = rows.right + rows.size + required
        reward = (rows.right + required - len(missing)) / due if due else 1.0
    details: Json = {"database": rows.as_json(), "unsaid": [list(s) for s in missing]}
    if broken:
        details["forbidden"] = [{"name": name, "arguments": arguments} for name, arguments in broken]
    return Evaluation(reward, success, details)


def _forbidden(call: tuple[str, Json], patterns: Sequence[Json]) -> bool:
    name, arguments = call
    return any(
        pattern["name"] == name
        and all(key in arguments and arguments[key] == value for key, value in pattern.get("arguments", {}).items())
        for pattern in patterns
    )


def _refused(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", error=True)
