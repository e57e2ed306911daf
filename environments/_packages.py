"""What adapters of other people's function-calling sets share: reading their files, calls and code safely.

Their calls are Python text and their services Python classes. Calls are read by :mod:`ast` and dispatched by name:
nothing is ever evaluated. Code is imported privately: afterwards nothing of it is left in ``sys.modules``, so folders
and versions do not mix.
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mua.types import Json
from mua.utils.errors import ConfigError
from mua.utils.strict_json import MAX_FILE_DEPTH, JsonError, read_file, read_json

_TYPES = {
    "dict": "object", "float": "number", "int": "integer", "str": "string", "bool": "boolean", "tuple": "array",
    "list": "array", "objectArray": "array",
}  # fmt: skip
"""Python's names of types, which the sets use, as JSON Schema's."""
_JSON_TYPES = frozenset({"object", "number", "integer", "string", "boolean", "array", "null"})
_importing = threading.Lock()


class Call(NamedTuple):
    """One call as the data has it."""

    name: str
    positional: tuple[Any, ...]
    named: Json


def read_call(text: str) -> Call:
    """``name(1, key='x')`` as data. Raises ``ValueError`` or ``SyntaxError`` for anything but one call of literals."""
    node = ast.parse(text.strip(), mode="eval").body
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"not a plain call: {text}")
    if any(keyword.arg is None for keyword in node.keywords):
        raise ValueError(f"** is not read: {text}")
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    return Call(node.func.id, tuple(ast.literal_eval(value) for value in node.args), named)


def json_schema(given: Json) -> Json:
    """JSON Schema from the sets' own names of types, nested ones included. A type of neither allows anything."""
    schema = {key: value for key, value in given.items() if key != "type"}
    kind = str(given.get("type"))
    if (kind := _TYPES.get(kind, kind)) in _JSON_TYPES:
        schema["type"] = kind
    if "properties" in schema:
        schema["properties"] = {name: json_schema(inner) for name, inner in schema["properties"].items()}
    if isinstance(schema.get("items"), dict):
        schema["items"] = json_schema(schema["items"])
    return schema


def json_lines(path: Path) -> Iterator[Json]:
    """The objects of a file of JSON lines; raises :class:`ConfigError` that names file and line."""
    try:
        lines = read_file(path).decode("utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"environment.data: {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"environment.data: {path}: not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                yield read_json(line, strict=False, depth=MAX_FILE_DEPTH)
        except JsonError as error:
            raise ConfigError(f"environment.data: {path}:{number}: not a line of JSON ({error})") from None


def import_classes(root: Path, package: str, modules: Mapping[str, str]) -> dict[str, type]:
    """Classes by name from their modules, all of ``package``, which lies in ``root``."""
    with _importing, _private_import(root, package):
        try:
            return {name: getattr(importlib.import_module(module), name) for name, module in modules.items()}
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"environment.data: {root / package}: its services cannot be imported: {error}") from None


@contextmanager
def _private_import(root: Path, package: str) -> Iterator[None]:
    """``package`` is what lies in ``root``, and forgotten afterwards."""
    others = _forget(package)
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(root))
        _forget(package)
        sys.modules.update(others)


def _forget(package: str) -> dict[str, Any]:
    mine = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    return {name: sys.modules.pop(name) for name in mine}
