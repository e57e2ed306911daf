"""Check tool arguments against the tool's JSON Schema, with an answer a model can act on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import jsonschema_rs
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError, best_match  # type: ignore[import-untyped]
from referencing import Registry

from mua.environment.protocol import ToolSchema

Checker: TypeAlias = Callable[[Any], str | None]
"""None for arguments that fit, else one line that says what does not."""
_LONGEST = 300
"""Characters of one message: jsonschema quotes the whole offending value."""
_NO_REMOTE: Registry[Any] = Registry()
"""Resolves nothing but references inside the schema; the default would fetch ``$ref`` URLs over the network."""


_MOST = 4096
_by_identity: dict[int, tuple[Any, str, Checker]] = {}
"""Writing a schema down takes ten times as long as checking by it. Holds what it is keyed by, so that no other schema
can get the same identity."""


def validate_arguments(schema: ToolSchema, arguments: Any) -> str | None:
    """None if ``arguments`` fit ``schema.parameters`` (JSON Schema 2020-12), else one line that says what does not.

    ``arguments`` is what the policy wrote, so anything JSON can hold. A schema that is itself wrong is the
    domain's fault and raises (exceptions of ``jsonschema`` and ``jsonschema_rs``).
    """
    known = _by_identity.get(id(schema.parameters))
    if known is None or known[0] is not schema.parameters or known[1] != schema.name:
        if len(_by_identity) >= _MOST:
            _by_identity.clear()
        checker = _checker(schema.name, json.dumps(schema.parameters))
        known = _by_identity[id(schema.parameters)] = (schema.parameters, schema.name, checker)
    return known[2](arguments)


def argument_checker(schema: ToolSchema) -> Checker:
    """:func:`validate_arguments` of one schema, prepared: about a microsecond a call that fits."""
    # The Rust library is some two hundred times as fast and decides; the Python one finds the words.
    slow = Draft202012Validator(schema.parameters, registry=_NO_REMOTE)
    try:
        fits = jsonschema_rs.Draft202012Validator(schema.parameters, retriever=_no_remote).is_valid
    except ValueError:
        fits = slow.is_valid  # a wrong schema: the exception of the Python library says more

    def check(arguments: Any) -> str | None:
        if not isinstance(arguments, dict):
            return f"arguments of {schema.name} must be a JSON object, not {_json_type(arguments)}"
        try:
            if fits(arguments):
                return None
        except (ValueError, OverflowError):
            pass  # NaN and integers of more than 64 bits, which Python's JSON reads and Rust's does not
        error = best_match(slow.iter_errors(arguments))
        return None if error is None else f"invalid arguments for {schema.name}: {_one_line(error)}"

    return check


@lru_cache(maxsize=_MOST)
def _checker(name: str, parameters: str) -> Checker:
    return argument_checker(ToolSchema(name, "", json.loads(parameters)))


def _no_remote(uri: str) -> Any:
    raise ValueError(f"{uri}: tool schemas may only refer to themselves")


def _one_line(error: ValidationError) -> str:
    path = error.json_path.removeprefix("$").removeprefix(".")
    message = " ".join(error.message.split())
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    return f"{path}: {message}" if path else message


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
