"""What travellers may care about, read once a process from ``catalog.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mua.errors import MuaError
from mua.types import Json

_FILE = Path(__file__).with_name("catalog.yaml")


@dataclass(frozen=True, slots=True)
class Value:
    """One thing that may be wanted of an attribute."""

    name: str
    wish: str
    """What the traveller wants, plainly: "wants one stop, and a short one"."""
    hints: Sequence[str]
    """Ways to let it be known without saying it."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something that every option of an aspect states."""

    name: str
    asked: re.Pattern[str]
    question: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One part of a trip."""

    name: str
    letter: str
    noun: str
    named: re.Pattern[str]
    attributes: Mapping[str, Attribute]

    def hints(self) -> Iterator[tuple[str, str, str]]:
        """Every (hint, attribute, value)."""
        for attribute in self.attributes.values():
            for value in attribute.values:
                for hint in value.hints:
                    yield hint, attribute.name, value.name


@lru_cache(maxsize=1)
def catalog() -> Mapping[str, Aspect]:
    """The aspects by name."""
    given = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {name: _aspect(name, one) for name, one in given.items()}


def _aspect(name: str, given: Json) -> Aspect:
    attributes = {inner: _attribute(inner, one) for inner, one in given["attributes"].items()}
    return Aspect(name, given["letter"], given["noun"], _pattern(given["named"]), attributes)


def _attribute(name: str, given: Json) -> Attribute:
    values = [Value(value, *_texts(value, texts)) for value, texts in given["values"].items()]
    return Attribute(name, _pattern(given["asked"]), given["question"], tuple(values))


def _texts(value: str, texts: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise MuaError(f"{_FILE}: {value}: give a wish and at least one hint, in quotes if they hold a colon")
    return texts[0], tuple(texts[1:])


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)
