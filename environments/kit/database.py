"""Environments whose state is a database and whose verdict compares it with gold: most service domains.

A domain brings tables (:class:`~environments.kit.overlay.Base`), tools, and tasks whose ``data`` may hold:

``actions``
    gold calls, ``{"name", "arguments"}``, replayed through the same tools; with ``"requestor": "user"`` through the
    user's tools. A gold call that fails stays without effect, as it does for the policy.
``statements``
    what the user must be told, as texts (:data:`environments.kit.conduct.Statement`).
``facts``
    what the user must be told, as facts that a true statement tells (:func:`environments.kit.conduct.untold`).
``demands``
    what must have been looked up before the last word (:mod:`environments.kit.conduct`).
``forbidden``
    calls that may not succeed at any time, ``{"name", "arguments"}``; arguments that are left out match anything.
``initial``
    records that differ from the base when the episode starts, as :data:`~environments.kit.overlay.Changes`.

A desk with a :class:`Code` judges what was said and done on the way as well: ``facts`` and ``demands`` are its.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from environments.kit.conduct import Called, Conduct, Past, Rules, conduct, unsaid, untold
from environments.kit.language.claims import ClaimReader, Moment
from environments.kit.overlay import Base, Changes, Difference, Overlay, difference, digest_of
from mua.environment.protocol import Evaluation, Task, ToolResult, Transcript
from mua.environment.tool_arguments import argument_checker, fitted
from mua.types import Json, ToolSchema
from mua.utils.strict_json import read_file

_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
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


@dataclass(frozen=True, slots=True)
class Code:
    """What a domain wants of its agents besides the right end (:mod:`environments.kit.conduct`)."""

    claims: ClaimReader
    rules: Rules
    moment: Callable[[Task, Base, Overlay, Past], Moment]
    """What is so after some of an episode: the task, its base, the state by then and what had happened."""
    binding: bool = True
    """Whether the reward depends on it; if not, the details of a verdict tell it and nothing else changes."""


def tool_of(function: Callable[..., Any], *, terminal: bool = False) -> Tool:
    """A tool that runs ``function(database, **arguments)``: schema by its signature, description by its docstring.

    Arguments are annotated ``str``, ``int``, ``float``, ``bool`` or a ``list`` of one of them, and optional where they
    have a default; whatever else is needed is written as a :class:`ToolSchema` by hand. Raises TypeError for another
    annotation or a missing docstring.
    """
    if not function.__doc__:
        raise TypeError(f"{function.__name__} needs a docstring: it is what the policy reads")

    def schema(name: str, hint: Any) -> Json:
        if typing.get_origin(hint) is list:
            return {"type": "array", "items": schema(name, *typing.get_args(hint))}
        if hint not in _TYPES:
            raise TypeError(f"{function.__name__}: argument {name!r} is {hint}; write its schema by hand")
        return {"type": _TYPES[hint]}

    hints = typing.get_type_hints(function)
    arguments = list(inspect.signature(function).parameters.values())[1:]
    parameters: Json = {
        "type": "object",
        "properties": {one.name: schema(one.name, hints.get(one.name)) for one in arguments},
        "required": [one.name for one in arguments if one.default is one.empty],
        "additionalProperties": False,
    }
    return Tool(ToolSchema(function.__name__, inspect.cleandoc(function.__doc__), parameters), function, terminal)


def read_schemas(file: Path, **enums: Iterable[str]) -> dict[str, ToolSchema]:
    """The tools that a YAML file describes, by name and in its order.

    Under ``tools`` stand the ``description`` and the ``arguments`` of each: names of those that the file describes
    under ``arguments``, or ``{name: schema}``. Those without a default are required, and others refused where the file
    is ``closed``. ``enum: NAME`` stands for the values of ``enums`` by that name.
    """
    content = yaml.safe_load(read_file(file))

    def filled(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        named = {"enum": list(enums[schema["enum"]])} if isinstance(schema.get("enum"), str) else {}
        return {key: filled(value) for key, value in schema.items()} | named

    found = {}
    for name, tool in content["tools"].items():
        properties: Json = {}
        for one in tool.get("arguments", ()):
            properties |= filled(one if isinstance(one, dict) else {one: content["arguments"][one]})
        required = [argument for argument, schema in properties.items() if "default" not in schema]
        parameters = {"type": "object", "properties": properties, "required": required}
        closed = {"additionalProperties": False} if content.get("closed") else {}
        found[name] = ToolSchema(name, tool["description"], parameters | closed)
    return found


def load_tools(file: Path, functions: object, terminal: str = "", **enums: Iterable[str]) -> dict[str, Tool]:
    """The tools of :func:`read_schemas`, each run by what ``functions`` (a module, an object) has by its name."""
    schemas = read_schemas(file, **enums)
    return {name: Tool(schema, getattr(functions, name), name == terminal) for name, schema in schemas.items()}


class ServiceDesk:
    """What all episodes of one domain share: the base, the tools, the gold states found so far."""

    def __init__(
        self,
        base: Base,
        tools: Sequence[Tool],
        user_tools: Sequence[Tool] = (),
        *,
        reward: RewardForm = "all_or_nothing",
        code: Code | None = None,
    ) -> None:
        self.base = base
        self.code = code
        self.reward: RewardForm = reward
        self.tools = {tool.schema.name: tool for tool in tools}
        self.user_tools = {tool.schema.name: tool for tool in user_tools}
        self.schemas = tuple(tool.schema for tool in tools)
        self.user_schemas = tuple(tool.schema for tool in user_tools)
        self._checkers = {tool.schema.name: argument_checker(tool.schema) for tool in (*tools, *user_tools)}
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
        """Compare the final state with gold; with a code, go through the episode again. See :func:`verdict`."""
        task, desk, code = self._the_task, self._desk, self._desk.code
        data, found = task.data, None
        binding = code is not None and code.binding
        if code is not None:
            again = Again(desk, code, task, self._base)
            rules, demands = (code.rules, data.get("demands", ())) if binding else (Rules({}), ())
            found = conduct(transcript, again, code.claims, rules, demands)
        statements, facts = data.get("statements", ()), data.get("facts", ()) if binding else ()
        missing: list[Any] = [list(statement) for statement in unsaid(statements, transcript.told_user())]
        missing += untold(facts, found.claims.true) if found else []
        told = Telling(len(statements) + len(facts), missing)
        broken = [call for call in self._done if _forbidden(call, data.get("forbidden", ()))]
        return verdict(desk.reward, self._difference(), told, broken, found, binding=binding)

    def _difference(self) -> Difference:
        """From gold; domains may add to it."""
        gold, changes = self._desk.gold(self._the_task), self.state.changes()
        if self._desk.reward == "all_or_nothing" and digest_of(changes) == gold.digest:
            return Difference(right=1)
        return difference(self._base, changes, gold.changes)

    def equals_gold(self) -> bool:
        """Whether the database is now what the gold actions make of it."""
        return digest_of(self.state.changes()) == self._desk.gold(self._the_task).digest

    def equals_untouched(self) -> bool:
        """Whether the database is now what it was at the start."""
        return not self.state.changes()

    def close(self) -> None:
        self._state = None

    @property
    def desk(self) -> ServiceDesk:
        """What it shares with the other episodes of its domain."""
        return self._desk

    @property
    def _the_task(self) -> Task:
        assert self._task is not None, "reset comes first"
        return self._task

    @property
    def state(self) -> Overlay:
        """The database as it is now."""
        assert self._state is not None, "reset comes first"
        return self._state


class Again:
    """An episode gone through once more on a state of its own. Implements :class:`environments.kit.conduct.Replay`."""

    def __init__(self, desk: ServiceDesk, code: Code, task: Task, base: Base) -> None:
        self._desk = desk
        self._code = code
        self._task = task
        self._base = base
        self._state = Overlay(base)

    def call(self, called: Called) -> ToolResult:
        tool = (self._desk.user_tools if called.by_user else self._desk.tools).get(called.name)
        # As the tool took them when it was called.
        arguments = called.arguments if tool is None else fitted(tool.schema, called.arguments)
        return self._desk.call(self._state, called.name, arguments, user=called.by_user)

    def moment(self, past: Past) -> Moment:
        return self._code.moment(self._task, self._base, self._state, past)


@dataclass(frozen=True, slots=True)
class Telling:
    """What the user had to be told."""

    required: int
    """Statements and facts."""
    missing: Sequence[Any]
    """Those that were not told."""


def verdict(
    form: RewardForm,
    rows: Difference,
    told: Telling,
    broken: Sequence[tuple[str, Json]],
    found: Conduct | None = None,
    *,
    binding: bool = True,
) -> Evaluation:
    """All or nothing: 1 exactly when the database equals gold, all was told, nothing forbidden done, ``found`` sound.

    Partial credit is the share of right changes and told facts among all that were due or made::

        (right + told) / (right + wrong + missing + extra + required)

    so that doing nothing earns nothing, also where gold changes nothing; a forbidden call, an untrue statement or a
    rule that was not kept earns 0. Without ``binding`` how the agent got here only stands in the details.
    """
    sound = not broken and not (found is not None and binding and not found.sound)
    success = rows.size == 0 and not told.missing and sound
    reward = float(success)
    if form == "partial" and sound:
        due = rows.right + rows.size + told.required
        reward = (rows.right + told.required - len(told.missing)) / due if due else 1.0
    details: Json = {"database": rows.as_json(), "unsaid": list(told.missing)}
    if broken:
        details["forbidden"] = [{"name": name, "arguments": arguments} for name, arguments in broken]
    return Evaluation(reward, success, details | (found.details() if found is not None else {}))


def _forbidden(call: tuple[str, Json], patterns: Sequence[Json]) -> bool:
    name, arguments = call
    return any(
        pattern["name"] == name
        and all(key in arguments and arguments[key] == value for key, value in pattern.get("arguments", {}).items())
        for pattern in patterns
    )


def _refused(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", error=True)
