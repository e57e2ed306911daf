"""The relations of ``relations.yaml``: where they lead, how documents state them, how questions name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from mua.environment.protocol import Split
from mua.utils.errors import MuaError

Target = Literal["person", "town", "year"]
FILE = Path(__file__).with_name("relations.yaml")


@dataclass(frozen=True, slots=True)
class Relation:
    """What entities of one kind have exactly one of."""

    name: str
    target: Target
    """A kind of entity, or a year."""
    split: Split
    """Questions of this split alone follow it."""
    wordings: Sequence[str]
    """What a document says; ``{}`` is the value."""
    noun: str
    """What a question calls it; ``{x}`` is the entity and ``{sort}`` its sort. Empty for years."""
    question: str
    """How a question ends that asks for it."""


@lru_cache(maxsize=1)
def relations() -> Mapping[str, Mapping[str, Relation]]:
    """By kind of entity and name; raises :class:`MuaError` that names what is wrong in the file."""
    raw: dict[str, dict[str, list[Any]]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {kind: {name: _relation(kind, name, given) for name, given in of.items()} for kind, of in raw.items()}


def _relation(kind: str, name: str, given: list[Any]) -> Relation:
    target, split, wordings, noun, *asked = given
    if target not in get_args(Target) or split not in get_args(Split) or any("{}" not in one for one in wordings):
        raise MuaError(
            f"{FILE}: {kind}.{name}: write [person, town or year, a split, wordings with {{}}, noun, question]"
        )
    if not asked and target != "person":
        raise MuaError(f"{FILE}: {kind}.{name}: leads to a {target}; add how it is asked for")
    question = asked[0] if asked else f"Who is {noun}?".replace("Who is whoever", "Who")
    return Relation(name, target, split, tuple(wordings), noun, question)
