"""English that the check of users' words looks for, as data: ``wordings.yaml``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from mua.types import Json


@dataclass(frozen=True, slots=True)
class Sort:
    """One sort of thing that somebody may ask to have done."""

    asks: re.Pattern[str]
    allows: re.Pattern[str]
    """What makes it no surprise in a task: ``asks`` and more."""
    near: frozenset[str]
    """Sorts that make it no surprise."""
    vague: bool
    """Ordinary talk names it without wanting it."""


def wording(name: str) -> re.Pattern[str]:
    """The alternatives of one entry, as one pattern."""
    return _any(_read()[name])


def words(name: str) -> frozenset[str]:
    """An entry that is a list of plain words."""
    return frozenset(_read()[name])


@lru_cache(maxsize=1)
def sorts() -> dict[str, Sort]:
    """All of them by name."""
    return {name: _sort(entry) for name, entry in _read()["sorts"].items()}


def allowed_by(text: str) -> set[str]:
    """The sorts that a task, or an agent, of these words makes no surprise."""
    return {name for name, sort in sorts().items() if sort.allows.search(text)}


def _sort(entry: Json) -> Sort:
    asks = entry["asks"]
    near = frozenset(entry.get("near", ()))
    return Sort(_any(asks), _any([*asks, *entry.get("allows", ())]), near, entry.get("vague", False))


def _any(alternatives: list[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{one})" for one in alternatives), re.IGNORECASE | re.MULTILINE)


@lru_cache(maxsize=1)
def _read() -> Json:
    read: Json = yaml.safe_load(Path(__file__).with_name("wordings.yaml").read_text(encoding="utf-8"))
    return read
