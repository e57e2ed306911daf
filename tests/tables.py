"""Cases that stand as data: ``tests/data/cases/<name>.yaml`` maps a test's name to its arguments and their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

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
