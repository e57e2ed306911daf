"""Check tool arguments against the tool's JSON Schema, with an answer a model can act on."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError, best_match  # type: ignore[import-untyped]
from referencing import Registry

from mua.environment.protocol import ToolSchema

_LONGEST = 300
"""Characters of one message: jsonschema quotes the whole offending value."""
_NO_REMOTE: Registry[Any] = Registry()
"""Resolves nothing but references inside the schema; the default would fetch ``$ref`` URLs over the network."""


def validate_arguments(schema: ToolSchema, arguments: Any) -> str | None:
    """None if ``arguments`` fit ``schema.parameters`` (JSON Schema 2020-12), else one line that says what does not.

    ``arguments`` is what the policy wrote, so anything JSON can hold. A schema that is itself wrong is the
    domain's fault and raises (``jsonschema`` and ``referencing`` exceptions).
    """
    if not isinstance(arguments, dict):
        return f"arguments of {schema.name} must be a JSON object, not {_json_type(arguments)}"
    validator = Draft202012Validator(schema.parameters, registry=_NO_REMOTE)
    error = best_match(validator.iter_errors(arguments))
    return None if error is None else f"invalid arguments for {schema.name}: {_one_line(error)}"


def _one_line(error: ValidationError) -> str:
    path = error.json_path.removeprefix("$").removeprefix(".")
    message = " ".join(error.message.split())
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    return f"{path}: {message}" if path else message


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
