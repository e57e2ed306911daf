"""What pydantic found wrong, as one line each: place, key, what was expected, what was given, nearest valid name."""

from __future__ import annotations

import difflib
import re
from typing import Any, TypeAlias

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from mua.config.section import KeyPath, Section, all_keys, alternatives, fields_of
from mua.config.tree import Tree
from mua.masking import mask_credentials

_KINDS = {int: "an integer", float: "a number", str: "a string", dict: "a section", list: "a list"}
_EXPECTED = {
    "model_type": "a section (keys and values)",
    "dict_type": "a section (keys and values)",
    "list_type": "a list",
    "string_type": "a string (in quotes, should it look like a number)",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "path_type": "a path",
}
_DOTTED = re.compile(r"\b[a-z_0-9-]+(?:\.[a-z_0-9-]+)+\b")

MAX_LINES = 20
"""Lines of one message; finding the nearest names of thousands of keys takes long, and nobody reads it."""
_LONGEST_VALUE = 200

Branches: TypeAlias = dict[KeyPath, list[ErrorDetails]]


def describe_errors(error: ValidationError, tree: Tree, schema: type[Section]) -> list[str]:
    """One line for each key that is wrong, in the order of the schema."""
    branches: Branches = {}
    for detail in error.errors():
        data: Any = tree.data
        key: list[str] = []
        # pydantic appends the name of a union's branch to the location; those are cut off.
        for part in map(str, detail["loc"]):
            if part == "[key]" or not (isinstance(data, dict) or (isinstance(data, list) and part.isdigit())):
                break
            key.append(part)
            data = data[int(part)] if isinstance(data, list) else data.get(part)
        branches.setdefault(tuple(key), []).append(detail)
    lines = [_line(key, details, tree, schema) for key, details in list(branches.items())[:MAX_LINES]]
    if (more := len(branches) - MAX_LINES) > 0:
        lines.append(f"{tree.place(())}: and {more} more keys are wrong")
    return lines


def _line(key: KeyPath, details: list[ErrorDetails], tree: Tree, schema: type[Section]) -> str:
    detail = details[0]
    if detail["type"] == "value_error":  # a rule over several keys: placed at the first one that was written somewhere
        message = detail["msg"].removeprefix("Value error, ")
        named = (tuple(name.split(".")) for name in _DOTTED.findall(message))
        place = next((tree.places[name] for name in named if name in tree.places), tree.place(key))
        return f"{place}: {'.'.join(key)}: {message}" if key else f"{place}: {message}"
    at = f"{tree.place(key)}: {'.'.join(key)}"
    if detail["type"] == "extra_forbidden":
        return f"{at}: unknown key; {_nearest_key(key, schema)}"
    if detail["type"] == "missing":
        return f"{at}: required, but not set"
    texts = [_EXPECTED.get(d["type"], d["msg"].removeprefix("Input should be ")) for d in details]
    phrases = [f"a number {text}" if text.startswith(("greater", "less")) else text for text in texts]
    value = detail["input"]
    kind = _KINDS.get(type(value), type(value).__name__)
    secret = SecretStr in alternatives(dict(fields_of(key[:-1], schema)).get(key[-1]) if key else None)
    if value is None or isinstance(value, bool):
        given = {None: "nothing (null)", True: "true", False: "false"}[value]
    elif detail["type"] == "model_type" or isinstance(value, dict | list) or secret:
        # A section given as one value may be a secret that slipped out by wrong indentation: only its kind is named.
        given = kind
    else:
        shown = mask_credentials(repr(value))
        given = f"{shown if len(shown) <= _LONGEST_VALUE else f'{shown[:_LONGEST_VALUE]}...'} ({kind})"
    line = f"{at}: expected {' or '.join(dict.fromkeys(phrases))}, got {given}"
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        for close in difflib.get_close_matches(detail["input"], choices, n=1):
            line += f"; did you mean {close}?"
    return line


def _nearest_key(key: KeyPath, schema: type[Section]) -> str:
    """The nearest name in the same section, else the nearest anywhere, else the list of what the section has."""
    siblings = sorted(name for name, _ in fields_of(key[:-1], schema))
    close = difflib.get_close_matches(key[-1], siblings, n=1, cutoff=0.7)
    if close:
        return f"did you mean {'.'.join((*key[:-1], close[0]))}?"
    everywhere = {".".join(path): path[-1] for path in all_keys(schema)}
    last = difflib.get_close_matches(key[-1], sorted(set(everywhere.values())), n=1, cutoff=0.8)
    if last:
        return "did you mean " + " or ".join(path for path, name in everywhere.items() if name == last[0]) + "?"
    return f"this section has {', '.join(siblings)}"
