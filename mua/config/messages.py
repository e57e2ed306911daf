"""What pydantic found wrong, as one line each: place, key, what was expected, what was given, nearest valid name."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import SecretStr, ValidationError
from pydantic_core import ErrorDetails

from mua.config.near_names import nearest_keys, nearest_value
from mua.config.section import KeyPath, Section, all_keys, alternatives, fields_of
from mua.config.tree import Tree, parse_value
from mua.utils.errors import ConfigError
from mua.utils.masking import mask_credentials

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
_PLAIN_VALUES = {"int_type": (int,), "float_type": (int, float), "bool_type": (bool,)}
_YES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}

MAX_LINES = 20
"""Lines of one message; finding the nearest names of thousands of keys takes long, and nobody reads it."""
_LONGEST_VALUE = 200

Branches: TypeAlias = dict[KeyPath, list[ErrorDetails]]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration."""

    at: str
    """File and line, or the command line."""
    key: str
    """The dotted key; empty for a rule over several."""
    text: str
    """What is wrong, and what to write instead."""

    def __str__(self) -> str:
        return f"{self.at}: {self.key}: {self.text}" if self.key else f"{self.at}: {self.text}"

    def sections(self) -> set[str]:
        """First parts of the keys that are named."""
        return {self.key.partition(".")[0] if self.key else found.partition(".")[0] for found in
                ([self.key] if self.key else _DOTTED.findall(self.text))}  # fmt: skip


def describe_errors(error: ValidationError, tree: Tree, schema: type[Section]) -> list[Problem]:
    """One for each key that is wrong, in the order of the schema."""
    branches: Branches = {}
    for detail in error.errors():
        branches.setdefault(key_of_error(detail, tree.data), []).append(detail)
    found = []
    for key, details in list(branches.items())[:MAX_LINES]:
        found += _problems(key, details, tree, schema)
    if (more := len(branches) - MAX_LINES) > 0:
        found.append(Problem(str(tree.place(())), "", f"and {more} more keys are wrong"))
    return found


def key_of_error(detail: ErrorDetails, data: Any) -> KeyPath:
    """The key an error is about. To a location pydantic adds the names of a union's branches; those are left out."""
    key: list[str] = []
    parts = list(map(str, detail["loc"]))
    for place, part in enumerate(parts):
        if part == "[key]" or not (isinstance(data, dict) or (isinstance(data, list) and part.isdigit())):
            break
        if isinstance(data, dict) and part not in data and place < len(parts) - 1:
            continue
        key.append(part)
        data = data[int(part)] if isinstance(data, list) else data.get(part)
    return tuple(key)


def _problems(key: KeyPath, details: list[ErrorDetails], tree: Tree, schema: type[Section]) -> list[Problem]:
    detail, dotted = details[0], ".".join(key)
    if detail["type"] == "value_error":  # rules over several keys, a line each
        message = detail["msg"].removeprefix("Value error, ")
        found = []
        for line in message.splitlines():  # placed at the first of the keys it names that was written somewhere
            named = (tuple(name.split(".")) for name in _DOTTED.findall(line))
            place = next((tree.places[name] for name in named if name in tree.places), tree.place(key))
            found.append(Problem(str(place), dotted, line))
        return found
    if detail["type"] == "extra_forbidden":
        return [Problem(str(tree.place(key)), dotted, f"unknown key; {_nearest_key(key, tree, schema)}")]
    if detail["type"] == "missing":
        return [Problem(str(tree.place(key)), dotted, "required, but not set" + _of_missing(key, schema))]
    if detail["type"] in ("union_tag_invalid", "union_tag_not_found"):
        return [_of_tag(key, detail, tree)]
    return [Problem(str(tree.place(key)), dotted, _of_value(key, details, tree, schema))]


def _of_tag(key: KeyPath, detail: ErrorDetails, tree: Tree) -> Problem:
    """A member of a union that cannot be told."""
    name = str(detail["ctx"]["discriminator"]).strip("'")
    value = detail["input"].get(name) if isinstance(detail["input"], dict) else None
    choices = re.findall(r"'([^']*)'", str(detail["ctx"].get("expected_tags", "")))
    at, dotted = str(tree.place((*key, name))), ".".join((*key, name))
    if not choices:
        return Problem(at, dotted, "required, but not set: it says which of several sections this is")
    shown = f"expected {_or(map(repr, choices))}, got {mask_credentials(repr(value))[:_LONGEST_VALUE]}"
    near = nearest_value(name, value, choices) if isinstance(value, str) else None
    return Problem(at, dotted, shown + (f"; did you mean {near}?" if near else ""))


def _of_value(key: KeyPath, details: list[ErrorDetails], tree: Tree, schema: type[Section]) -> str:
    """Expected and given."""
    detail = details[0]
    texts = [_EXPECTED.get(d["type"], d["msg"].removeprefix("Input should be ")) for d in details]
    phrases = [f"a number {text}" if text.startswith(("greater", "less")) else text for text in texts]
    value = detail["input"]
    kind = _KINDS.get(type(value), type(value).__name__)
    secret = SecretStr in alternatives(dict(fields_of(key[:-1], schema, tree.data)).get(key[-1]) if key else None)
    if value is None or isinstance(value, bool):
        given = {None: "nothing (null)", True: "true", False: "false"}[value]
    elif detail["type"] == "model_type" or isinstance(value, dict | list) or secret:
        # A section given as one value may be a secret that slipped out by wrong indentation: only its kind is named.
        given = kind
    else:
        shown = mask_credentials(repr(value))
        given = f"{shown if len(shown) <= _LONGEST_VALUE else f'{shown[:_LONGEST_VALUE]}...'} ({kind})"
    line = f"expected {_or(dict.fromkeys(phrases))}, got {given}"
    if isinstance(value, str) and not secret:
        line += _hint_of_text(key, value, details, tree)
    if isinstance(value, str | list) and key == ("environment", "mix"):
        line += "; several domains are written with their shares: {retail: 2, airline: 1}"
    return line


def _hint_of_text(key: KeyPath, value: str, details: list[ErrorDetails], tree: Tree) -> str:
    """What to write in place of a text that is none of the choices, or that looks like the number that is wanted."""
    for detail in details:
        if detail["type"] == "literal_error":
            choices = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
            near = nearest_value(key[-1] if not key[-1].isdigit() else key[-2], value, choices)
            return f"; did you mean {near}?" if near else ""
        if (wanted := _PLAIN_VALUES.get(detail["type"])) is None:
            continue
        if tree.filled.get(key):
            dotted = ".".join(key)
            return f"; what ${{NAME}} fills in stays a string: give it on the command line ({dotted}=$NAME)"
        if bool in wanted and value.lower() in _YES:
            return f"; write {_YES[value.lower()]}"
        plain = value.strip().replace("_", "").replace(",", "")
        with suppress(ConfigError):
            if type(parse_value(plain, ("x",), "").data["x"]) in wanted:
                return f"; write {plain} without quotes"
    return ""


def _or(phrases: Any) -> str:
    return " or ".join(phrases)


def _of_missing(key: KeyPath, schema: type[Section]) -> str:
    """What a section that has to be there needs at least."""
    annotation = dict(fields_of(key[:-1], schema)).get(key[-1])
    inner = fields_of(key, schema) if annotation is not None else []
    if key == ("environment",):
        return "; environment.name is a domain, such as retail: mua env list shows all"
    return f"; set {'.'.join((*key, inner[0][0]))}" if inner else ""


def _nearest_key(key: KeyPath, tree: Tree, schema: type[Section]) -> str:
    """The nearest name in the same section, else the nearest anywhere, else the list of what the section has."""
    siblings = sorted(name for name, _ in fields_of(key[:-1], schema, tree.data))
    everywhere = {".".join(path): path[-1] for path in all_keys(schema)}
    if found := nearest_keys(key, siblings, everywhere):
        return f"did you mean {_or(found)}?{_value_hint(found[0], tree.value(key), schema)}"
    return f"this section has {', '.join(siblings)}" if siblings else "leave it out"


def _value_hint(path: str, value: Any, schema: type[Section]) -> str:
    """What the value given under a wrong key means under the right one, where that takes only certain words."""
    key = tuple(path.split("."))
    annotation = dict(fields_of(key[:-1], schema)).get(key[-1])
    choices = [c for t in alternatives(annotation) if get_origin(t) is Literal for c in get_args(t)]
    if not isinstance(value, str) or not choices or value in choices:
        return ""
    near = nearest_value(key[-1], value, choices)
    return f" {path} has no {value!r}; {f'take {near}' if near else 'it takes ' + ', '.join(map(str, choices))}"
