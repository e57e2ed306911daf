"""The grammar of a domain's users: its own wishes and facts over the small talk that all users share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from mua.language.voice import Grammar, load_grammar

_TALK = Path(__file__).with_name("talk.yaml")


def grammar_of(path: Path) -> Grammar:
    """The domain's grammar at ``path``; its rules come before those of the same name in the small talk."""
    own, shared = load_grammar(path), _talk()
    return {part: {**shared.get(part, {}), **(own.get(part) or {})} for part in ("always", "brief", "train", "test")}


def small_talk(rules: Mapping[str, Sequence[str]]) -> Grammar:
    """The small talk of people who are brief, and ``rules``."""
    return {"always": rules, "brief": _talk()["brief"]}


@lru_cache(maxsize=1)
def _talk() -> Grammar:
    return load_grammar(_TALK)
