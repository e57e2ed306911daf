"""Tools from typed functions: the schema is read from the signature, the description from the docstring."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from environments.kit.database import Tool
from mua.types import Json, ToolSchema

_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def tool_of(function: Callable[..., Any], *, terminal: bool = False) -> Tool:
    """A tool that runs ``function(database, **arguments)``.

    Arguments are annotated ``str``, ``int``, ``float``, ``bool`` or a ``list`` of one of them, and optional where they
    have a default; whatever else is needed is written as a :class:`ToolSchema` by hand. Raises TypeError for another
    annotation or a missing docstring.
    """
    if not function.__doc__:
        raise TypeError(f"{function.__name__} needs a docstring: it is what the policy reads")
    hints = typing.get_type_hints(function)
    arguments = list(inspect.signature(function).parameters.values())[1:]
    parameters: Json = {
        "type": "object",
        "properties": {one.name: _schema(function, one.name, hints.get(one.name)) for one in arguments},
        "required": [one.name for one in arguments if one.default is one.empty],
        "additionalProperties": False,
    }
    return Tool(ToolSchema(function.__name__, inspect.cleandoc(function.__doc__), parameters), function, terminal)


def _schema(function: Callable[..., Any], name: str, hint: Any) -> Json:
    if typing.get_origin(hint) is list:
        return {"type": "array", "items": _schema(function, name, *typing.get_args(hint))}
    if hint not in _TYPES:
        raise TypeError(f"{function.__name__}: argument {name!r} is {hint}; write its schema by hand")
    return {"type": _TYPES[hint]}
