"""YAML text as plain data plus the place each key was written.

Scalars follow YAML 1.2's core schema, so that ``1e-6`` is a number and ``no`` and ``on`` are strings; YAML 1.1, which
PyYAML implements, has both the other way round. Duplicate keys are errors, and so is what no configuration needs: more
than :data:`MAX_DEPTH` levels, aliases that multiply, integers of over 64 bits, text that UTF-8 or a path cannot hold.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from mua.config.section import KeyPath
from mua.utils.errors import ConfigError
from mua.utils.strict_json import printable, unpaired_surrogate

MAX_DEPTH = 50
"""Sections and lists inside one another. PyYAML and pydantic take several frames a level, of Python's thousand."""
MAX_VALUES = 20_000
"""Values of one file, those that aliases repeat counted each time."""
MAX_NAME = 200
"""Characters of one key."""

EITHER: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("environment", "name"), ("environment", "mix")),
    (("sft", "data"), ("sft", "stored")),
)
"""Keys of which a section takes one. A later file or override with one replaces an earlier one's other."""

_TAGS: dict[type[yaml.Node], frozenset[str]] = {
    yaml.MappingNode: frozenset({"tag:yaml.org,2002:map"}),
    yaml.SequenceNode: frozenset({"tag:yaml.org,2002:seq"}),
    yaml.ScalarNode: frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("str", "null", "bool", "int", "float")),
}


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """Where a key was written: a file and 1-based line, or the command line (``line`` is then None)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(slots=True)
class Tree:
    """Nested dictionaries, lists and scalars, and the place of every key in them."""

    data: dict[str, Any]
    places: dict[KeyPath, SourceLocation] = field(default_factory=dict)
    filled: dict[KeyPath, bool] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Of the environment, by name, that its strings were filled from."""
    """Texts that the environment filled in, and whether all of their variables were there."""

    def place(self, key: KeyPath) -> SourceLocation:
        """The place of ``key``, or of the nearest section around it that was written somewhere."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places[key]

    def value(self, key: KeyPath) -> Any:
        """What stands at ``key``; None where nothing does."""
        here: Any = self.data
        for name in key:
            if isinstance(here, list) and name.isdigit() and int(name) < len(here):
                here = here[int(name)]
            else:
                here = here.get(name) if isinstance(here, dict) else None
        return here

    def remove(self, key: KeyPath) -> None:
        """Take out a key, or an element of a list with all of it."""
        if (above := self.value(key[:-1])) is not None and self.value(key) is not None:
            del above[int(key[-1]) if isinstance(above, list) else key[-1]]

    def merge(self, other: Tree) -> None:
        """Lay ``other`` over this tree: mappings are merged key by key, everything else is replaced.

        Of two keys that exclude each other (:data:`EITHER`) the one in ``other`` takes the place of the one here.
        """
        for key, rival in (*EITHER, *((b, a) for a, b in EITHER)):
            if _given(other, key) and not _given(other, rival) and self.place(rival).source != other.place(key).source:
                self.remove(rival)
        replaced = set(_merge(self.data, other.data, ()))
        # What stood inside a value that is gone has no place any more: a key missing there is missing in the new one.
        kept = {key: at for key, at in self.places.items() if not any(key[:n] in replaced for n in range(len(key)))}
        self.places = kept | other.places


def _given(tree: Tree, key: KeyPath) -> bool:
    return tree.value(key) not in (None, "", {})


def _merge(base: dict[str, Any], over: dict[str, Any], above: KeyPath) -> Iterator[KeyPath]:
    """Merge, and give the keys whose value was replaced."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            yield from _merge(base[name], value, (*above, name))
        else:
            if name in base:
                yield (*above, name)
            base[name] = value


class _Loader(yaml.SafeLoader):
    """SafeLoader with the implicit types of YAML 1.2's core schema, a bound on depth, and lines as editors count."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._feeds = [found.start() for found in re.finditer("\n", text)]
        self._depth = 0
        self.left = MAX_VALUES

    def line_of(self, mark: yaml.Mark) -> int:
        """The 1-based line of a mark, whose own line also counts NEL, LS and PS, which end no line in YAML 1.2."""
        return bisect_left(self._feeds, mark.index) + 1

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(None, None, f"nested more than {MAX_DEPTH} deep", self.peek_event().start_mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


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
    if len(text) > 1000:
        raise OverflowError
    value = int(text, 16 if text.startswith("0x") else 10)  # YAML 1.1 would read 010 as eight
    if not -(2**63) <= value < 2**64:
        raise OverflowError
    return value


_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def parse(text: str, source: str) -> Tree:
    """The mapping that ``text`` holds. ``source`` names it in messages. Raises :class:`ConfigError`."""
    loader, root = _compose(text, source)
    if not isinstance(root, yaml.MappingNode):
        kinds: dict[type, str] = {yaml.SequenceNode: "a list", yaml.ScalarNode: "a single value"}
        got = kinds.get(type(root), "nothing (the file is empty)")
        raise ConfigError(f"{source}: expected sections and keys (a YAML mapping), got {got}")
    tree = Tree({}, {(): SourceLocation(source, 1)})
    tree.data = _NodeReader(loader, tree, source).value(root, (), frozenset())
    return tree


def parse_value(text: str, key: KeyPath, source: str) -> Tree:
    """One value given for ``key`` outside a file, as a tree that holds just this key."""
    if len(key) > MAX_DEPTH:
        raise ConfigError(f"{source}: {'.'.join(key)[:100]}...: a key of more than {MAX_DEPTH} parts")
    try:
        loader, node = _compose(text, source)
    except ConfigError:
        raise ConfigError(f"{source}: {'.'.join(key)}: the value is not valid YAML; put it in quotes") from None
    tree = Tree({}, {key[:depth]: SourceLocation(source) for depth in range(1, len(key) + 1)})
    value = None if node is None else _NodeReader(loader, tree, source, in_file=False).value(node, key, frozenset())
    for name in reversed(key):
        value = {name: value}
    assert isinstance(value, dict)
    tree.data = value
    return tree


def _compose(text: str, source: str) -> tuple[_Loader, yaml.Node | None]:
    loader = None
    try:
        loader = _Loader(text)
        return loader, loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = SourceLocation(source, loader.line_of(mark)) if mark and loader else source
        raise ConfigError(f"{at}: not valid YAML: {printable(error.problem or error.context or '')}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reason = f"character #x{error.character:04x} is not allowed"
        raise ConfigError(f"{SourceLocation(source, line)}: not valid YAML: {reason}") from None
    except (ValueError, OverflowError):  # PyYAML's own conversions: "\U00110000", %YAML with thousands of digits
        assert loader is not None, "only reading tokens converts"
        at = SourceLocation(source, loader.line_of(loader.get_mark()))
        raise ConfigError(f"{at}: not valid YAML: a number in an escape or directive is out of range") from None


@dataclass(slots=True)
class _NodeReader:
    """Nodes of one text into plain data."""

    loader: _Loader
    tree: Tree
    source: str
    in_file: bool = True

    def value(self, node: yaml.Node, key: KeyPath, above: frozenset[int]) -> Any:
        """The data of ``node``, which stands at ``key`` inside the nodes ``above``."""
        if id(node) in above:
            raise self._error(node, key, "this alias contains itself")
        if len(key) > MAX_DEPTH:
            raise self._beyond(key, f"nested more than {MAX_DEPTH} deep, aliases included")
        if node.tag not in _TAGS[type(node)]:
            raise self._error(node, key, f"the YAML tag {printable(node.tag)} is not supported here")
        self.loader.left -= 1
        if self.loader.left < 0:
            raise self._beyond(key, f"more than {MAX_VALUES} values are read up to here; aliases multiply them")
        above |= {id(node)}
        if isinstance(node, yaml.MappingNode):
            data: dict[str, Any] = {}
            lines: dict[str, int] = {}
            for name_node, inner in node.value:
                if not isinstance(name_node, yaml.ScalarNode):
                    raise self._error(name_node, key, "a key must be a plain name, not a list or mapping")
                name = name_node.value
                if not name or not name.isprintable() or len(name) > MAX_NAME:
                    raise self._error(name_node, key, f"a key must be a plain name, not {name[:40]!a}")
                if name == "<<":
                    raise self._error(name_node, (*key, name), "merge keys are not supported; use extends")
                if name in lines:
                    raise self._error(name_node, (*key, name), f"set twice; the first is in line {lines[name]}")
                lines[name] = self.loader.line_of(name_node.start_mark)
                self.tree.places[(*key, name)] = self._place(name_node)
                data[name] = self.value(inner, (*key, name), above)
            return data
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*key, str(i)), above) for i, item in enumerate(node.value)]
        try:
            value = self.loader.construct_object(node)
        except OverflowError:
            raise self._error(node, key, "an integer of more than 64 bits") from None
        except (yaml.MarkedYAMLError, ValueError, LookupError):  # an explicit tag on another text, such as !!int x
            raise self._error(node, key, "the value does not fit its YAML tag") from None
        if isinstance(value, str) and (fault := unusable_text(value)):
            raise self._error(node, key, fault)
        return value

    def _place(self, node: yaml.Node) -> SourceLocation:
        return SourceLocation(self.source, self.loader.line_of(node.start_mark) if self.in_file else None)

    def _beyond(self, key: KeyPath, what: str) -> ConfigError:
        """An error of the whole value of a first key: a node inside may stand at an alias's other end."""
        name = f"{'.'.join(key[:1])}: " if key else ""
        return ConfigError(f"{self.tree.place(key[:1])}: {name}{what}")

    def _error(self, node: yaml.Node, key: KeyPath, what: str) -> ConfigError:
        name = f"{'.'.join(key)}: " if key else ""
        return ConfigError(f"{self._place(node)}: {name}{what}")


def unusable_text(text: str) -> str | None:
    """What keeps a value from being written, sent or used as a path; None for usable text."""
    if "\0" in text:
        return "the text holds a NUL character"
    return None if unpaired_surrogate(text) is None else "the text holds an unpaired surrogate, which is no character"
