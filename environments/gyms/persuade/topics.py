"""The debates: topics with two positions, and reasons for each with the words by which an argument gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml

from mua.errors import MuaError

Side = Literal["for", "against"]
_FOLDER = Path(__file__).parent
_KEYWORD = re.compile(r"\[([^\]|]+)((?:\|[^\]]+)?)\]")
OTHER: Mapping[Side, Side] = {"for": "against", "against": "for"}


@dataclass(frozen=True, slots=True)
class Theme:
    """Something that people care about."""

    name: str
    words: re.Pattern[str]
    hints: Sequence[str]
    """How somebody lets it be known that this is on their mind."""


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason for a position."""

    theme: Theme
    sentence: str
    keywords: Sequence[re.Pattern[str]]

    def catchwords(self) -> list[str]:
        """Its keywords as they stand in the sentence: "deliveries", "ambulances"."""
        found = (re.search(rf"(?:{one.pattern})\w*", self.sentence, one.flags) for one in self.keywords)
        return [match.group().lower() for match in found if match]

    def strength(self, text: str) -> int:
        """How clearly ``text`` gives this reason: its keywords that stand there, and one more for a word of its theme.

        Below 2 the text does not give it: one keyword alone, or the theme alone, says too little.
        """
        hits = sum(keyword.search(text) is not None for keyword in self.keywords)
        return hits + (self.theme.words.search(text) is not None) if hits else 0


@dataclass(frozen=True, slots=True)
class Topic:
    """One debate."""

    name: str
    positions: Mapping[Side, str]
    reasons: Mapping[Side, Sequence[Reason]]


@lru_cache(maxsize=1)
def topics() -> Mapping[str, Topic]:
    """The debates by name, in the order of ``topics.yaml``."""
    themes = {name: _theme(name, given) for name, given in _read("themes.yaml").items()}
    return {given["topic"]: _topic(given, themes) for given in _read("topics.yaml")}


def _read(name: str) -> Any:
    return yaml.safe_load((_FOLDER / name).read_text(encoding="utf-8"))


def _theme(name: str, given: Mapping[str, Any]) -> Theme:
    return Theme(name, _pattern(given["words"]), tuple(given["hints"]))


def _topic(given: Mapping[str, Any], themes: Mapping[str, Theme]) -> Topic:
    sides: tuple[Side, ...] = ("for", "against")
    reasons = {side: tuple(_reason(text, themes) for text in given[f"reasons_{side}"]) for side in sides}
    for side in sides:
        if len({reason.theme.name for reason in reasons[side]}) < len(reasons[side]):
            raise MuaError(f"{_FOLDER / 'topics.yaml'}: {given['topic']}: two reasons {side} it have the same theme")
    return Topic(given["topic"], {side: given[side] for side in sides}, reasons)


def _reason(text: str, themes: Mapping[str, Theme]) -> Reason:
    theme, _, sentence = text.partition("> ")
    if theme not in themes:
        raise MuaError(f"{_FOLDER / 'topics.yaml'}: {text[:40]!r}: write 'theme> sentence'; known: {', '.join(themes)}")
    keywords = tuple(_pattern(match[1] + match[2]) for match in _KEYWORD.finditer(sentence))
    return Reason(themes[theme], _KEYWORD.sub(r"\1", sentence), keywords)


def _pattern(alternatives: str) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{alternatives})", re.IGNORECASE)
