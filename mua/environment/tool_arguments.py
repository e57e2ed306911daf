"""Check tool arguments against the tool's JSON Schema, with an answer a model can act on, and fit them to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import unquote

import jsonschema_rs
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError, best_match  # type: ignore[import-untyped]
from referencing import Registry

from mua.types import Json, ToolSchema

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


def fitted(schema: ToolSchema, arguments: Json) -> Json:
    """``arguments`` with whole floats as integers wherever ``schema`` asks for an integer and not for any number.

    JSON has one sort of number, so ``2.0`` is a valid integer (JSON Schema 2020-12, 6.1.1) and passes the check, but
    Python tells 2.0 from 2 in texts and keys. Called once for each call, where it leaves for the environment. Gives the
    same object where there is nothing to change; floats beyond 2**53, which hold no exact integer, stay.
    """
    if not _has_whole_float(arguments):
        return arguments
    changed: Json = _fit(schema.parameters, arguments, schema.parameters)
    return changed


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


def _fit(schema: Any, value: Any, root: Any) -> Any:
    """``value`` as ``schema``, a part of ``root``, wants its numbers. It is no deeper than JSON that was read."""
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) <= 2**53
        return int(value) if whole and _wants_integer(schema, root) else value
    parts = list(_parts(schema, root))
    if isinstance(value, dict):
        return {key: _fit_all(_of_property(parts, key), item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_fit_all(_of_item(parts, place), item, root) for place, item in enumerate(value)]
    return value


def _fit_all(schemas: list[Any], value: Any, root: Any) -> Any:
    if isinstance(value, float):
        return _fit({"anyOf": schemas}, value, root) if schemas else value
    for schema in schemas:
        value = _fit(schema, value, root)
    return value


def _parts(schema: Any, root: Any) -> Iterator[Json]:
    """``schema`` and whatever stands in its place or beside it, each once: references, alternatives, branches."""
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part.get("$ref"), str):
            waiting.append(_referred(part["$ref"], root))
        waiting += [inner for key in ("anyOf", "oneOf", "allOf") for inner in part.get(key, ())]
        waiting += [part.get(key) for key in ("if", "then", "else")]


def _wants_integer(schema: Any, root: Any) -> bool:
    kinds: set[str] = set()
    for part in _parts(schema, root):
        said = part.get("type", ())
        kinds |= {said} if isinstance(said, str) else set(said)
        known = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
        kinds |= {"integer" for one in known if type(one) is int} | {"number" for one in known if type(one) is float}
    return "integer" in kinds and "number" not in kinds


def _of_property(parts: list[Json], key: str) -> list[Any]:
    found = []
    for part in parts:
        own = [part["properties"][key]] if key in part.get("properties", {}) else []
        own += [inner for pattern, inner in part.get("patternProperties", {}).items() if re.search(pattern, key)]
        found += own or ([part["additionalProperties"]] if "additionalProperties" in part else [])
    return found


def _of_item(parts: list[Json], place: int) -> list[Any]:
    found = []
    for part in parts:
        first = part.get("prefixItems", [])
        found += [first[place]] if place < len(first) else [part["items"]] if "items" in part else []
    return found


def _referred(reference: str, root: Any) -> Any:
    """What a reference inside ``root`` names; None for any other."""
    if reference == "#":
        return root
    found = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ("",):
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found


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
