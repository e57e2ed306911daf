"""What travellers may care about, read once a process from ``catalog.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mua.types import Json
from mua.utils.errors import MuaError

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
    """Empty where nobody cares about the attribute."""
    cues: Sequence[str]
    """Sentences by which a traveller lets on that there is a wish, and not which; none where nobody cares."""
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Aspect:
    """One part of a trip."""

    name: str
    letter: str
    noun: str
    named: re.Pattern[str]
    attributes: Mapping[str, Attribute]
    """By name, in the order of the names: an option states them all."""
    search: Mapping[str, str]
    """What a search states -> the fact of the trip that it is."""
    day: str
    """The fact of the trip that an option's day is."""
    prices: tuple[int, int]
    """EUR."""
    needs: Sequence[str]
    """How an opening asks for it."""
    unseen: bool
    """Stands in the test split alone, which has no other."""

    def cared_for(self) -> list[str]:
        """The attributes that somebody may care about."""
        return [name for name, attribute in self.attributes.items() if attribute.cues]

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


def aspect_of(one: Json) -> Aspect:
    """The aspect of one entry of ``task.data["aspects"]``: the catalog's, or a record's, of which little is known."""
    if "letter" not in one:
        return catalog()[one["aspect"]]
    noun = one["aspect"].replace("_", " ")
    return Aspect(
        one["aspect"], one["letter"], noun, _pattern(rf"\b{re.escape(noun)}s?\b"), {}, {}, "", (0, 0), (), False
    )


def _aspect(name: str, given: Json) -> Aspect:
    try:
        attributes = [_attribute(inner, one) for inner, one in given["attributes"].items()]
        attributes += [_other(inner, *one) for inner, one in given["others"].items()]
        return Aspect(
            name,
            given["letter"],
            given["noun"],
            _pattern(given["named"]),
            {one.name: one for one in sorted(attributes, key=lambda one: one.name)},
            given["search"],
            given["day"],
            (given["prices"][0], given["prices"][1]),
            given["needs"],
            given.get("unseen", False),
        )
    except (KeyError, TypeError) as error:
        raise MuaError(f"{_FILE}: {name}: {type(error).__name__}: {error}; see the head of the file") from error


def _attribute(name: str, given: Json) -> Attribute:
    values = [Value(value, *_texts(value, texts)) for value, texts in given["values"].items()]
    return Attribute(name, _pattern(given["asked"]), given["question"], tuple(given["cues"]), tuple(values))


def _other(name: str, asked: str, *values: str) -> Attribute:
    return Attribute(name, _pattern(asked), "", (), tuple(Value(value, "", ()) for value in values))


def _texts(value: str, texts: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise MuaError(f"{_FILE}: {value}: give a wish and at least one hint, in quotes if they hold a colon")
    return texts[0], tuple(texts[1:])


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)
