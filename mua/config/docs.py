"""``docs/configuration.md``, which begins with ``configuration_page.md``, and the JSON Schema for editors, both written
from the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from mua.config.schema import ExperimentConfig
from mua.config.section import OrHook, Section, sections_of, tag_of

_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "true, false",
    SecretStr: "secret",
    type(None): "null",
}
_SIGNS = {Gt: ">", Ge: "≥", Lt: "<", Le: "≤"}


def configuration_page(schema: type[Section] = ExperimentConfig) -> str:
    """The whole page as Markdown, ending in one newline."""
    beginning = Path(__file__).with_name("configuration_page.md").read_text(encoding="utf-8")
    return "\n".join([beginning, *_section("", schema)]).rstrip() + "\n"


def _section(path: str, schema: type[Section], heading: str = "") -> Iterator[str]:
    yield f"## {heading or f'`{path}`'}\n" if path else "## Top level\n"
    yield plain_text(schema.__doc__ or "").replace("|", BAR) + "\n"
    yield "| key | type | default | |\n| --- | --- | --- | --- |"
    inside: list[str] = []
    for name, field in schema.model_fields.items():
        key, members, kind = f"{path}.{name}".lstrip("."), sections_of(field.annotation), ""
        for member in members:
            inside += _section(key, member, _heading(key, member) if len(members) > 1 else "")
        if members:
            links = [f"[{_member_name(member)}](#{_anchor(_heading(key, member))})" for member in members]
            links = links if len(members) > 1 else [f"[section](#{_anchor(key)})"]
            kind = ("list of " if get_origin(field.annotation) is list else "") + " or ".join(links)
        kind = kind or _type(field.annotation, field.metadata)
        default = field.get_default(call_default_factory=True)
        if isinstance(default, SecretStr):
            default = default.get_secret_value()
        shown = f"`{json.dumps(default) if isinstance(default, bool) or default is None else default}`"
        if default is PydanticUndefined or isinstance(default, Section):
            shown = "" if isinstance(default, Section) else "**required**"
        text = plain_text(field.description or (members[0].__doc__ if len(members) == 1 else "") or "")
        yield f"| `{key}` | {kind} | {shown} | {text.replace('|', BAR)} |"
    yield from ("", *inside)


BAR = "\\|"
"""A pipe in a cell."""


def _member_name(member: type[Section]) -> str:
    """How a member of a union is told: ``kind: range``, or by its name where no key tells it."""
    tag = tag_of(member)
    return f"{tag[0]}: {tag[1]}" if tag else member.__name__


def _heading(key: str, member: type[Section]) -> str:
    return f"`{key}` with `{_member_name(member)}`"


def _anchor(heading: str) -> str:
    """The address that GitHub and MkDocs give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _type(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*arguments[1:], *metadata])
    if origin is Literal:
        choices = ", ".join(f"`{choice}`" for choice in arguments)
        return f"{choices}, `package.module:name`" if OrHook in metadata else choices
    if origin is dict:
        return f"mapping of names to {_type(arguments[1])}"
    if origin is list:
        name, *bounds = _type(arguments[0]).split(" ", 1)
        return " ".join(["list of", name if name.startswith("`") else f"{name}s", *bounds])
    if arguments:
        return " or ".join(_type(branch) for branch in arguments)
    name = _NAMES.get(annotation, annotation.__name__.lower())
    # A nested Field keeps its bounds in .metadata.
    parts = [part for item in metadata for part in (item, *getattr(item, "metadata", []))]
    bounds = [f"{_SIGNS[type(p)]} {getattr(p, type(p).__name__.lower())}" for p in parts if type(p) in _SIGNS]
    return f"{name} {', '.join(bounds)}".strip()


def plain_text(text: str) -> str:
    """One line: reStructuredText's double back-ticks made single."""
    return re.sub(r"\s+", " ", text).replace("``", "`").strip()


_VARIABLE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}"
_EXTENDS = {
    "description": "A file, or a list of them, that this one is laid over; relative to this file, or a recipe's name.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def editor_schema(schema: type[Section] = ExperimentConfig) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a file that ``schema`` reads."""
    made = _relax(schema.model_json_schema())
    made["properties"] = {"extends": _EXTENDS} | made["properties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "mua configuration"}


def _relax(node: Any) -> Any:
    """What one file may hold: of a section any keys, with those that tell the members of a union apart; for a choice a
    variable. Descriptions are without markup."""
    if isinstance(node, list):
        return [_relax(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    properties = node.get("properties", {})
    found = {key: _relax(inner) for key, inner in node.items() if key != "title" or not isinstance(inner, str)}
    if isinstance(text := node.get("description"), str):
        found["description"] = plain_text(text)
    if isinstance(required := found.pop("required", []), dict):  # a key of this name
        found["required"] = required
    elif tags := [name for name in required if "const" in properties[name]]:
        found["required"] = tags
    if isinstance(choices := node.get("enum"), list) and all(isinstance(choice, str) for choice in choices):
        # The choices come first, so that editors offer them.
        offered = {key: found.pop(key) for key in ("enum", "type") if key in found}
        found["anyOf"] = [offered, {"type": "string", "pattern": _VARIABLE}]
    return found
