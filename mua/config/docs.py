"""``docs/configuration.md`` and the JSON Schema for editors, both written from the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from mua.config.schema import ExperimentConfig
from mua.config.section import OrHook, Section, sections_of, tag_of

HEADER = """\
# Configuration

Every key a configuration file may hold. This page is generated from `mua/config/schema.py` by `make docs`; edit the
schema, not the page.

## How a configuration is put together

`mua train CONFIG.yaml key.path=value ...` reads, in this order, each later one laid over the earlier:

1. the files named by `extends:` (one name or a list, relative to the file it stands in),
2. the file itself,
3. the overrides on the command line; their values are YAML.

Mappings are merged key by key; lists and single values are replaced. `${NAME}` and `${NAME:-default}` inside string
values are filled from the environment, and what is filled in stays a string: give numbers as an override
(`trainer.steps=$STEPS`), where the shell fills and YAML reads them. Relative paths are relative to the working
directory; `${MUA_HERE}` is the folder of the file that it stands in. `mua config show CONFIG.yaml` prints the result,
secrets masked. Wherever a file is asked for, also by `extends:`, the name of a recipe (`mua recipes` lists them) is
one: `mua config show qwen3-8b-1x8`.

Types are strict: an integer key takes no `1.0` and no `"1"`; a number key takes integers too. Scalars are read as YAML
1.2 reads them: `1e-6` is a number, `true` and `false` are the only booleans. Unknown keys, keys set twice and
combinations that cannot work are errors, one line each with file, line and key. So is what no configuration needs: a
file of more than 1 MiB or that is no regular file, more than 50 levels or 20,000 values (aliases counted each time),
more than 100 files by `extends:`, integers of more than 64 bits.
"""

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
    return "\n".join([HEADER, *_section("", schema)]).rstrip() + "\n"


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
