"""Check tool arguments against the tool's JSON Schema, with an answer a model can act on, and fit them to it.

Schemas of tool servers are written by others, arguments by policies, and both meet on the event loop. So each step is
bounded: a schema by its size and by its parts with every reference written out; a call by parts times values; patterns
by an engine that takes linear time, or by the length of texts where it cannot. Faults are listed where that is cheap.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

MOST_CHARACTERS = 200_000
"""Of one schema as JSON."""
MOST_PARTS = 20_000
"""Parts of one schema, each counted wherever a reference puts it; what it refers to from within itself once."""
_DEEPEST = 100
"""References and parts inside one another."""
_MOST_HELD = 500_000
"""Parts times values of one call."""
_MOST_COPIED = 20_000
"""Values that the library may copy to list what is wrong: it copies one for each part that does not fit."""
_MOST_SQUARED = 100_000_000
"""Sum of the squared lengths of texts under a pattern that looks around, which takes as long."""
_COMPILE_SECONDS = 0.2
"""Processor time for the patterns of one schema."""
_LIMITS = {"size_limit": 1 << 20, "dfa_size_limit": 1 << 21}
_LINEAR = jsonschema_rs.RegexOptions(**_LIMITS)
_LOOKING_AROUND = jsonschema_rs.FancyRegexOptions(backtrack_limit=10_000, **_LIMITS)

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
    if not any(isinstance(one, float) and one.is_integer() for one in _values_in(arguments)):
        return arguments
    changed: Json = _fit([schema.parameters], arguments, schema.parameters, {})
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


def _values_in(value: Any) -> Iterator[Any]:
    """``value`` and everything inside it."""
    waiting = [value]
    while waiting:
        yield (one := waiting.pop())
        if isinstance(one, dict | list):
            waiting.extend(one.values() if isinstance(one, dict) else one)


def _fit(schemas: list[Any], value: Any, root: Any, known: dict[tuple[int, ...], tuple[list[Json], bool]]) -> Any:
    """``value`` as ``schemas``, parts of ``root`` that all are about it, want its numbers; no deeper than read JSON.

    ``known``: by what stands in the schema, all parts there, and whether they ask for an integer and for no number.
    """
    if (place := tuple(map(id, schemas))) not in known:
        parts, kinds = list(_parts({"allOf": schemas}, root)), set[str]()
        for part in parts:
            said = part.get("type", ())
            kinds |= {said} if isinstance(said, str) else set(said)
            values = [*part.get("enum", ()), *([part["const"]] if "const" in part else [])]
            kinds |= {"integer" if type(one) is int else "number" for one in values if type(one) in (int, float)}
        known[place] = parts, "integer" in kinds and "number" not in kinds
    parts, whole = known[place]
    if isinstance(value, list):
        return [_fit(_schemas_at(parts, at), item, root, known) for at, item in enumerate(value)]
    if isinstance(value, dict):
        return {key: _fit(_schemas_at(parts, key), item, root, known) for key, item in value.items()}
    return int(value) if whole and isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def _parts(schema: Any, root: Any) -> Iterator[Json]:
    """``schema`` and whatever stands in its place or beside it, each once: references, alternatives, branches."""
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += _beside(part, root)


def _beside(part: Json, root: Any) -> list[Any]:
    """What ``part`` says of the same value by parts of its own."""
    found = [inner for key in ("anyOf", "oneOf", "allOf") for inner in part.get(key, ())]
    found += [part[key] for key in ("if", "then", "else") if key in part]
    return found + [_referred(root, part[key]) for key in _REFERENCES if isinstance(part.get(key), str)]


_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def _referred(root: Any, reference: str) -> Any:
    """What a path within ``root`` leads to; None for anything else that a reference may be."""
    found, steps = root, reference.removeprefix("#").split("/")[1:]
    for step in steps:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            found = found.get(step) if isinstance(found, dict) else None
        if isinstance(found, dict) and isinstance(found.get("$id"), str):
            found = None  # paths within it are its own
    return found if re.match("#(/|$)", reference) and isinstance(found, dict | bool) else None


def _schemas_at(parts: Iterable[Json], key: str | int) -> list[Any]:
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
        own += [inner for pattern, inner in part.get("patternProperties", {}).items() if _matcher(pattern)(key)]
        found += own or ([part["additionalProperties"]] if "additionalProperties" in part else [])
    return found


@lru_cache(maxsize=_MOST)
def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a text has what ``pattern`` looks for, as the library sees it."""
    return _validator({"pattern": pattern})[0].is_valid


def _validator(parameters: Json) -> tuple[jsonschema_rs.Validator, bool]:
    """The library's check, and whether its patterns take linear time; raises for what is no schema.

    It is in the dialect that the schema declares. Without one, or with one that nobody knows, it is 2020-12, or draft 7
    for a schema that is one there alone (a tuple as a list of ``items``).
    """
    make: Callable[..., jsonschema_rs.Validator] = jsonschema_rs.validator_for
    if not _DIALECT.search(str(parameters.get("$schema"))):
        parameters = {key: value for key, value in parameters.items() if key != "$schema"}
        make = jsonschema_rs.Draft202012Validator
        if not jsonschema_rs.meta.is_valid(parameters) and jsonschema_rs.Draft7Validator(_DRAFT_7).is_valid(parameters):
            make = jsonschema_rs.Draft7Validator
    for options in (_LINEAR, _LOOKING_AROUND):
        try:
            return make(parameters, retriever=_no_remote, pattern_options=options), options is _LINEAR
        except jsonschema_rs.ValidationError:
            if options is _LOOKING_AROUND:
                raise
    raise AssertionError("the last options have raised")


def _count_parts(part: Any, root: Any, known: dict[int, int], patterns: set[str], depth: int = 0) -> int:
    """Parts of ``part`` with every reference written out; raises ValueError where it cannot be told, or nests too deep.

    ``known`` holds those that were counted, 0 for those under way; ``patterns`` gets all that there are.
    """
    if not isinstance(part, dict):
        return int(isinstance(part, bool))
    if id(part) not in known:
        if depth > _DEEPEST:
            raise ValueError(f"its parts and references are more than {_DEEPEST} inside one another")
        own = part.get("id" if "draft-04" in str(root.get("$schema")) else "$id")
        if depth and isinstance(own, str):
            raise ValueError(f"a part of it has an id of its own, {own[:100]!r}")
        for one in (part[key] for key in _REFERENCES if isinstance(part.get(key), str)):
            if _referred(root, one) is None:
                raise ValueError(f"its reference {one[:100]!r} is no path to a part of it")
        known[id(part)] = 0
        others = ("not", "items", "additionalItems", "additionalProperties")
        inner = _beside(part, root) + [part.get(key) for key in (*_OF_ITEMS, *others)] + part.get("prefixItems", [])
        inner += part["items"] if isinstance(part.get("items"), list) else []
        inner += [one for key in _NAMED for one in part.get(key, {}).values()]
        patterns |= {*part.get("patternProperties", {}), *([part["pattern"]] if "pattern" in part else [])}
        known[id(part)] = 1 + sum(_count_parts(one, root, known, patterns, depth + 1) for one in inner)
    return known[id(part)]


_OF_ITEMS = ("contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies")


def _check_schema(parameters: Json) -> int:
    """How many parts there are; raises ValueError for a schema that could take long, and for none."""
    if len(json.dumps(parameters)) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    patterns: set[str] = set()
    try:
        count = _count_parts(parameters, parameters, {}, patterns)
    except (TypeError, AttributeError):
        raise ValueError("a keyword of it has a value of another type than it takes") from None
    if count > MOST_PARTS:
        raise ValueError(f"its references make more than {MOST_PARTS} parts of it")
    end = time.thread_time() + _COMPILE_SECONDS
    for pattern in sorted(patterns):
        _matcher(pattern)
        if time.thread_time() > end:
            raise ValueError(f"its patterns take more than {_COMPILE_SECONDS:g} s to prepare")
    return count


def _too_large(arguments: Any, parts: int, linear: bool) -> bool:
    """Whether to hold ``arguments`` against so many parts could take long."""
    values = squared = 0
    for one in _values_in(arguments):
        values += 1
        if not linear and isinstance(one, str | dict):
            squared += sum(len(text) ** 2 for text in ([one] if isinstance(one, str) else one))
    return values * parts > _MOST_HELD or squared > _MOST_SQUARED


def _is_listable(root: Json, arguments: Json) -> bool:
    """Whether the library can list at once what is wrong: it keeps a copy of a value for each part, of each branch."""
    left, waiting = _MOST_COPIED, [(root, arguments)]
    while waiting:
        part, value = waiting.pop()
        if not isinstance(part, dict):
            continue
        for _ in _values_in(value):
            left -= 1
            if left <= 0:
                return False
        held = [*_beside(part, root), part.get("not"), *part.get("dependentSchemas", {}).values()]
        waiting += [(inner, value) for inner in held]
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            waiting += [(inner, item) for inner in _schemas_at([part], key)]
            waiting += [(part[name], item) for name in _OF_ITEMS if name in part]
    return True


def argument_checker(schema: ToolSchema) -> Checker:
    """:func:`validate_arguments` of one schema, prepared: some microseconds a call that fits.

    Raises ValueError (of the library or of ours) for a schema that is none, or that could take long to check by.
    """
    parts = _check_schema(schema.parameters)
    validator, linear = _validator(schema.parameters)

    def check(arguments: Any) -> str | None:
        if not isinstance(arguments, dict):
            names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
            found = "null" if arguments is None else names.get(type(arguments), type(arguments).__name__)
            return f"arguments of {schema.name} must be a JSON object, not {found}"
        if _too_large(arguments, parts, linear):
            return f"invalid arguments for {schema.name}: they are too large or too long for its schema"
        if validator.is_valid(arguments):
            return None
        if not _is_listable(schema.parameters, arguments):
            return f"invalid arguments for {schema.name}: they do not fit its schema"
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
        extra = sorted(key for key in value if key not in named and not any(_matcher(one)(key) for one in patterns))
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
