"""A JSON Schema of configuration files, for editors: names, types, choices and the documentation of every key.

It describes what a person writes: a file may extend others and then says only what differs, so that no key is required
but the one that tells members of a union apart; and a text may hold ``${NAME}``, which the environment fills in. What
only a whole configuration shows (rules over several keys) is left to ``mua train CONFIG --check``.
"""

from __future__ import annotations

from typing import Any

from mua.config.docs import plain_text
from mua.config.schema import ExperimentConfig
from mua.config.section import Section

_VARIABLE = r"\$\{[A-Za-z_][A-Za-z0-9_]*(:-[^}]*)?\}"
_EXTENDS = {
    "description": "A file, or a list of them, that this one is laid over; relative to this file, or a recipe's name.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def editor_schema(schema: type[Section] = ExperimentConfig) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a file that ``schema`` reads."""
    made = schema.model_json_schema()
    members = {name for union in _unions(made) for name in union}
    for name, section in made.get("$defs", {}).items():
        _relax(section, keep_tag=name in members)
    _relax(made, keep_tag=False)
    made["properties"] = {"extends": _EXTENDS} | made["properties"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made, "title": "mua configuration"}


def _unions(node: Any) -> list[list[str]]:
    """The names of the members of every union in which a key tells them apart."""
    if isinstance(node, list):
        return [names for inner in node for names in _unions(inner)]
    if not isinstance(node, dict):
        return []
    own = []
    if "discriminator" in node:
        own = [[reference.rpartition("/")[2] for reference in node["discriminator"].get("mapping", {}).values()]]
    return own + [names for inner in node.values() for names in _unions(inner)]


def _relax(section: dict[str, Any], *, keep_tag: bool) -> None:
    """Make a section what a file may hold of it."""
    required = section.pop("required", [])
    properties = section.get("properties", {})
    if keep_tag and (tags := [name for name in required if "const" in properties.get(name, {})]):
        section["required"] = tags
    for name, value in properties.items():
        properties[name] = _filled(value)
    if "description" in section:
        section["description"] = plain_text(section["description"])


def _filled(value: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value, whose words a variable may stand for; its description without markup."""
    value = {key: inner for key, inner in value.items() if key != "title"}
    if "description" in value:
        value["description"] = plain_text(value["description"])
    if "enum" in value and all(isinstance(choice, str) for choice in value["enum"]):
        # The choices come first, so that editors offer them.
        choices = {key: value.pop(key) for key in ("enum", "type") if key in value}
        value["anyOf"] = [choices, {"type": "string", "pattern": _VARIABLE}]
    elif "anyOf" in value:
        value["anyOf"] = [_filled(branch) if "enum" in branch else branch for branch in value["anyOf"]]
    return value
