"""Who a user is and how it talks: the traits of scripted persons, and what a model is told so that it plays one.

A trait shows in what is said, never only in a number. ``user.personas`` chooses the population of a run; the task and
the seed choose one of it, so that a group of rollouts meets the same person.

For a model a domain writes the persona; the rules are the same for all. How such a user talks is a :class:`Style`:
drawn by the seed of the rollout, so that the rollouts of one task meet users who want the same and say it differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import yaml

from mua.environment.user import STOP_SIGNAL
from mua.utils.errors import ConfigError
from mua.utils.seeds import named_random
from mua.utils.strict_json import read_file

_PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))
GREETINGS: Sequence[str] = _PROMPTS["greetings"]
"""What the simulator is greeted with, so that it speaks first. It is no part of the agent's conversation."""
GREETING = GREETINGS[0]
MANNERS: Sequence[str] = _PROMPTS["manners"]
SILENCE = "(The agent said nothing.)"
"""Stands for an empty text of the agent: many endpoints refuse empty messages."""


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


def personas_named(names: Sequence[str]) -> tuple[Persona, ...]:
    """The personas of these names; raises :class:`ConfigError` for one that there is not."""
    for name in names:
        if name not in PERSONAS:
            raise ConfigError(f"user.personas: there is no persona {name!r}; known: {', '.join(PERSONAS)}")
    return tuple(PERSONAS[name] for name in names)


def persona_of(seed: str, population: Sequence[str] = ()) -> Persona:
    """The person that ``seed`` (a task and a number) meets."""
    people = personas_named(population or DEFAULT)
    return named_random("persona", seed).choice(people)


@dataclass(frozen=True, slots=True)
class Style:
    """How one user talks. The default is nobody in particular."""

    manner: str = ""
    greeting: str = GREETING
    """What the user is greeted with; its first utterance answers that."""
    temperature: float | None = None
    """None: the endpoint's."""


def style_of(seed: int, *, manners: bool = True, temperatures: Sequence[float] = ()) -> Style:
    """The style that ``seed`` picks; ``temperatures`` are the lowest and the highest one, or none."""
    rng = named_random("style", seed)
    manner, greeting = rng.choice(MANNERS), rng.choice(GREETINGS)
    temperature = round(rng.uniform(*temperatures), 3) if temperatures else None
    return Style(manner, greeting, temperature) if manners else Style(temperature=temperature)


@dataclass(frozen=True, slots=True)
class Prompt:
    """How a model is told to play a user: ours, or a file's (``user.prompt``)."""

    template: Template | None = None
    """With the fields of :data:`FIELDS`."""

    def text(self, persona: str, manner: str = "", *, tools: bool = False) -> str:
        """The simulator's system prompt for ``persona``; ours are the rules, then who the user is."""
        tool_rules: str = _PROMPTS["tool_rules"] if tools else ""
        persona = persona.strip()
        if self.template is not None:
            return self.template.substitute(persona=persona, manner=manner, stop=STOP_SIGNAL, tool_rules=tool_rules)
        rules: str = _PROMPTS["rules"].replace("$stop", STOP_SIGNAL)
        who = f"Who you are\n{persona}\n\nYour manner\n{manner}\n" if manner else f"Who you are\n{persona}\n"
        return "\n\n".join(filter(None, (rules, tool_rules, who)))


FIELDS = ("persona", "manner", "stop", "tool_rules")
DEFAULT_PROMPT = Prompt()


def load_prompt(path: Path | None) -> Prompt:
    """The prompt in a text file; ``$persona`` has to be in it, and ``$stop``; ``$$`` is a dollar sign.

    Raises :class:`ConfigError` naming file and field.
    """
    if path is None:
        return DEFAULT_PROMPT
    try:
        template = Template(read_file(path).decode())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"user.prompt: cannot read {path}: {error}; give a text file") from error
    if not template.is_valid():
        raise ConfigError(f"user.prompt: {path}: a $ that begins no field; write $$ for a dollar sign")
    found = set(template.get_identifiers())
    known = ", ".join(f"${field}" for field in FIELDS)
    if unknown := sorted(found - set(FIELDS)):
        raise ConfigError(f"user.prompt: {path}: there is no field ${unknown[0]}; known: {known}")
    if missing := [field for field in ("persona", "stop") if field not in found]:
        raise ConfigError(f"user.prompt: {path} must say ${missing[0]} somewhere; known fields: {known}")
    return Prompt(template)
