"""What users of a domain understand and speak with: its own wishes and facts, over the small talk that all share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from mua.language.acts import Reader
from mua.language.patterns import load
from mua.language.voice import Grammar, load_grammar

_TALK = Path(__file__).with_name("talk.yaml")


@lru_cache(maxsize=16)
def reader_of(folder: Path) -> Reader:
    """What the users of the domain in ``folder`` understand with, its ``words.yaml``; read once."""
    return Reader(load(folder / "words.yaml"))


@lru_cache(maxsize=16)
def grammar_of(folder: Path) -> Grammar:
    """What they speak with, its ``voice.yaml``: its rules come before those of the same name in the small talk."""
    own, shared = load_grammar(folder / "voice.yaml"), _talk()
    return {part: {**shared.get(part, {}), **(own.get(part) or {})} for part in ("always", "brief", "train", "test")}


def small_talk(rules: Mapping[str, Sequence[str]]) -> Grammar:
    """The small talk of people who are brief, and ``rules``."""
    return {"always": rules, "brief": _talk()["brief"]}


@lru_cache(maxsize=1)
def _talk() -> Grammar:
    return load_grammar(_TALK)
