"""Cases that stand as data: ``tests/data/cases/<name>.yaml`` maps a test's name to its arguments and their rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from mua.utils.errors import ConfigError

Test = TypeVar("Test", bound=Callable[..., Any])
FOLDER = Path(__file__).parent / "data/cases"


class _Loader(yaml.CSafeLoader):
    """Reads ``!tuple [a, b]`` too."""


_Loader.add_constructor("!tuple", lambda loader, node: tuple(loader.construct_sequence(node, deep=True)))


@cache
def table(name: str) -> dict[str, Any]:
    """What the file holds by its keys, in which each may be a test or a constant."""
    return yaml.load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), _Loader)


def cases_of(name: str) -> Callable[[Test], Test]:
    """Decorates a test to run on the rows that stand under its name."""

    def decorate(test: Test) -> Test:
        ((arguments, rows),) = table(name)[test.__name__].items()
        return pytest.mark.parametrize(arguments, rows)(test)

    return decorate


def write_files(folder: Path, files: dict[str, str | list[Any]]) -> Path:
    """Files by their paths, each a text or lines of JSON; gives the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else "".join(json.dumps(line) + "\n" for line in content))
    return folder


def changed(value: Any, changes: dict[str, Any]) -> Any:
    """``value`` with what stands at each path put in: keys and places divided by ``/``, ``*`` for the first one."""
    for path, new in changes.items():
        *steps, last = ("here/" + path).rstrip("/").split("/")
        whole = inside = {"here": value}
        for step in steps:
            inside = inside[_step(inside, step)]
        inside[_step(inside, last)] = new
        value = whole["here"]
    return value


def _step(inside: Any, step: str) -> Any:
    if step == "*":
        return next(iter(inside)) if isinstance(inside, dict) else 0
    return int(step) if isinstance(inside, list) else step


def refused(message: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """The call is a mistake in the configuration, whose message has this pattern."""
    with pytest.raises(ConfigError, match=message):
        call(*arguments, **options)
