"""What somebody says, from a grammar kept as data: thousands of sentences from a page of phrases.

A grammar is YAML: rules with their wordings, and for each split its own::

    train:
      greeting: ["Hi!", "Hello there."]
      cancel: ["{greeting} I [want|would like] to cancel {what}.", ...]
    test:
      ...

``{name}`` is another rule or a value that is handed in, ``[a|b]`` one of several. Wordings under ``always`` belong to
every split, those under ``test`` are never said in training. Validation speaks as training does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from environments.kit.language.patterns import load
from mua.utils.errors import MuaError

Grammar: TypeAlias = Mapping[str, Mapping[str, Sequence[str]]]
_SLOT = re.compile(r"\{(\w+)\}")
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_BEGINNING = re.compile(r"(^|[.!?] )([a-z])(?!\S*[@_\d])")
DEEPEST = 12
"""Rules within rules."""


class Voice:
    """One speaker: the rules of a split, and the chances that choose among them."""

    def __init__(self, grammar: Grammar, split: str, rng: random.Random) -> None:
        self._rules = {**grammar.get("always", {}), **grammar[split if split in grammar else "train"]}
        self._rng = rng

    def __contains__(self, rule: str) -> bool:
        return rule in self._rules

    def say(self, rule: str, **values: str) -> str:
        """A wording of ``rule``; raises :class:`MuaError` for a rule or value that there is not."""
        return _tidy(self._expanded(f"{{{rule}}}", values, 0))

    def _expanded(self, text: str, values: Mapping[str, str], depth: int) -> str:
        if depth > DEEPEST:
            raise MuaError(f"a grammar's rules call each other in a circle near {text[:60]!r}")

        def filled(found: re.Match[str]) -> str:
            name = found[1]
            if name in values:
                return values[name]
            if name not in self._rules:
                raise MuaError(f"a grammar has no rule {name!r}, and no value of this name is given")
            return self._expanded(self._rng.choice(self._rules[name]), values, depth + 1)

        while (chosen := _CHOICE.sub(lambda found: self._rng.choice(found[1].split("|")), text)) != text:
            text = chosen
        return _SLOT.sub(filled, text)


def load_grammar(path: Path) -> Grammar:
    """A grammar from its file."""
    found: Grammar = load(path)
    return found


def _tidy(text: str) -> str:
    """Single spaces, none before a mark, a capital where a sentence begins with a word, no identifier."""
    text = re.sub(r"\s+", " ", text).strip()
    text = re.sub(r" ([.,!?])", r"\1", text)
    return _BEGINNING.sub(lambda found: found[1] + found[2].upper(), text)
