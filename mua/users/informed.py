"""What a customer's wishes and facts (:mod:`mua.users.scripted`) tell for :class:`mua.environment.domain.Informed`.

A domain makes both from a task once, and three readers use them: its scripted user, the check of what a language model
says in that part (:mod:`mua.users.check`), and whoever measures that check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mua.users.scripted import Fact, Wish


@dataclass(frozen=True, slots=True)
class Part:
    """What the user of a task plays, whoever plays it."""

    wishes: Sequence[Wish]
    facts: Mapping[str, Fact]
    """What it knows whatever the wish is."""

    def known(self) -> dict[str, list[str]]:
        """Every value by its fact: as it is, as it is before a change of mind, as a careless person tells it first."""
        values: dict[str, list[str]] = {}
        for name, value in self._values():
            values.setdefault(name, []).append(value)
        return {name: list(dict.fromkeys(texts)) for name, texts in values.items()}

    def wanted(self) -> list[dict[str, list[str]]]:
        """A mapping for each wish: its verb in words, and the values that tell it."""
        return [{"verb": [wish.verb.replace("_", " ")], **_texts(wish)} for wish in self.wishes]

    def _values(self) -> Iterator[tuple[str, str]]:
        yield from _told(self.facts)
        for wish in self.wishes:
            yield from _told(wish.facts)
            yield from _told(wish.before)
            yield from ((name, value) for name, value in wish.values.items() if value)


def _told(facts: Mapping[str, Fact]) -> Iterator[tuple[str, str]]:
    for name, fact in facts.items():
        yield from ((name, value) for value in (fact.value, fact.wrong) if value)


def _texts(wish: Wish) -> dict[str, list[str]]:
    """What the wish is about: mistakes are no part of it."""
    facts = [*wish.facts.items(), *wish.before.items()]
    named = [*((name, fact.value) for name, fact in facts), *wish.values.items()]
    return {name: [text for key, text in named if key == name and text] for name, text in named if text}
