"""Policies that deserve nothing, as a contract: what they earn says what a reward of a domain is worth.

A domain lists them in ``canned`` (:class:`Canned`). They see what a policy sees, the opening, the tools and what comes
back, and may have learned the training split by heart; they do not look at the task, and they do not try to help. The
contract test holds each under :data:`CEILING` on the test split::

    success                 at most 0.05                                   in domains that judge an episode at its end
    mean reward             at most 0.15 of the expert's mean reward       in gyms, which pay by turn

or, where chance alone gives more, under that chance plus 0.05, with the reason beside it (:attr:`Canned.chance`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from mua.environment.domain import Domain, scripted_user
from mua.environment.protocol import Move, Task
from mua.types import Json, ToolSchema
from mua.utils.seeds import named_random

if TYPE_CHECKING:
    from mua.rollout.episode import EpisodeResult

CEILING = 0.05
"""Success of a canned policy on the test split; also what is added to a chance that is known."""
SHARE_OF_EXPERT = 0.15
"""Mean reward of a canned policy in a gym, as a share of the expert's."""


@dataclass(frozen=True, slots=True)
class Glance:
    """What a canned policy gets to see."""

    opening: str
    """The user's first words."""
    tools: Sequence[ToolSchema]
    training: Sequence[Task]
    """The training split: all of it may be known by heart."""
    rng: random.Random


Player: TypeAlias = Callable[[Glance], Generator[Move, str, None]]
"""Yields a move and is sent what came back: the tool's result, or the user's words."""


@dataclass(frozen=True, slots=True)
class Canned:
    """One policy that deserves nothing."""

    play: Player
    chance: float = 0.0
    """What it earns by luck that no rule can take from it, in the ceiling's unit; 0 where there is none."""
    reason: str = field(default="")
    """Why there is such luck; needed with ``chance``."""

    def __post_init__(self) -> None:
        if bool(self.chance) != bool(self.reason):
            raise ValueError("a chance needs its reason, and a reason its chance")


@runtime_checkable
class Attacked(Protocol):
    """A domain that brings canned policies, at least five."""

    def canned(self) -> Mapping[str, Canned]:
        """Name -> policy."""


async def play_canned(
    domain: Domain, task: Task, seed: int, canned: Canned, personas: Sequence[str] = ()
) -> EpisodeResult:
    """One episode of ``canned`` with the scripted user, of ``personas`` if any; the same for the same arguments."""
    from environments.kit.demonstrate import (
        play,  # domains import this module, and workers need no interpreter of episodes
    )

    def player(opening: str, tools: Sequence[ToolSchema]) -> Generator[Move, str, None]:
        rng = named_random("canned", task.id, seed)
        return canned.play(Glance(opening, tools, domain.tasks("train"), rng))

    return await play(domain, task, seed, player, scripted_user(domain, task, seed, personas))


# Policies that need to know nothing of a domain.


def says(*texts: str) -> Player:
    """Says these in turn, whatever is answered, and the last one until the user has enough."""

    def play(glance: Glance) -> Generator[Move, str, None]:
        for index in range(MOST_MOVES):
            yield texts[min(index, len(texts) - 1)]

    return play


def end_at_once(glance: Glance) -> Generator[Move, str, None]:
    """Leaves without a word."""
    yield from ()


def echo(glance: Glance) -> Generator[Move, str, None]:
    """Says what the user just said."""
    heard = glance.opening
    for _ in range(MOST_MOVES):
        heard = yield heard


def write_at_random(glance: Glance) -> Generator[Move, str, None]:
    """Calls tools drawn at random with arguments drawn from what it heard and from enumerations."""
    heard = [glance.opening]
    for _ in range(MOST_MOVES):
        tool = glance.rng.choice(list(glance.tools))
        heard.append((yield tool.name, arguments_at_random(tool.parameters, heard, glance.rng)))
    yield "Done."


MOST_MOVES = 12
_WORD = re.compile(r"[\w#@.-]*\w")


def arguments_at_random(schema: Json, heard: Sequence[str], rng: random.Random) -> Any:
    """A value that fits ``schema``, its strings and numbers from what was heard."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    kind = schema.get("type", "string")
    if kind == "object":
        return {key: arguments_at_random(inner, heard, rng) for key, inner in schema.get("properties", {}).items()}
    if kind == "array":
        return [arguments_at_random(schema.get("items", {}), heard, rng)]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind in ("integer", "number"):
        return rng.choice(list(_numbers(heard)) or [1])
    return rng.choice(_WORD.findall(" ".join(heard[-3:])) or ["order"])


def _numbers(heard: Sequence[str]) -> Iterator[int]:
    for text in heard[-3:]:
        yield from (int(found) for found in re.findall(r"\b\d{1,6}\b", text))
