"""Kinds of people: what they know, how much they tell at once, how patient they are, what they get wrong.

Each trait shows in what is said, never only in a number. ``user.personas`` chooses the population of a run;
the task and the seed choose one of it, so that a group of rollouts meets the same person.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from mua.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Persona:
    """One kind of person."""

    name: str
    tells: int = 2
    """Facts told in one answer, at most; the rest has to be asked for again."""
    volunteers: bool = False
    """Whether the first message holds what the person knows, without being asked."""
    talks: float = 0.0
    """Sentences beside the point with an utterance, on average."""
    patience: int = 4
    """Messages that bring the person no further, before it gives up."""
    errs: float = 0.0
    """Probability that a fact is told wrongly at first; it is put right in the next message."""
    forgets: float = 0.0
    """Probability that a fact is not at hand when it is asked for the first time; the second time it is."""
    insists: bool = False
    """Asks once more before it accepts a refusal."""
    wavers: bool = False
    """Takes the first request for a yes back, and agrees to the second."""
    brief: bool = False
    """Says only what is needed, in the same few wordings always."""


PERSONAS = {
    persona.name: persona
    for persona in (
        Persona("brief", brief=True),
        Persona("plain", talks=1.4),
        Persona("terse", tells=1, patience=3, talks=0.5),
        Persona("talkative", talks=2.0, patience=6, tells=3),
        Persona("forthcoming", volunteers=True, tells=4, talks=1.3),
        Persona("forgetful", forgets=0.6, patience=5, talks=1.3),
        Persona("careless", errs=0.5, talks=1.3, patience=5),
        Persona("stubborn", insists=True, talks=1.3),
        Persona("wavering", wavers=True, talks=1.3, patience=5),
        Persona("impatient", patience=1, tells=2, volunteers=True, talks=1.1),
    )
}
DEFAULT = tuple(name for name in PERSONAS if name != "brief")
"""Everybody but those who always say the same."""


def checked(names: Sequence[str]) -> tuple[Persona, ...]:
    """The personas of these names; raises :class:`mua.errors.ConfigError` for one that there is not."""
    for name in names:
        if name not in PERSONAS:
            raise ConfigError(f"user.personas: there is no persona {name!r}; known: {', '.join(PERSONAS)}")
    return tuple(PERSONAS[name] for name in names)


def persona_of(seed: str, population: Sequence[str] = ()) -> Persona:
    """The person that ``seed`` (a task and a number) meets."""
    people = checked(population or DEFAULT)
    return random.Random(f"persona/{seed}").choice(people)
