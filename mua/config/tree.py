"""YAML text as plain data plus the place each key was written.

Scalars follow YAML 1.2's core schema, so that ``1e-6`` is a number and ``no`` and ``on`` are strings; YAML 1.1, which
PyYAML implements, has both the other way round. Duplicate keys are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from mua.errors import ConfigError

KeyPath: TypeAlias = tuple[str, ...]

_MAP = "tag:yaml.org,2002:map"
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "null", "bool", "int", "float")}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a key was written: a file and 1-based line, or the command line (``line`` is then None)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(slots=True)
class Tree:
    """Nested dictionaries, lists and scalars, and the place of every key in them."""

    data: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, key: KeyPath) -> Place:
        """The place of ``key``, or of the nearest section around it that was written somewhere."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places[key]

    def merge(self, other: Tree) -> None:
        """Lay ``other`` over this tree: mappings are merged key by key, everything else is replaced."""
        _merge(self.data, other.data)
        self.places |= other.places


def _merge(base: dict[str, Any], over: dict[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


class _Loader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (overrides an attribute of the base class)


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), _first)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16 if text.startswith("0x") else 10)  # YAML 1.1 would read 010 as eight


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def parse(text: str, source: str) -> Tree:
    """The mapping that ``text`` holds. ``source`` names it in messages. Raises :class:`ConfigError`."""
    loader, root = _compose(text, source)
    if root is None or root.tag != _MAP:
        raise ConfigError(f"{source}: expected sections and keys (a YAML mapping), got {_kind(root)}")
    tree = Tree({}, {(): Place(source, 1)})
    tree.data = _convert(loader, root, (), tree, source, frozenset())
    return tree


def parse_value(text: str, key: KeyPath, source: str) -> Tree:
    """One value given for ``key`` outside a file, as a tree that holds just this key."""
    try:
        loader, node = _compose(text, source)
    except ConfigError:
        raise ConfigError(f"{source}: {'.'.join(key)}: the value is not valid YAML; put it in quotes") from None
    tree = Tree({}, {key[:depth]: Place(source) for depth in range(1, len(key) + 1)})
    value = None if node is None else _convert(loader, node, key, tree, source, frozenset())
    for name in reversed(key):
        value = {name: value}
    assert isinstance(value, dict)
    tree.data = value
    tree.places = dict.fromkeys(tree.places, Place(source))
    return tree


def _compose(text: str, source: str) -> tuple[_Loader, yaml.Node | None]:
    try:
        loader = _Loader(text)
        return loader, loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Place(source, mark.line + 1) if mark else source
        raise ConfigError(f"{at}: not valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        raise ConfigError(f"{source}: not valid YAML: character #x{error.character:04x} is not allowed") from None


def _kind(node: yaml.Node | None) -> str:
    names: dict[type, str] = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}
    return names.get(type(node), "nothing (the file is empty)")


def _convert(loader: _Loader, node: yaml.Node, key: KeyPath, tree: Tree, source: str, above: frozenset[int]) -> Any:
    at = Place(source, node.start_mark.line + 1)
    if id(node) in above:
        raise ConfigError(f"{at}: {'.'.join(key)}: this alias contains itself")
    if node.tag not in _TAGS:
        raise ConfigError(f"{at}: {'.'.join(key)}: the YAML tag {node.tag} is not supported")
    above |= {id(node)}
    if isinstance(node, yaml.MappingNode):
        return {
            name: _convert(loader, value, (*key, name), tree, source, above)
            for name, value in _items(node, key, tree, source)
        }
    if isinstance(node, yaml.SequenceNode):
        return [_convert(loader, item, (*key, str(i)), tree, source, above) for i, item in enumerate(node.value)]
    try:
        return loader.construct_object(node)
    except (yaml.MarkedYAMLError, ValueError):  # an explicit tag on text of another kind, such as !!int x
        raise ConfigError(f"{at}: {'.'.join(key)}: the value does not fit its YAML tag") from None


def _items(node: yaml.MappingNode, key: KeyPath, tree: Tree, source: str) -> Iterator[tuple[str, yaml.Node]]:
    seen: dict[str, int] = {}
    for name_node, value in node.value:
        line = name_node.start_mark.line + 1
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{Place(source, line)}: a key must be a plain name, not a list or mapping")
        name = name_node.value
        dotted = ".".join((*key, name))
        if name == "<<":
            raise ConfigError(f"{Place(source, line)}: {dotted}: merge keys are not supported; use extends")
        if name in seen:
            raise ConfigError(f"{Place(source, line)}: {dotted}: set twice; the first is in line {seen[name]}")
        seen[name] = line
        tree.places[(*key, name)] = Place(source, line)
        yield name, value
