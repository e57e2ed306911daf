"""What service domains have in common: short answers, and all of a domain that is its files' functions."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from environments.kit.canned import Canned
from environments.kit.database import Tool
from environments.kit.overlay import Overlay
from environments.kit.scripted import Part, ScriptedUser
from mua.environment.protocol import Environment, Isolation, Move, PromptStyle, Split, Task
from mua.environment.user import User


def shortened(tool: Tool, short: Callable[[Any], Any] | None) -> Tool:
    """The tool with its answer put through ``short``, if there is one."""
    if short is None:
        return tool

    def run(database: Overlay, **arguments: Any) -> Any:
        return short(tool.run(database, **arguments))

    return dataclasses.replace(tool, run=run)


class Agent(Protocol):
    """One that knows the task, made with a seed and its looseness."""

    def moves(self) -> Generator[Move, str, None]: ...


@dataclass(frozen=True, slots=True)
class Sides:
    """The functions of a domain's files that play and describe both sides."""

    folder: Path
    """Where ``policy.md`` lies."""
    tasks: Callable[[Split], Sequence[Task]]
    customer: Callable[[Task, int, Sequence[str]], ScriptedUser]
    part_of: Callable[[Task], Part]
    """What the customer wants and knows."""
    expert: Callable[[Task, int, float], Agent]
    canned: Mapping[str, Canned]


class ServiceDomain(ABC):
    """Implements :class:`mua.environment.domain.Domain` but for environments and gold, ``Expert``, ``HasPersona`` and
    ``Attacked``."""

    name: str
    isolation: Isolation = "inline"
    peopled: Literal[True] = True
    short_prompt: ClassVar[str]
    sides: ClassVar[Sides]

    @abstractmethod
    def environment(self) -> Environment: ...

    @abstractmethod
    def gold(self, task: Task) -> Sequence[Move]: ...

    def tasks(self, split: Split) -> Sequence[Task]:
        return self.sides.tasks(split)

    def system_prompt(self, style: PromptStyle) -> str:
        return self.short_prompt if style == "short" else (self.sides.folder / "policy.md").read_text(encoding="utf-8")

    def persona(self, task: Task) -> str:
        return str(task.data["instruction"])

    def scripted_user(self, task: Task, seed: int, personas: Sequence[str] = ()) -> User:
        return self.sides.customer(task, seed, personas)

    def known(self, task: Task) -> Mapping[str, Sequence[str]]:
        return self.sides.part_of(task).known()

    def wishes(self, task: Task) -> Sequence[Mapping[str, Sequence[str]]]:
        return self.sides.part_of(task).wanted()

    def expert(self, task: Task, seed: int, loose: float = 0.0) -> Generator[Move, str, None]:
        return self.sides.expert(task, seed, loose).moves()

    def canned(self) -> Mapping[str, Canned]:
        return self.sides.canned
