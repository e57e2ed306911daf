"""What a lease asks of its environment, in one form for every place that an environment runs in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from mua.environment.protocol import Environment, Evaluation, Task, ToolResult, ToolSchema, Transcript, UserControlled
from mua.types import Json
from mua.untrusted import MAX_DEPTH, deeper

DEEPEST_DETAILS = MAX_DEPTH + 50
"""What a policy wrote, and some levels around it."""


class WrongResult(Exception):
    """A method gave something else than the protocol says; the text names both types."""


class ToolLists(NamedTuple):
    """The tools right after a reset."""

    agent: tuple[ToolSchema, ...]
    user: tuple[ToolSchema, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Reset for one task; answered by :class:`ToolLists`."""

    task: Task
    seed: int

    @property
    def name(self) -> str:
        return "reset()"

    def perform(self, environment: Environment) -> ToolLists:
        environment.reset(self.task, self.seed)
        # Asking isinstance of a protocol would take longer than resetting a small environment.
        users = environment.user_tools() if hasattr(environment, "user_tools") else ()
        return ToolLists(tuple(environment.tools()), tuple(users))


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call, of the agent or of the user; answered by a :class:`ToolResult`."""

    tool: str
    arguments: Json
    by_user: bool = False

    @property
    def name(self) -> str:
        return f"user tool {self.tool!r}" if self.by_user else f"tool {self.tool!r}"

    def perform(self, environment: Environment) -> Any:
        if not self.by_user:
            return environment.call(self.tool, self.arguments)
        assert isinstance(environment, UserControlled), "only such environments have schemas to call"
        return environment.user_call(self.tool, self.arguments)


@dataclass(frozen=True, slots=True)
class Judge:
    """The verdict; answered by an :class:`Evaluation`."""

    transcript: Transcript

    @property
    def name(self) -> str:
        return "evaluate()"

    def perform(self, environment: Environment) -> Any:
        return environment.evaluate(self.transcript)


Request: TypeAlias = Reset | Call | Judge
"""``perform`` runs it on an environment and gives its answer, or an awaitable of it."""
_ANSWERS: dict[type, type] = {Reset: ToolLists, Call: ToolResult, Judge: Evaluation}


def checked(request: Request, answer: Any) -> Any:
    """``answer``, if it is of the type that ``request`` is answered by; raises :class:`WrongResult` if not."""
    expected = _ANSWERS[type(request)]
    if not isinstance(answer, expected):
        raise WrongResult(f"gave {type(answer).__name__} instead of {expected.__name__}")
    if isinstance(answer, Evaluation) and deeper(answer.details, DEEPEST_DETAILS):
        raise WrongResult(f"gave details that are nested more than {DEEPEST_DETAILS} deep, which no trace can hold")
    return answer
