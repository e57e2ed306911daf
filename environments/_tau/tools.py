"""The three tools that tau-bench's domains share: arithmetic, a place to think, and the way to a person.

``calculate`` reads the expression as a syntax tree and knows numbers, ``+ - * /``, the two further operators that are
written with these signs (``**`` and ``//``) and parentheses; nothing is ever evaluated as code, and powers are bounded.
It answers as tau-bench does: a float, rounded to two places.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

from environments.kit.database import Tool, ToolError
from environments.kit.overlay import Overlay
from mua.types import Json, ToolSchema

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


def _calculate(database: Overlay, expression: str) -> str:
    return str(evaluate(expression))


def _think(database: Overlay, thought: str) -> str:
    return ""


def _transfer(database: Overlay, summary: str) -> str:
    return "Transfer successful"


def _schema(name: str, description: str, argument: str, meaning: str) -> ToolSchema:
    properties: Json = {argument: {"type": "string", "description": meaning}}
    return ToolSchema(name, description, {"type": "object", "properties": properties, "required": [argument]})


CALCULATE = Tool(
    _schema(
        "calculate",
        "Work out an arithmetic expression; the result is rounded to cents.",
        "expression",
        "Numbers, + - * /, parentheses and spaces, for example '(12.50 + 3) * 2'.",
    ),
    _calculate,
)
THINK = Tool(
    _schema(
        "think",
        "Write a thought down. Changes nothing, tells nobody, and answers nothing.",
        "thought",
        "What to keep in mind.",
    ),
    _think,
)
TRANSFER = Tool(
    _schema(
        "transfer_to_human_agents",
        "Hand the customer over to a person and end the conversation. Only for what no other tool can settle, or when "
        "the customer insists on a person although a tool could do it.",
        "summary",
        "What the customer wants and what has been done so far.",
    ),
    _transfer,
    terminal=True,
)
