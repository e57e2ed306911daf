"""The service desk of official data: lenient as the official tools are, and with tau2-bench's initial states."""

from __future__ import annotations

import ast
import inspect
import json
import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from environments.kit.database import RewardForm, ServiceDesk, Tool, ToolError, load_tools
from environments.kit.overlay import Base, Changes, Overlay, copied
from mua.environment.protocol import Task, ToolResult
from mua.types import Json
from mua.utils.errors import ConfigError

# The three tools that tau-bench's domains share: arithmetic, a place to think, and the way to a person.
#
# ``calculate`` reads the expression as a syntax tree and knows numbers, ``+ - * /``, the two further operators that
# are written with these signs (``**`` and ``//``) and parentheses; nothing is ever evaluated as code, and powers are
# bounded. It answers as tau-bench does: a float, rounded to two places.

LONGEST_EXPRESSION = 500
"""Characters; a longer one is refused."""
_DEEPEST = 250
_LARGEST_POWER = 1100.0
"""Binary digits of a power; more are beyond a float anyway, and could take for ever."""


def _power(base: float, exponent: float) -> float:
    if abs(base) > 1 and exponent * math.log2(abs(base)) > _LARGEST_POWER:
        raise OverflowError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the power is no real number")
    return value


_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: _power,
}
_SIGNS: dict[type[ast.AST], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(expression: str) -> float:
    """The value of an arithmetic expression; :class:`ToolError` for anything else."""
    if not set(expression) <= set("0123456789+-*/(). "):
        raise ToolError("the expression may hold numbers, + - * /, parentheses and spaces only")
    if len(expression) > LONGEST_EXPRESSION:
        raise ToolError(f"the expression is longer than {LONGEST_EXPRESSION} characters")
    try:
        return round(float(_value(ast.parse(expression.lstrip(), mode="eval").body, 0)), 2)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError("the expression cannot be read") from error
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(f"the expression has no value: {error}") from error


def _value(node: ast.AST, depth: int) -> float:
    if depth > _DEEPEST:
        raise ToolError("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and (sign := _SIGNS.get(type(node.op))) is not None:
        return sign(_value(node.operand, depth + 1))
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))) is not None:
        return apply(_value(node.left, depth + 1), _value(node.right, depth + 1))
    raise ToolError("the expression may hold numbers, + - * / and parentheses only")


def calculate(database: Overlay, expression: str) -> str:
    return str(evaluate(expression))


def think(database: Overlay, thought: str) -> str:
    return ""


def transfer_to_human_agents(database: Overlay, summary: str) -> str:
    return "Transfer successful"


_SHARED = load_tools(Path(__file__).with_name("tools.yaml"), sys.modules[__name__], terminal="transfer_to_human_agents")
CALCULATE, THINK, TRANSFER = _SHARED.values()


MISUSE = (TypeError, ValueError, KeyError, IndexError, AttributeError)
"""What a tool raises over arguments of a type that it does not expect."""
Functions: TypeAlias = Mapping[tuple[str, str], Callable[..., Any]]
"""tau2-bench's functions over the state, by ``env_type`` ("assistant" or "user") and ``func_name``."""


class OfficialDesk(ServiceDesk):
    """Checks the names of arguments but not their types: a number as zip code is written down, as tau-bench does it.

    Recorded calls and the official evaluation then mean the same here; on data of our own, arguments are checked
    against the whole schema.
    """

    assertions: ClassVar[Functions] = {}
    """For ``ENV_ASSERTION``; none here."""

    def __init__(
        self,
        base: Base,
        tools: Sequence[Tool],
        user_tools: Sequence[Tool] = (),
        *,
        reward: RewardForm = "all_or_nothing",
    ) -> None:
        super().__init__(base, tools, user_tools, reward=reward)
        self.functions: Functions = {
            **{("assistant", tool.schema.name): tool.run for tool in tools},
            **{("user", tool.schema.name): tool.run for tool in user_tools},
        }
        """What ``initialization_actions`` may name."""
        self._initial: dict[str, Base] = {}

    def call(self, state: Overlay, name: str, arguments: Any, *, user: bool = False) -> ToolResult:
        tool = (self.user_tools if user else self.tools).get(name)
        if tool is None:
            return _refused(f"there is no tool {name!r}")
        if (fault := misfit(name, tool.run, arguments)) is not None:
            return _refused(fault)
        try:
            answer = tool.run(state, **arguments)
            self.settle(state)
        except ToolError as error:
            return _refused(str(error))
        except MISUSE as error:
            return _refused(f"an argument is of no use to {name}: {error}")
        return ToolResult(answer if isinstance(answer, str) else json.dumps(answer), terminal=tool.terminal)

    def settle(self, state: Overlay) -> None:
        """What one side's records make of the other's after a call; nothing here."""

    def holds(self, state: Overlay, assertion: Json) -> bool:
        """Whether a function of :attr:`assertions` gives what it should; one that refuses its arguments does not."""
        function = self.assertions[assertion["env_type"], assertion["func_name"]]
        try:
            return function(state, **assertion["arguments"]) is assertion.get("assert_value", True)
        except (ToolError, *MISUSE):
            return False

    def base_of(self, task: Task) -> Base:
        """The base under tau2-bench's initial state, if the task has one."""
        wanted: Json | None = task.data.get("initialization")
        if wanted is None:
            return self.base
        found = self._initial.get(task.id)
        if found is None:
            found = self._initial[task.id] = self._initialized(task, wanted)
        return found

    def check(self, task: Task) -> None:
        """ConfigError where the initial state or an assertion of a task asks for a function that there is not."""
        for action in (task.data.get("initialization") or {}).get("actions", ()):
            self._function(task, "initialization_actions", action, self.functions)
        if "ENV_ASSERTION" in task.data.get("basis", ()):
            for assertion in task.data["env_assertions"]:
                self._function(task, "env_assertions", assertion, self.assertions)

    def fill(self, state: Overlay, wanted: Json) -> None:
        """Merge the ``initialization_data`` of a task into the tables. ToolError where it does not fit."""
        if wanted.get("user_data"):
            raise ToolError("user_data: the user of this domain has no tables")
        for table, records in wanted["data"].items():
            if table not in self.base.tables:
                raise ToolError(f"it fills the unknown table {table!r}")
            for key, record in records.items():
                state.insert(table, key, merged(state.get(table, key), record))

    def _initialized(self, task: Task, wanted: Json) -> Base:
        """Tables with ``wanted["data"]`` merged in, then ``wanted["actions"]`` run."""
        state = Overlay(self.base)
        try:
            self.fill(state, wanted)
            for action in wanted["actions"]:
                self._function(task, "initialization_actions", action, self.functions)(state, **action["arguments"])
                self.settle(state)
        except (ToolError, *MISUSE) as error:
            raise ConfigError(f"task {task.id}: initial_state cannot be had: {error}") from error
        return laid_over(self.base, state.changes())

    def _function(self, task: Task, key: str, wanted: Json, known: Functions) -> Callable[..., Any]:
        place, name = wanted.get("env_type"), wanted.get("func_name")
        function = known.get((str(place), str(name)))
        fault = f"there is no function {name!r} of env_type {place!r}"
        if function is not None:
            fault = misfit(str(name), function, wanted.get("arguments")) or ""
        if function is None or fault:
            raise ConfigError(f"environment.data: task {task.id}: {key}: {fault}")
        return function


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


def misfit(name: str, function: Callable[..., Any], arguments: Any) -> str | None:
    """What is wrong with the names of a function's arguments, behind the database as its first; None if nothing."""
    if not isinstance(arguments, dict):
        return f"the arguments of {name} must be a JSON object"
    required, known = _argument_names(function)
    if missing := sorted(required - arguments.keys()):
        return f"{name} lacks the argument {missing[0]!r}"
    if unknown := sorted(arguments.keys() - known):
        return f"{name} has no argument {unknown[0]!r}"
    return None


@lru_cache(maxsize=256)
def _argument_names(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str]]:
    """Arguments that a function needs, and all that it takes."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    required = frozenset(one.name for one in parameters if one.default is one.empty)
    return required, frozenset(one.name for one in parameters)


def _refused(text: str) -> ToolResult:
    return ToolResult(f"Error: {text}", error=True)
