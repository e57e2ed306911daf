"""The debates, and what people care about in them: topics with two positions, themes with hints and measures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from mua.environment.protocol import Split
from mua.utils.errors import MuaError

Side = Literal["for", "against"]
_FOLDER = Path(__file__).parent
OTHER: Mapping[Side, Side] = {"for": "against", "against": "for"}


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is counted in a place."""

    text: str
    more_is_better: bool
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Theme:
    """Something that people care about."""

    name: str
    split: Split
    """In whose claims somebody may care about it."""
    heading: str
    words: re.Pattern[str]
    """Find that a text is about it."""
    hints: Sequence[str]
    """How somebody lets it be known that this is on their mind; in none of the words."""
    measures: Sequence[Measure]


@dataclass(frozen=True, slots=True)
class Topic:
    """One debate."""

    name: str
    positions: Mapping[Side, str]
    reasons: Mapping[Side, Sequence[str]]


@lru_cache(maxsize=1)
def topics() -> Mapping[str, Topic]:
    """The debates by name, in the order of ``topics.yaml``."""
    return {given["topic"]: _topic(given) for given in _read("topics.yaml")}


@lru_cache(maxsize=1)
def themes() -> Mapping[str, Theme]:
    """What people care about, by name; raises :class:`MuaError` for a hint that names its theme."""
    return {name: _theme(name, given) for name, given in _read("themes.yaml").items()}


@lru_cache(maxsize=8)
def known_in(split: Split) -> Sequence[Theme]:
    """The themes that there are notes on in the claims of a split: its own, and those of training."""
    return tuple(theme for theme in themes().values() if theme.split in ("train", split))


def _read(name: str) -> Any:
    return yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))


def _topic(given: Mapping[str, Any]) -> Topic:
    sides: tuple[Side, ...] = ("for", "against")
    return Topic(
        given["topic"], {side: given[side] for side in sides}, {side: tuple(given[f"reasons_{side}"]) for side in sides}
    )


def _theme(name: str, given: Mapping[str, Any]) -> Theme:
    words = re.compile(rf"\b(?:{given['words']})", re.IGNORECASE)
    for hint in given["hints"]:
        if found := words.search(hint):
            raise MuaError(f"{_FOLDER / 'themes.yaml'}: {name}: a hint says {found.group()!r}; use none of the words")
    measures = tuple(Measure(text, better == "up", low, high) for text, better, low, high in given["measures"])
    return Theme(name, given["split"], given["heading"], words, tuple(given["hints"]), measures)
