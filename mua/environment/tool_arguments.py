"""Check tool arguments against the tool's JSON Schema, with an answer a model can act on, and fit them to it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeAlias
from urllib.parse import unquote

import jsonschema_rs

from mua.types import Json, ToolSchema

_DIALECT = re.compile(r"json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema\b")
_DRAFT_7: Json = {"$ref": "http://json-schema.org/draft-07/schema#"}
Checker: TypeAlias = Callable[[Any], str | None]
"""None for arguments that fit, else one line that says what does not."""
_LONGEST = 300
"""Characters of one message: a sentence quotes the whole offending value."""

_MOST = 4096
_by_identity: dict[int, tuple[Any, str, Checker]] = {}
"""Writing a schema down takes ten times as long as checking by it. Holds what it is keyed by, so that no other schema
can get the same identity."""


def validate_arguments(schema: ToolSchema, arguments: Any) -> str | None:
    """None if ``arguments`` fit ``schema.parameters``, else one line that says what does not.

    ``arguments`` is what the policy wrote, so anything JSON can hold. A schema that is itself wrong is the
    domain's fault and raises (exceptions of ``jsonschema_rs``).
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


def without_nulls(value: Any, schema: Any = None, root: Any = None) -> Any:
    """``value`` without the keys that are null in it, at every depth, but those that ``schema``, a part of ``root``,
    requires.

    Tables such as Arrow's have one set of keys for all rows, and null where a row has no such key.
    """
    root = root or schema
    parts = list(_parts(schema, root))
    if isinstance(value, list):
        within = [{"allOf": _schemas_at(parts, place)} for place in range(len(value))]
        return [without_nulls(item, part, root) for item, part in zip(value, within, strict=True)]
    if not isinstance(value, dict):
        return value
    required = {name for part in parts for name in part.get("required", ())}
    return {
        key: without_nulls(item, {"allOf": _schemas_at(parts, key)}, root)
        for key, item in value.items()
        if item is not None or key in required
    }


def _has_whole_float(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_whole_float, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_float, value))
    return isinstance(value, float) and value.is_integer()


def _fit(schema: Any, value: Any, root: Any) -> Any:
    """``value`` as ``schema``, a part of ``root``, wants its numbers. It is no deeper than JSON that was read."""
    if isinstance(value, float):
        if not value.is_integer() or abs(value) > 2**53:
            return value
        kinds: set[str] = set()
        for part in _parts(schema, root):
            said = part.get("type", ())
            kinds |= {said} if isinstance(said, str) else set(said)
            known = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
            kinds |= {"integer" if type(one) is int else "number" for one in known if type(one) in (int, float)}
        return int(value) if "integer" in kinds and "number" not in kinds else value
    parts = list(_parts(schema, root))
    if isinstance(value, dict):
        return {key: _fit_all(_schemas_at(parts, key), item, root) for key, item in value.items()}
    if isinstance(value, list):
        return [_fit_all(_schemas_at(parts, place), item, root) for place, item in enumerate(value)]
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
            reference, found = part["$ref"], root  # one that leads out of ``root`` finds None
            steps = reference.removeprefix("#/").split("/") if reference.startswith("#/") else ("",)
            for step in () if reference == "#" else steps:
                step = unquote(step).replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, dict) else None
            waiting.append(found)
        waiting += [inner for key in ("anyOf", "oneOf", "allOf") for inner in part.get(key, ())]
        waiting += [part.get(key) for key in ("if", "then", "else")]


def _schemas_at(parts: list[Json], key: str | int) -> list[Any]:
    """What ``parts`` say of the property, or the item, at ``key``."""
    found = []
    for part in parts:
        if isinstance(key, int):
            first, others = part.get("prefixItems", []), "items"
            if isinstance(part.get("items"), list):  # before 2020-12
                first, others = part["items"], "additionalItems"
            found += [first[key]] if key < len(first) else [part[others]] if others in part else []
            continue
        own = [part["properties"][key]] if key in part.get("properties", {}) else []
        own += [inner for pattern, inner in part.get("patternProperties", {}).items() if re.search(pattern, key)]
        found += own or ([part["additionalProperties"]] if "additionalProperties" in part else [])
    return found


def argument_checker(schema: ToolSchema) -> Checker:
    """:func:`validate_arguments` of one schema, prepared: about a microsecond a call that fits."""
    validator = _validator(schema.parameters)

    def check(arguments: Any) -> str | None:
        if not isinstance(arguments, dict):
            names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
            found = "null" if arguments is None else names.get(type(arguments), type(arguments).__name__)
            return f"arguments of {schema.name} must be a JSON object, not {found}"
        if validator.is_valid(arguments):
            return None
        fault = _most_telling(list(validator.iter_errors(arguments)), schema.parameters, arguments)
        where = "".join(  # as JSONPath writes it
            f".{step}" if re.match(r"[a-zA-Z][a-zA-Z0-9_]*$", str(step)) else f"[{step!r}]"
            for step in fault.instance_path
        ).removeprefix(".")
        sentence = " ".join(_sentence(fault, schema.parameters, arguments).split())
        if len(sentence) > _LONGEST:
            sentence = f"{sentence[: _LONGEST // 2]} ... {sentence[-_LONGEST // 2 :]}"
        return f"invalid arguments for {schema.name}: {f'{where}: ' if where else ''}{sentence}"

    return check


def _validator(parameters: Json) -> jsonschema_rs.Validator:
    """In the dialect that the schema declares. Without one, or with one that nobody knows, it is read as 2020-12, and
    as draft 7 where it is a schema there alone (a tuple as a list of ``items``)."""
    if _DIALECT.search(str(parameters.get("$schema"))):
        return jsonschema_rs.validator_for(parameters, retriever=_no_remote)
    bare = {key: value for key, value in parameters.items() if key != "$schema"}
    if not jsonschema_rs.meta.is_valid(bare) and jsonschema_rs.Draft7Validator(_DRAFT_7).is_valid(bare):
        return jsonschema_rs.Draft7Validator(bare, retriever=_no_remote)
    return jsonschema_rs.Draft202012Validator(bare, retriever=_no_remote)


@lru_cache(maxsize=_MOST)
def _checker(name: str, parameters: str) -> Checker:
    return argument_checker(ToolSchema(name, "", json.loads(parameters)))


def _no_remote(uri: str) -> Any:
    raise ValueError(f"Unresolvable: {uri}; tool schemas may only refer to themselves")


def _most_telling(
    faults: list[jsonschema_rs.ValidationError], root: Json, arguments: Json
) -> jsonschema_rs.ValidationError:
    """The fault to tell: the shallowest; below alternatives the deepest, if one of them is deeper than the others."""

    def relevance(fault: jsonschema_rs.ValidationError) -> tuple[int, list[str | int], bool, bool]:
        schema, path = _at(root, fault.schema_path[:-1]), fault.instance_path
        kinds = schema.get("type") if isinstance(schema, dict) else None
        fits = kinds is not None and jsonschema_rs.is_valid({"type": kinds}, _at(arguments, path))
        return -len(path), path, fault.kind.name not in ("anyOf", "oneOf"), not fits

    def order(fault: jsonschema_rs.ValidationError) -> list[int]:
        """Where the schema says it: the library has an order of its own."""
        steps, place, part = fault.schema_path, list[int](), root
        for step in steps:
            place.append(list(part).index(step) if isinstance(part, dict) and step in part else 0)
            part = _at(part, [step])
        return place

    best = max(sorted(faults, key=order), key=relevance)
    while inner := [fault for branch in best.kind.as_dict().get("context", ()) for fault in branch]:
        first, *others = sorted(sorted(inner, key=order), key=relevance)[:2]
        if others and relevance(others[0]) == relevance(first):
            break
        best = first
    return best


_SENTENCES = {
    "minimum": "{0!r} is less than the minimum of {1!r}",
    "maximum": "{0!r} is greater than the maximum of {1!r}",
    "exclusiveMinimum": "{0!r} is less than or equal to the minimum of {1!r}",
    "exclusiveMaximum": "{0!r} is greater than or equal to the maximum of {1!r}",
    "multipleOf": "{0!r} is not a multiple of {1!r}",
    "minItems": "{0!r} is too short",
    "maxItems": "{0!r} is too long",
    "minLength": "{0!r} is too short",
    "maxLength": "{0!r} is too long",
    "minProperties": "{0!r} does not have enough properties",
    "maxProperties": "{0!r} has too many properties",
    "pattern": "{0!r} does not match {1!r}",
    "uniqueItems": "{0!r} has non-unique elements",
    "enum": "{0!r} is not one of {1!r}",
    "const": "{1!r} was expected",
    "not": "{0!r} should not be valid under {1!r}",
    "anyOf": "{0!r} is not valid under any of the given schemas",
    "oneOf": "{0!r} is not valid under any of the given schemas",
    "contains": "{0!r} does not contain items matching the given schema",
}
"""What a policy is told, by keyword, of the value and what the schema says: the words of the Python library
``jsonschema``, which policies have read much of. Of other keywords the Rust library's own sentence is told."""


def _sentence(fault: jsonschema_rs.ValidationError, root: Json, arguments: Json) -> str:
    keyword = str(fault.schema_path[-1])
    value, said = _at(arguments, fault.instance_path), _at(root, fault.schema_path)
    if keyword == "type":
        return f"{value!r} is not of type {', '.join(map(repr, said if isinstance(said, list) else [said]))}"
    if keyword == "required":
        return f"{fault.kind.as_dict()['property']!r} is a required property"
    if keyword == "additionalProperties":
        beside = _at(root, fault.schema_path[:-1])
        patterns, named = beside.get("patternProperties", {}), beside.get("properties", {})
        extra = sorted(key for key in value if key not in named and not any(re.search(one, key) for one in patterns))
        listed, one = ", ".join(map(repr, extra)), len(extra) == 1
        if "patternProperties" in beside:
            known = ", ".join(map(repr, sorted(patterns)))
            return f"{listed} {'does' if one else 'do'} not match any of the regexes: {known}"
        return f"Additional properties are not allowed ({listed} {'was' if one else 'were'} unexpected)"
    if said == 1 and keyword in ("minItems", "minLength", "minProperties"):
        return f"{value!r} should be non-empty"
    if said == 0 and keyword in ("maxItems", "maxLength", "maxProperties"):
        return f"{value!r} is expected to be empty"
    usual = fault.kind.name == keyword in _SENTENCES and any(fault.kind.as_dict().get("context", [True]))
    usual = usual and not (said is True and keyword.startswith("exclusive"))  # as draft 4 has it
    return _SENTENCES[keyword].format(value, said) if usual else fault.message


def _at(value: Any, path: Sequence[str | int]) -> Any:
    """What stands at ``path`` in ``value``; None where there is nothing."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value
